"""A fork server for whole programs: commands of `astraflow`, scripts, and code.

    test --order--> warm server --fork--> program --fork--> its fork server --fork--> services

`python -P -m drivers.warm_server DESCRIPTOR` imports what programs and services import, once for all tests of
a worker. `drivers.warm_programs` is the other side.
"""

import atexit
import ctypes
import importlib
import importlib.util
import os
import runpy
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from astraflow.cli.fork_server import serve
from astraflow.processes.fork_server import early_server
from drivers.process_mark import FOLDER, MARK

_MODULES = (
    "astraflow.run.commands",
    "astraflow.addons.plot.curve",
    "astraflow.addons.view.command",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)
"""What launchers and commands about runs import."""


@dataclass(frozen=True)
class _Child:
    """A forked server: what `ForkServer` needs of `subprocess.Popen`."""

    pid: int

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def main() -> None:
    """Serves; in a fork, runs its program."""
    sys.path.remove(str(Path(__file__).parents[1]))  # programs don't see the tests
    for name in _MODULES:
        importlib.import_module(name)
    become(serve(socket.socket(fileno=int(sys.argv[1]))))


def become(argv: Sequence[str]) -> None:
    """Runs `-m astraflow.cli.main ...`, `-c CODE ...`, or `FILE ...`, as Python does.

    A program that may start services gets a fork server, which needs no imports of its own.
    """
    show_variable(MARK)
    os.chdir(os.environ.pop(FOLDER))
    # What processes import that `multiprocessing` starts.
    sys.modules["__main__"].__spec__ = importlib.util.find_spec("astraflow.cli.main")
    is_command = argv[0] == "-m"
    with early_server(is_wanted=not is_command or argv[2:3] == ["run"], start=fork_server):
        if is_command:
            sys.argv[1:] = argv[2:]
            end_after(partial(run_command, argv[2:]))
        elif argv[0] == "-c":
            sys.argv[:] = ["-c", *argv[2:]]
            sys.path.insert(0, "")
            end_after(partial(exec, compile(argv[1], "<string>", "exec"), {"__name__": "__main__"}))
        else:
            sys.argv[:] = argv
            sys.path.insert(0, str(Path(argv[0]).parent))
            end_after(partial(runpy.run_path, argv[0], run_name="__main__"))


def run_command(arguments: Sequence[str]) -> None:
    """Runs a command of `astraflow`."""
    from astraflow.cli.main import main

    main(arguments)


def end_after(program: Callable[[], object]) -> NoReturn:
    """Runs a program, and ends the process as Python does, except that its modules are not freed: in a fork,
    that copies the memory of all of them, for a quarter of a second."""
    code: object = 0
    try:
        program()
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001 - of any program
        sys.excepthook(*sys.exc_info())
        code = 1
    if not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def fork_server(_: Mapping[str, str]) -> tuple[socket.socket, _Child]:
    """Forks a server. Its own forks never return from here."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        return ours, _Child(pid)
    ours.close()
    os.setsid()
    with open(os.devnull, "r+b") as nothing:
        for fd in range(3):
            os.dup2(nothing.fileno(), fd)
    end_after(partial(run_command, serve(theirs)))


def show_variable(name: str) -> None:
    """Shows the variable's value, and not the server's of the same length, to who looks at this process from
    outside. The kernel reads the environment from this process's memory."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # proc(5): env_start, env_end
    key = f"{name}=".encode()
    place = ctypes.string_at(start, end - start).index(key) + len(key)
    value = os.environ.get(name, "").encode()
    ctypes.memmove(start + place, value, len(value))


if __name__ == "__main__":
    main()

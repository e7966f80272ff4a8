"""Starts programs as forks of a process that has imported everything, one per worker.

A forked program is as good as a new process: `tests/integration/test_fork_server.py` compares services, and
`tests/system/test_warm_programs.py` programs. Where a fork is not possible, programs are new processes.

Programs that others start, such as bash, are forked by a stand-in, which passes its files, its exit code, and
signals on:

    bash --exec--> stand-in --Unix socket--> test worker --order--> warm server --fork--> program
"""

import asyncio
import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from astraflow.processes.fork_server import SERVICE_COMMAND, ChildProcess, ForkServer, start_server
from drivers.process_mark import FOLDER, MARK

__all__ = ["ROOT", "ForkedProgram", "Program", "WarmPrograms", "environment"]

ROOT = Path(__file__).resolve().parents[2]
_LATE = ("ASTRAFLOW_", "PYTEST_", "SSL_CERT_FILE")
"""Prefixes of variables that no library reads when it is imported."""
_FREE = frozenset({"COLUMNS", "OLDPWD", "PATH", "PWD", "SHLVL", "TORCHINDUCTOR_CACHE_DIR", "_"})
"""Further variables of this kind: those of shells, and one that torch sets itself."""
_STAND_IN = """\
#!{python} -IS
import json, os, signal, socket
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect({address!r})
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: link.send(str(int(number)).encode()))
order = {{"argv": [*{words!r}, *__import__("sys").argv[1:]], "env": dict(os.environ), "folder": os.getcwd()}}
socket.send_fds(link, [json.dumps(order).encode()], [0, 1, 2])
code = int(link.recv(16))
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def environment() -> dict[str, str]:
    """The variables of the programs of tests."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


class ForkedProgram:
    """A running program: what tests use of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)

    def fileno(self) -> int:
        """A descriptor that can be read once the program has ended."""
        return self._pidfd

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None as long as the program runs."""
        if self.returncode is None and select.select([self], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end. Raises: TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
            os.close(self._pidfd)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Program: TypeAlias = "subprocess.Popen[bytes] | ForkedProgram"


class WarmPrograms:
    """Owns the warm server, which starts with the first program, and ends with this process."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._env: dict[str, str] = {}
        self._lock = threading.Lock()
        self._address = ""

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], fds: Sequence[int], folder: Path = ROOT
    ) -> Program:
        """Starts Python with arguments `argv`, as a fork if that makes no difference.

        `fds`: descriptors of its standard input, output, and error.
        """
        if pid := self._fork(argv, {**env, FOLDER: str(folder)}, fds):
            return ForkedProgram(pid)
        files = dict(zip(("stdin", "stdout", "stderr"), fds, strict=True))
        return subprocess.Popen([sys.executable, *argv], cwd=folder, env=env, start_new_session=True, **files)

    def run(
        self, argv: Sequence[str], env: Mapping[str, str], folder: Path = ROOT
    ) -> "subprocess.CompletedProcess[str]":
        """Runs a program that ends by itself."""
        with (
            open(os.devnull, "rb") as nothing,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            fds = [file.fileno() for file in (nothing, out, err)]
            code = self.start(argv, env, fds, folder).wait()
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess([*argv], code, out.read(), err.read())

    def write_stand_in(self, path: Path, *words: str) -> None:
        """Writes a program that starts Python with arguments `words`, followed by its own."""
        self._start_server(environment())
        if not self._address:
            self._address = str(Path(tempfile.mkdtemp(prefix="warm-")) / "socket")
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(self._address)
            listener.listen()
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        path.write_text(_STAND_IN.format(python=sys.executable, address=self._address, words=list(words)))
        path.chmod(0o755)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            link, _ = listener.accept()
            threading.Thread(target=self._stand_behind, args=(link,), daemon=True).start()

    def _stand_behind(self, link: socket.socket) -> None:
        """Starts the program of a stand-in, and ends it with the stand-in."""
        message, fds, _, _ = socket.recv_fds(link, 1 << 20, 3)
        order: dict[str, Any] = json.loads(message)
        program = self.start(order["argv"], order["env"], fds, Path(order["folder"]))
        for fd in fds:
            os.close(fd)
        with link:
            pidfd = os.pidfd_open(program.pid)
            while pidfd not in select.select([link, pidfd], [], [])[0]:
                program.send_signal(int(link.recv(16) or signal.SIGKILL))
            os.close(pidfd)
            with contextlib.suppress(OSError):  # the stand-in was killed
                link.send(str(program.wait()).encode())

    def _start_server(self, env: Mapping[str, str]) -> None:
        """Starts the server, which would end with another thread than the main one."""
        if self._server is None and threading.current_thread() is threading.main_thread():
            self._env = _fixed(env)
            self._server = ForkServer(_start)

    def _fork(self, argv: Sequence[str], env: Mapping[str, str], fds: Sequence[int]) -> int:
        """Returns: the process id; 0 if the program can't be forked."""
        if sys.platform != "linux" or not hasattr(os, "pidfd_open") or MARK not in env:
            return 0
        self._start_server(env)
        with self._lock:
            if self._server is None or _fixed(env) != self._env:
                return 0
            forking = self._server.fork([*SERVICE_COMMAND, *argv], env, dict(enumerate(fds)))
            pids: list[int] = []
            # In a thread of its own, because an event loop may run in this one.
            thread = threading.Thread(target=lambda: pids.append(asyncio.run(forking)))
            thread.start()
            thread.join()
            return pids[0]


def _start(env: Mapping[str, str]) -> tuple[socket.socket, ChildProcess]:
    # Its forks replace the value of the mark by their own, of the same length.
    path = os.pathsep.join([str(ROOT / "tests"), *filter(None, [env.get("PYTHONPATH")])])
    own = {MARK: secrets.token_hex(8), "PYTHONPATH": path}
    return start_server({**env, **own}, "drivers.warm_server")


def _fixed(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith(_LATE) and name not in _FREE}

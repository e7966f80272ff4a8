"""The program of a fork server: imports what services share, then becomes one service per order.

    python -P -m astraflow.cli.fork_server DESCRIPTOR ...

`processes.fork_server`, which starts it, says how a service becomes the child of the launcher. The server
runs none of the user's code, draws no random numbers, installs no signal handlers, and has one thread, so a
fork of it is as good as a new process. It ends when the launcher ends.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.service.process_ties import die_with_parent

__all__ = ["Order", "serve"]

_MODULES = (
    "astraflow.cli.main",
    "astraflow.processes.dataflow_process",
    "astraflow.processes.publisher_process",
    "astraflow.processes.rollout_process",
    "astraflow.processes.trainer_process",
    "astraflow.rollout.engines.torch_engine",
    "astraflow.trainer.torch.torch_backend",
    "transformers.modeling_utils",
)
"""What services import, including torch."""
_GC_THRESHOLDS = (50_000, 20, 100)
"""Imported modules stay, so the garbage collector has nothing to do."""
_MAX_FDS = 16
_BUSY_CODE = 3
"""Exit code of a server that has several threads, which don't survive a fork."""


@dataclass(frozen=True, slots=True)
class Order:
    """A service to start."""

    argv: list[str]
    """Arguments of the `astraflow` command."""
    env: dict[str, str]
    cwd: str
    parent: int
    """Process id of the launcher."""
    fds: list[int]
    """The numbers that the received descriptors get; -1: the socket over which the service answers."""


def serve(control: socket.socket, modules: Sequence[str] = _MODULES) -> list[str]:
    """Imports, then serves until the launcher is gone. Returns in services only: the arguments."""
    die_with_parent()
    gc.set_threshold(*_GC_THRESHOLDS)
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        os._exit(_BUSY_CODE)
    while True:
        message, received, _, _ = socket.recv_fds(control, 1, _MAX_FDS)
        if not message:
            os._exit(0)
        if _fork_twice():
            control.close()
            order = os.pread(received[0], os.fstat(received[0]).st_size, 0)
            os.close(received[0])
            return _become(Order(**json.loads(order)), received[1:])
        for fd in received:
            os.close(fd)


def _fork_twice() -> bool:
    """Returns true in the new process, once its parent, the go-between, is gone."""
    read_fd, write_fd = os.pipe()
    between = os.fork()
    if between == 0:
        if os.fork() != 0:
            os._exit(0)
        os.close(write_fd)
        os.read(read_fd, 1)  # until the server closes its end, too
        os.close(read_fd)
        return True
    os.close(read_fd)
    os.waitpid(between, 0)
    os.close(write_fd)
    return False


def _become(order: Order, received: Sequence[int]) -> list[str]:
    """Gives a new process what a service has. Returns: the arguments of its command."""
    os.setsid()
    numbered = dict(zip(order.fds, received, strict=True))
    with socket.socket(fileno=numbered.pop(-1)) as launcher:
        if not _is_wanted(order, launcher):
            os._exit(0)
    _renumber(numbered)
    os.chdir(order.cwd)
    os.environ.clear()
    os.environ.update(order.env)
    for name, generator in (("numpy", "random"), ("torch", "default_generator")):
        if name in sys.modules:  # `random` seeds itself after a fork; hashes of strings stay the server's
            getattr(sys.modules[name], generator).seed()
    program = str(Path(__file__).with_name("main.py"))
    sys.argv = [program, *order.argv]
    _set_title((sys.executable, "-P", "-m", "astraflow.cli.main", *order.argv))
    return order.argv


def _is_wanted(order: Order, launcher: socket.socket) -> bool:
    """Whether the launcher is the parent of this process, and still wants the service."""
    if os.getppid() != order.parent:
        return False
    with contextlib.suppress(OSError):
        launcher.sendall(str(os.getpid()).encode())
        return bool(launcher.recv(1))
    return False


def _renumber(fds: dict[int, int]) -> None:
    """Gives the received descriptors their numbers, which services find in their environment."""
    free = 1 + max(*fds, *fds.values())
    copies = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, free) for number, fd in fds.items()}
    for fd in fds.values():
        os.close(fd)
    for number, copy in copies.items():
        os.dup2(copy, number)
        os.close(copy)


def _set_title(argv: Sequence[str]) -> None:
    """Shows the service's command line, and not the server's, in lists of processes.

    The kernel reads it from this process's memory. If the last byte is not 0, it takes all for one string.
    """
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    start = int(fields[45])  # proc(5): arg_start, arg_end
    size = int(fields[46]) - start
    title = " ".join(argv).encode(errors="replace")[: size - 2]
    ctypes.memmove(start, title.ljust(size - 1, b"\0") + b".", size)


if __name__ == "__main__":
    arguments = serve(socket.socket(fileno=int(sys.argv[1])))
    from astraflow.cli.main import main

    main(arguments)

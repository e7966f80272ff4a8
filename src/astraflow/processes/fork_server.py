"""Starts services as forks of a process that has already imported what they need.

    this process --order, over a socket--> fork server --fork--> go-between --fork--> service
         <------------------------ process id --------------------------------------'

A service spends most of its start on imports, which are the same for all. The server (`cli.fork_server`)
imports them once, while this process loads the recipe, and services share its memory.

The go-between ends at once. This process is the subreaper meanwhile, so the kernel makes the service its
child: it waits for the service and signals it as if it had started it itself, and the service ends with it.
The server is only needed for further starts. If it was killed, or is stopped, this process starts services
the ordinary way, and those that run don't notice.

A fork can't undo what an import has done. Therefore, `can_start` refuses a program other than the `astraflow`
command, and an environment that differs from the server's in a variable that a library may read when it is
imported. There is no server on a machine with a GPU, because a driver that a library has opened doesn't
survive a fork.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeAlias

from astraflow.processes.process_state import state_of
from astraflow.service.process_ties import adopt_orphans

__all__ = [
    "SERVICE_COMMAND",
    "SERVICE_ENVIRONMENT",
    "ChildProcess",
    "ForkServer",
    "ForkedProcess",
    "claim_server",
    "early_server",
    "start_server",
    "thread_variables",
]

_log = logging.getLogger(__name__)

SERVICE_COMMAND = (sys.executable, "-P", "-m", "astraflow.cli.main")
"""The `astraflow` command, as services are started."""
SERVICE_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",  # the processes share the cores, so idle threads must not spin
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
"""Environment variables of all services."""

_APPLIED_LATE = ("ASTRAFLOW_", "PYTORCH_ALLOC_CONF", "SSL_CERT_FILE")
"""Prefixes of variables that are read when they are used, and not when a module is imported."""
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_LOOK_EVERY_S = 1.0
_LONGEST_WAIT_S = 90.0
"""Time limit for an answer of the server, which first imports. That takes half a minute on a busy machine."""
_TITLE_BYTES = 4096
"""Room for the command line of a service, which replaces the server's own in the list of processes."""


def thread_variables(count: int) -> dict[str, str]:
    """The variables that set the number of CPU threads of a process."""
    return {f"{library}_NUM_THREADS": str(count) for library in ("OMP", "MKL", "OPENBLAS", "NUMEXPR")}


class ChildProcess(Protocol):
    """What the process of a fork server or of a rank has: part of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


_Start: TypeAlias = Callable[[Mapping[str, str]], tuple[socket.socket, ChildProcess]]


def start_server(
    env: Mapping[str, str], module: str = "astraflow.cli.fork_server"
) -> tuple[socket.socket, ChildProcess]:
    """Starts the program of a fork server. Returns: the socket that takes orders, and the process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            (sys.executable, "-P", "-m", module, str(theirs.fileno()), " " * _TITLE_BYTES),
            env=env,
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    return ours, process


class ForkServer:
    """A fork server, which ends when `close` is called, or when the thread that made it ends.

    Example: `server = ForkServer()`; `pid = await server.fork(argv, env, {1: log, 2: log})`. `start` starts
    its process with the given environment.
    """

    def __init__(self, start: _Start = start_server) -> None:
        self._env = {**os.environ, **SERVICE_ENVIRONMENT, **thread_variables(1)}
        self._control, self._process = start(self._env)
        self._control.setblocking(False)
        self._turn = asyncio.Lock()
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def can_start(self, argv: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a fork of the server is the same as a new process. `env`: the environment without secrets,
        which no library reads when it is imported."""
        is_own = tuple(argv[: len(SERVICE_COMMAND)]) == SERVICE_COMMAND
        return is_own and not self._is_closed and _fixed(env) == _fixed(self._env)

    async def fork(self, argv: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int]) -> int:
        """Starts a service. Returns: the id of the process, a child of this one; 0 if the server can't.

        `fds`: number of a descriptor in the service -> descriptor of this process.
        """
        async with self._turn:
            if self._is_closed:
                return 0
            ours, theirs = socket.socketpair()
            with ours, _adopting_orphans():
                with theirs:
                    self._send(argv, env, {**fds, -1: theirs.fileno()})
                pid = await self._answer(ours)
                # Only now does the service begin: a caller that was cancelled would not know of it.
                if pid:
                    with contextlib.suppress(OSError):  # it has just been killed
                        ours.send(b"1")
            return pid

    def close(self) -> None:
        """Ends the server. The services that it has started run on."""
        if not self._is_closed:
            self._is_closed = True
            self._control.close()
            self._process.kill()
            self._process.wait()

    def _send(self, argv: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int]) -> None:
        order = {
            "argv": list(argv[len(SERVICE_COMMAND) :]),
            "env": dict(env),
            "cwd": os.getcwd(),
            "parent": os.getpid(),
            "fds": list(fds),
        }
        with open(os.memfd_create("order"), "wb", 0) as file:  # a message would be limited to about 200 KB
            file.write(json.dumps(order).encode())
            with contextlib.suppress(OSError):  # the server has ended, which `_answer` notices
                socket.send_fds(self._control, [b"."], [file.fileno(), *fds.values()])

    async def _answer(self, ours: socket.socket) -> int:
        """Receives the id of the service's process. If there is no answer, gives the server up, and returns
        0."""
        ours.setblocking(False)
        # One read for the whole wait: a read that times out when its answer arrives would lose the answer.
        reading = asyncio.ensure_future(asyncio.get_running_loop().sock_recv(ours, 32))
        try:
            problem = await self._wait_for(reading)
            if not problem:
                return int(reading.result())
        finally:
            reading.cancel()
        self.close()
        _log.warning("the fork server (process %d) %s; services start without it", self.pid, problem)
        return 0

    async def _wait_for(self, reading: asyncio.Future[bytes]) -> str:
        """Waits for an answer. Returns: why there is none; empty if there is one."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _LONGEST_WAIT_S
        while not (await asyncio.wait({reading}, timeout=_LOOK_EVERY_S))[0]:
            if state_of(self.pid) == "stopped" or loop.time() > deadline_s:
                return f"does not answer: it is {state_of(self.pid)}"
        return "" if reading.result() else "has ended"


class ForkedProcess:
    """A service that a fork server has started: what `LocalProcess` needs of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self._end)

    async def wait(self) -> int:
        """Waits for the end. Returns: the exit code, negative for a signal."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def _end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


_early: list[ForkServer] = []
"""The server that a command has started before its own imports, until a launcher claims it."""


@contextlib.contextmanager
def early_server(*, is_wanted: bool, start: _Start = start_server) -> Generator[None]:
    """Starts a server for the launcher that the block will make, if `is_wanted` and there is none yet."""
    if is_wanted and not _early and _is_possible():
        _early.append(ForkServer(start))
    try:
        yield
    finally:
        while _early:
            _early.pop().close()


def claim_server() -> ForkServer | None:
    """The server that was started early, or a new one. The caller closes it. None if this machine can't have
    one."""
    if _early:
        return _early.pop()
    return ForkServer() if _is_possible() else None


def _is_possible() -> bool:
    is_linux = sys.platform == "linux" and hasattr(os, "pidfd_open")
    has_torch = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
    return is_linux and has_torch and not any(path.exists() for path in _GPU_FILES)


def _fixed(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that a library may read when it is imported."""
    return {name: value for name, value in env.items() if not name.startswith(_APPLIED_LATE)}


@contextlib.contextmanager
def _adopting_orphans() -> Generator[None]:
    """Makes this process the parent of orphans below it."""
    adopt_orphans()
    try:
        yield
    finally:
        adopt_orphans(is_wanted=False)

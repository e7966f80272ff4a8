"""Starts the processes of a run on this machine.

Each process is its own session (a Ctrl-C in the terminal reaches only the launcher), writes to its own log,
and dies with the launcher, however that dies: it inherits the read end of a pipe whose write end only the
launcher holds. What a process leaves behind in its session is ended with it. Ends processes by id, never by
name.
"""

import asyncio
import contextlib
import os
import signal
import time
from types import TracebackType

from astraflow.errors import ConfigError
from astraflow.protocols import ProcessHandle, ProcessSpec
from astraflow.service import PARENT_FD_VARIABLE

__all__ = ["LocalLauncher", "LocalProcess"]

_LOCAL_NAMES = frozenset({"", "localhost", "127.0.0.1", "::1"})


class LocalProcess:
    """A process that this machine runs; the leader of its own session."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Its process id, which is its session's as well."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, negative for a signal; what it left in its session is ended first."""
        code = await self._process.wait()
        self._signal_session(signal.SIGKILL)
        return code

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM); nothing if it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Ends it and everything in its session (SIGKILL)."""
        if self._process.returncode is None:
            self._signal_session(signal.SIGKILL)

    def _signal_session(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class LocalLauncher:
    """Starts processes on this machine; use as a context manager, which owns the pipe to the children.

    Example: `with LocalLauncher() as launcher: handle = await launcher.start(spec)`.
    """

    def __init__(self) -> None:
        self._read_fd, self._write_fd = os.pipe()

    def __enter__(self) -> "LocalLauncher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the pipe: every child that still runs stops."""
        for fd in (self._read_fd, self._write_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process. Raises: ConfigError for another host, or a program that does not exist."""
        if spec.host not in _LOCAL_NAMES:
            raise ConfigError(
                f"{spec.name}: host {spec.host!r} is not this machine, and the local launcher starts "
                "processes here only; on another machine, run `astraflow join URL` there"
            )
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, **spec.env, PARENT_FD_VARIABLE: str(self._read_fd)}
        with spec.log_path.open("ab", buffering=0) as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {spec.name} starts\n".encode())
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    pass_fds=(self._read_fd,),
                    start_new_session=True,
                )
            except OSError as err:
                raise ConfigError(f"{spec.name}: cannot start {spec.argv[0]!r}: {err.strerror}") from err
        return LocalProcess(process)

"""Starts the processes of a run on this machine.

Each process leads a session of its own, so that a Ctrl-C in the terminal reaches only the launcher. Two pipes
connect it to the launcher:

- The process inherits the read end of the first pipe. Only the launcher holds the write end, so the process
  notices when the launcher ends, for whatever reason, and ends too.
- Into the second pipe, the process writes a byte per second from its event loop, as a sign of life.

When a process ends, everything that is left in its session is killed. Processes are signalled by id, never by
name.
"""

import asyncio
import contextlib
import os
import signal
import time
from pathlib import Path
from types import TracebackType

from astraflow.errors import ConfigError
from astraflow.protocols import ProcessHandle, ProcessSpec
from astraflow.service.process import LIFE_FD_VARIABLE, PARENT_FD_VARIABLE, STACKS_SIGNAL

__all__ = ["LocalLauncher", "LocalProcess"]

_STACKS_GRACE_S = 1.0
"""Time for a process to write its stacks."""


class _SignsOfLife:
    """The read end of the pipe into which a process writes its signs of life."""

    def __init__(self, read_fd: int) -> None:
        self._fd = read_fd
        self._loop = asyncio.get_running_loop()
        self._last_s = -1.0
        """When the newest sign was read, by the clock of the loop; negative before the first."""
        self._first_seen = asyncio.Event()
        self._is_closed = False
        os.set_blocking(read_fd, False)
        self._loop.add_reader(read_fd, self._read)

    def _read(self) -> None:
        if self._is_closed:
            return  # `silence` was asleep while the process ended
        try:
            signs = os.read(self._fd, 4096)
        except BlockingIOError:
            return
        if not signs:
            self._loop.remove_reader(self._fd)  # the process has ended
            return
        self._last_s = self._loop.time()
        self._first_seen.set()

    async def silence(self, longest_s: float) -> None:
        """Returns once the newest sign is `longest_s` old; never after `close`."""
        await self._first_seen.wait()
        while (left_s := self._last_s + longest_s - self._loop.time()) > 0:
            await asyncio.sleep(left_s)
            self._read()  # signs may wait in the pipe because this process was stopped itself
        if self._is_closed:
            await self._loop.create_future()

    def close(self) -> None:
        """May be called again, since several tasks may wait for the end of a process."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class LocalProcess:
    """A process on this machine that leads a session of its own."""

    def __init__(self, process: asyncio.subprocess.Process, life_fd: int) -> None:
        self._process = process
        self._signs = _SignsOfLife(life_fd)

    @property
    def pid(self) -> int:
        """Its process id, which is also the id of its session."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit code, negative for a signal. Everything left in its session is killed first."""
        code = await self._process.wait()
        self._signal_session(signal.SIGKILL)
        self._signs.close()
        return code

    async def silence(self, longest_s: float) -> str:
        """As in the protocol. Only services of ours show signs of life, so only they get the signal."""
        await self._signs.silence(longest_s)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, STACKS_SIGNAL)
        await asyncio.sleep(_STACKS_GRACE_S)
        return _state_of(self._process.pid)

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM). Does nothing if it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Kills it and everything in its session (SIGKILL)."""
        if self._process.returncode is None:
            self._signal_session(signal.SIGKILL)

    def _signal_session(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class LocalLauncher:
    """Starts processes on this machine; a context manager that owns the pipe to the processes.

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
        """Closes the pipe, so that every process that still runs stops."""
        for fd in (self._read_fd, self._write_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process. Raises: ConfigError if its program does not exist."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        life_read_fd, life_write_fd = os.pipe()
        env = {
            **os.environ,
            **spec.env,
            **spec.secrets,
            PARENT_FD_VARIABLE: str(self._read_fd),
            LIFE_FD_VARIABLE: str(life_write_fd),
        }
        with spec.log_path.open("ab", buffering=0) as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {spec.name} starts\n".encode())
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=env,
                    pass_fds=(self._read_fd, life_write_fd),
                    start_new_session=True,
                )
            except OSError as err:
                os.close(life_read_fd)
                raise ConfigError(f"{spec.name}: cannot start {spec.argv[0]!r}: {err.strerror}") from err
            finally:
                os.close(life_write_fd)
        return LocalProcess(process, life_read_fd)


def _state_of(pid: int) -> str:
    """Whether a silent process is stopped or hangs, in words, as far as the system knows."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return "it does not answer"
    state = next((line.split()[1] for line in status.splitlines() if line.startswith("State:")), "")
    if state in {"T", "t"}:
        return "it is stopped (SIGSTOP, or a debugger)"
    return "its event loop hangs; the stacks of its threads are in its log"

"""Starts the processes of a run on this machine.

Each process leads its own session, so that Ctrl-C in the terminal reaches only the launcher. Two pipes
connect it to the launcher:

- The process inherits the read end of the first pipe. Only the launcher holds the write end, so the process
  notices when the launcher ends, for whatever reason, and ends too.
- Once per second, the event loop of the process writes a byte into the second pipe, as a sign of life.

A stopped process can't write its stacks. Before a process is killed because of its silence, it is therefore
continued for a second, in which it writes what it was doing into its log.

When a process ends, everything that is left in its session is killed. Processes are signaled by id, never by
name.
"""

import asyncio
import contextlib
import os
import signal
import time
from dataclasses import replace

from astraflow.errors import ConfigError
from astraflow.processes.fork_server import ForkedProcess, ForkServer
from astraflow.processes.process_state import (
    STOPPED,
    Starvation,
    cpu_use,
    memory_of,
    state_of,
    stopped_children,
)
from astraflow.protocols import ProcessHandle, ProcessLife, ProcessSpec
from astraflow.service.process import LIFE_FD_VARIABLE, LIFE_SIGN_EVERY_S, PARENT_FD_VARIABLE, STACKS_SIGNAL

__all__ = ["LocalLauncher", "LocalProcess"]

_STACKS_GRACE_S = 1.0
"""Time for a process to write its stacks."""
_HANGS_AFTER_S = 3 * LIFE_SIGN_EVERY_S
"""A process that isn't stopped and misses this many signs of life hangs or gets no CPU time."""
_LOOK_EVERY_S = 3.0
"""Time between two searches for stopped children."""


class _SignsOfLife:
    """The read end of the pipe into which a process writes its signs of life."""

    def __init__(self, read_fd: int) -> None:
        self._fd = read_fd
        self._loop = asyncio.get_running_loop()
        self._last_s = -1.0
        """When the newest sign was read, in the event loop's time; negative before the first."""
        self._first_seen = asyncio.Event()
        self._is_closed = False
        os.set_blocking(read_fd, False)
        self._loop.add_reader(read_fd, self._read)

    def _read(self) -> None:
        if self._is_closed:
            return  # the process ended while `silence` was asleep
        try:
            signs = os.read(self._fd, 4096)
        except BlockingIOError:
            return
        if not signs:
            self._loop.remove_reader(self._fd)  # the process has ended
            return
        self._last_s = self._loop.time()
        self._first_seen.set()

    def silent_s(self) -> float | None:
        """Seconds since the newest sign; None before the first."""
        self._read()
        return self._loop.time() - self._last_s if self._first_seen.is_set() else None

    async def silence(self, longest_s: float) -> None:
        """Returns once the newest sign is `longest_s` old; never after `close`."""
        await self._first_seen.wait()
        while (left_s := self._last_s + longest_s - self._loop.time()) > 0:
            await asyncio.sleep(left_s)
            self._read()  # signs may wait in the pipe because the launcher itself was stopped
        if self._is_closed:
            await self._loop.create_future()  # the end of the process isn't a silence; never returns

    def close(self) -> None:
        """Closes the pipe. May be called repeatedly, since several tasks may wait for the process's end."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        os.close(self._fd)


class LocalProcess:
    """A process on this machine that leads its own session. Implements `ProcessHandle` and `LifeReporter`."""

    def __init__(self, process: asyncio.subprocess.Process | ForkedProcess, life_fd: int) -> None:
        self._process = process
        self._signs = _SignsOfLife(life_fd)
        self._next_look_s = 0.0
        self._stopped: dict[int, str] = {}
        """Stopped processes that this process started: id -> command."""
        self._starvation = Starvation()
        """Measurements during the present silence."""

    @property
    def pid(self) -> int:
        """The process id, which is also the id of the session."""
        return self._process.pid

    async def wait(self) -> int:
        """Waits for the end, and kills what is left in the session. Returns: the exit code, negative for a
        signal."""
        code = await self._process.wait()
        self._signal_session(signal.SIGKILL)
        self._signs.close()
        return code

    async def silence(self, longest_s: float) -> str:
        """Returns once the process has been silent for `longest_s` and isn't just starved of CPU time.

        A restart wouldn't help a starved process: it would get no processor either, and would have to load
        everything again. Before this returns, the process writes its stacks. Only AstraFlow's own services
        show signs of life, so only they get the signal for that.
        """
        await self._signs.silence(longest_s)
        while self._is_starved():
            await asyncio.sleep(LIFE_SIGN_EVERY_S)
            await self._signs.silence(longest_s)
        is_stopped = state_of(self.pid) == "stopped"
        for number in (STACKS_SIGNAL, signal.SIGCONT):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
        await asyncio.sleep(_STACKS_GRACE_S)
        what = f"it was {STOPPED}" if is_stopped else "its event loop hangs"
        return f"{what}; the stacks of its threads are in its log"

    def life(self) -> ProcessLife:
        """The last sign of life, and what is wrong with the process or with one that it started."""
        return replace(self._condition(), memory_bytes=memory_of(self.pid))

    def _condition(self) -> ProcessLife:
        silent_s = self._signs.silent_s()
        if state_of(self.pid) == "stopped":
            return ProcessLife(
                silent_s, works=False, condition=f"it is {STOPPED}; `kill -CONT {self.pid}` lets it continue"
            )
        now_s = time.monotonic()
        if silent_s is not None and silent_s > _HANGS_AFTER_S:
            return self._silent_life(silent_s)
        self._starvation = Starvation()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _LOOK_EVERY_S
            self._stopped = stopped_children(self.pid)
        return ProcessLife(silent_s, condition=_about_children(self._stopped))

    def _is_starved(self) -> bool:
        """Whether the process waits for a processor, by the measurements of the present silence."""
        self._starvation.look(time.monotonic(), cpu_use(self.pid))
        return bool(self._starvation.text)

    def _silent_life(self, silent_s: float) -> ProcessLife:
        """What is wrong with a process that isn't stopped and shows no sign of life."""
        if self._is_starved():
            advice = "stop other programs on this machine, or give the run fewer services and threads"
            condition = f"it gets no CPU time ({self._starvation.text}); {advice}"
            return ProcessLife(silent_s, works=False, condition=condition, is_starved=True)
        hint = f"`kill -{STACKS_SIGNAL.name[3:]} {self.pid}` writes the stacks of its threads into its log"
        return ProcessLife(silent_s, works=False, condition=f"its event loop hangs; {hint}")

    def terminate(self) -> None:
        """Asks the process to stop (SIGTERM), unless it has ended."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Kills the process and everything in its session (SIGKILL)."""
        if self._process.returncode is None:
            self._signal_session(signal.SIGKILL)

    def _signal_session(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)


class LocalLauncher:
    """Starts processes on this machine. Owns the pipe to the processes, until `close`.

    Example: `handle = await LocalLauncher().start(spec)`. A `server` starts services faster; the launcher
    closes it.
    """

    def __init__(self, server: ForkServer | None = None) -> None:
        self._server = server
        self._read_fd, self._write_fd = os.pipe()

    def close(self) -> None:
        """Closes the pipe, which stops all processes that still run."""
        if self._server is not None:
            self._server.close()
        for fd in (self._read_fd, self._write_fd):
            with contextlib.suppress(OSError):
                os.close(fd)

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process. Raises: ConfigError if its program does not exist."""
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        life_read_fd, life_write_fd = os.pipe()
        try:
            with spec.log_path.open("ab", buffering=0) as log:
                log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {spec.name} starts\n".encode())
                process = await self._start(spec, log.fileno(), life_write_fd)
        except BaseException:
            os.close(life_read_fd)
            raise
        finally:
            os.close(life_write_fd)
        return LocalProcess(process, life_read_fd)

    async def _start(
        self, spec: ProcessSpec, log_fd: int, life_fd: int
    ) -> asyncio.subprocess.Process | ForkedProcess:
        """Forks a process if that makes no difference, and starts it the ordinary way otherwise."""
        pipes = (self._read_fd, life_fd)
        env = {**os.environ, **spec.env, PARENT_FD_VARIABLE: str(pipes[0]), LIFE_FD_VARIABLE: str(pipes[1])}
        whole_env = {**env, **spec.secrets}
        if self._server is not None and self._server.can_start(spec.argv, env):
            fds = {1: log_fd, 2: log_fd, **{fd: fd for fd in pipes}}
            if pid := await self._server.fork(spec.argv, whole_env, fds):
                return ForkedProcess(pid)
        try:
            return await asyncio.create_subprocess_exec(
                *spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
                env=whole_env,
                pass_fds=pipes,
                start_new_session=True,
            )
        except OSError as err:
            raise ConfigError(f"{spec.name}: cannot start {spec.argv[0]!r}: {err.strerror}") from err


def _about_children(stopped: dict[int, str]) -> str:
    """Describes the stopped processes that a process started, with the remedy; empty if there are none."""
    if not stopped:
        return ""
    pid, command = next(iter(stopped.items()))
    more = f" (and {len(stopped) - 1} more)" if len(stopped) > 1 else ""
    return (
        f"a process that it started is {STOPPED}: {pid}, {command or 'unknown'}{more}; "
        f"`kill -CONT {pid}` lets it continue"
    )

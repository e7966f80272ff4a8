"""A child process that never outlives this process, and leaves nothing behind.

    this process --(lifeline: a pipe)--> keeper --(fork)--> program, with all that it starts
                 <--(status: a pipe)------'

The keeper (`keeper.py`) finds and kills everything that the program has started. The lifeline also closes
when this process is killed, so the program ends then, too. The event loop reads the status.

Some children can't have a keeper: services, which shut down gracefully and are children of their launcher;
trackers, which hand over the last rows of a launcher that was killed; ranks, which watch a socket; boxes,
whose keeper is bubblewrap; and commands such as `srun`, which need a SIGTERM to end what they run on other
machines.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from astraflow.errors import DeadlineError
from astraflow.service import keeper
from astraflow.service.readable import until_readable

__all__ = ["Care", "KeptProcess", "OutputLines"]

_START_S = 120.0
"""Time limit for a keeper to start its program. It takes 30 ms, or seconds on a busy machine."""
_LAST_MOMENT_S = 2.0
"""Time for the status of a killed keeper to close."""
_PACKAGES = str(Path(__file__).parents[2])
"""The folder from which the keeper imports."""
_BOOT = f"import sys; sys.path.insert(0, {_PACKAGES!r}); from {keeper.__name__} import main; main()"
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Care:
    """What a keeper does in addition to starting and ending its program."""

    grace_s: float = 0.0
    """Time for the program to end by itself after SIGTERM, when it is let go; 0: it is killed at once."""
    removed: str = ""
    """A folder that is deleted then, unless the last words are `keeper.KEEP`."""
    walls: str = ""
    """Module with the walls around the program, such as `sandbox.inside.light_box`; empty for none."""
    box: Mapping[str, Any] | None = None
    """What `enter` of that module gets; None if the program doesn't run in a box."""


class KeptProcess:
    """A program under a keeper.

    Example: `process = await KeptProcess.start(["sleep", "9"])`, and then `await process.ended.wait()` or
    `await process.end()`.
    """

    def __init__(self, keeper_pid: int, lifeline: int, status: int, patience_s: float) -> None:
        self._keeper_pid = keeper_pid
        self._lifeline = lifeline
        self._status = status
        self._patience_s = patience_s
        self._report = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(status, self._read_status)
        self._started = asyncio.Event()
        self.ended = asyncio.Event()
        """Set once the program and all that it has started are gone."""
        self._at_end: Callable[[], None] = lambda: None
        self.pid = 0
        """The program's process id; 0 if it could not be started."""
        self.problems: dict[str, str] = {}
        """Why the program could not be started (`start`), or could not have its box (`box`)."""
        self.code: int | None = None
        """The exit code, or minus the signal that ended the program; None while it runs."""

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        stdin: IO[bytes] | int = subprocess.DEVNULL,
        stdout: IO[bytes] | int | None = None,
        stderr: IO[bytes] | int | None = None,
        fds: Sequence[int] = (),
        care: Care = Care(),
    ) -> "KeptProcess":
        """Starts a program. Returns once it runs, or the reason why it doesn't is known.

        `fds`: descriptors that it inherits, in addition to its input and outputs.
        Raises: DeadlineError if the keeper doesn't start in time; OSError if it can't be started.
        """
        specification = json.dumps({"argv": list(argv), "fds": list(fds), **asdict(care)})
        popen = partial(
            subprocess.Popen[bytes],
            env=None if env is None else dict(env),
            cwd=folder,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,  # an interrupt at the terminal must not end the keeper
        )
        keeper_pid, lifeline, status = _start_keeper(popen, specification, fds)
        process = cls(keeper_pid, lifeline, status, care.grace_s + 2 * keeper.LIMIT_S)
        try:
            async with asyncio.timeout(_START_S):
                await process._started.wait()
        except BaseException as err:
            process._kill()
            await process.end()
            if isinstance(err, TimeoutError):
                raise DeadlineError(f"the keeper of {argv[0]} did not start within {_START_S:g} s") from err
            raise
        return process

    def call_at_end(self, function: Callable[[], None]) -> None:
        """Calls a function once the program and all that it has started are gone."""
        self._at_end = function
        if self.ended.is_set():
            function()

    async def end(self, last_words: bytes = b"") -> int:
        """Ends the program and all that it has started. Returns once they are gone, even if the caller is
        cancelled meanwhile. `last_words`: nothing, or `keeper.KEEP`."""
        self.let_go(last_words)
        ending = asyncio.ensure_future(self._end())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise
        assert self.code is not None
        return self.code

    def let_go(self, last_words: bytes = b"") -> None:
        """Tells the keeper to end the program. `end` also waits for that."""
        if self._lifeline >= 0:
            with contextlib.suppress(OSError):  # the keeper has ended
                os.write(self._lifeline, last_words)
            os.close(self._lifeline)
            self._lifeline = -1

    async def _end(self) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self.ended.wait()
        except TimeoutError:  # the keeper is stopped, or another process holds the status open
            self._kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_MOMENT_S):
                    await self.ended.wait()
            if not self.ended.is_set():
                self._note_end()

    def _kill(self) -> None:
        if not self.ended.is_set():
            self._kill_session()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._keeper_pid, signal.SIGKILL)

    def _kill_session(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def _read_status(self) -> None:
        part = os.read(self._status, _READ_BYTES)
        self._report += part
        if not part:
            self._note_end()
        elif not self._started.is_set():
            first_line = json.loads(self._report.partition(b"\n")[0])
            self.pid = first_line.pop("pid", 0)
            self.problems = first_line
        self._started.set()

    def _note_end(self) -> None:
        """Notes the exit code. The keeper has ended: it has closed the status, or was killed."""
        self._loop.remove_reader(self._status)
        os.close(self._status)
        self.let_go()
        keeper_code = 0
        with contextlib.suppress(ChildProcessError):  # other code of this process has waited for all children
            keeper_code = os.waitstatus_to_exitcode(os.waitpid(self._keeper_pid, 0)[1])
        last_line = self._report.rstrip().rpartition(b"\n")[2]
        code = json.loads(last_line or b"{}").get("code")
        if code is None:  # the keeper was killed, and only the program itself has died with it
            self._kill_session()
            code = keeper_code or 1
        self.code = code
        self.ended.set()
        self._at_end()


def _start_keeper(
    popen: "Callable[..., subprocess.Popen[bytes]]", specification: str, fds: Sequence[int]
) -> tuple[int, int, int]:
    """Returns the keeper's process id, and this process's ends of its lifeline and of its status."""
    lifeline_read, lifeline = os.pipe()
    status, status_write = os.pipe()
    os.set_blocking(status, False)
    numbers = (str(lifeline_read), str(status_write))
    try:
        keeper_process = popen(
            [sys.executable, "-I", "-S", "-c", _BOOT, specification, *numbers],
            pass_fds=(lifeline_read, status_write, *fds),
        )
    except BaseException:
        os.close(lifeline)
        os.close(status)
        raise
    finally:
        os.close(lifeline_read)
        os.close(status_write)
    keeper_process.returncode = 0  # so that it doesn't complain: `KeptProcess` waits for the process
    return keeper_process.pid, lifeline, status


class OutputLines:
    """The lines that a program prints. Each is logged, and the last ones are kept.

    Example: `with output.writer() as fd: await KeptProcess.start(argv, stdout=fd, stderr=fd)`.
    """

    def __init__(self, log: Callable[[str], None], *, num_kept: int, max_chars: int) -> None:
        """`max_chars`: number of characters kept per line. A program may print lines without an end."""
        self.last: deque[str] = deque(maxlen=num_kept)
        self._log = log
        self._max_chars = max_chars
        self._reading: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def writer(self) -> Generator[int]:
        """Yields a descriptor for the program, and starts to read what is written to it."""
        read_fd, write_fd = os.pipe()
        self._reading = asyncio.create_task(self._read(read_fd))
        try:
            yield write_fd
        finally:
            os.close(write_fd)

    async def until_end(self, patience_s: float) -> None:
        """Waits for the end of the output, but not longer: a process that was left may hold it open."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=patience_s)
            self._reading.cancel()

    async def _read(self, fd: int) -> None:
        rest = ""
        try:
            while True:
                await until_readable(fd)
                data = os.read(fd, _READ_BYTES)
                *lines, rest = (rest + data.decode(errors="replace")).split("\n")
                rest = rest[: self._max_chars]
                if not data:
                    break
                for line in lines:
                    self._keep(line)
            if rest:
                self._keep(rest)
        finally:
            os.close(fd)

    def _keep(self, line: str) -> None:
        shown = "".join(char if char.isprintable() else " " for char in line[: self._max_chars])
        self.last.append(shown)
        self._log(shown)

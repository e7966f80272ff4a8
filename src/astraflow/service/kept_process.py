"""A child process that never outlives this process, and leaves nothing behind.

    this process --(lifeline: a pipe)--> keeper --(fork)--> program, with all that it starts
                 <--(status: a pipe)------'

The keeper (`keeper.py`) finds and kills everything that the program has started. The lifeline also closes
when this process is killed, so the program ends then, too. There are no tasks and no threads here: a caller
that waits reads the status itself.

Some children can't have a keeper: services, which shut down gracefully and are children of their launcher;
trackers, which hand over the last rows of a launcher that was killed; the viewer and the ranks, which watch a
pipe or a socket themselves; boxes, whose keeper is bubblewrap; and commands such as `srun`, which need a
SIGTERM to end what they run on other machines.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
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

    Example: `process = await KeptProcess.start(["sleep", "9"])`, and then `await process.wait()` or
    `await process.end()`. A program whose object is forgotten ends, too.
    """

    def __init__(self, keeper_pid: int, lifeline: int, status: int, patience_s: float) -> None:
        self._keeper_pid = keeper_pid
        self._lifeline = lifeline
        self._status = status
        self._patience_s = patience_s
        self._report = b""
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
        specification = json.dumps({"argv": list(argv), **asdict(care)})
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
                await process._until_started()
        except BaseException as err:
            process.kill()
            await process.end()
            if isinstance(err, TimeoutError):
                raise DeadlineError(f"the keeper of {argv[0]} did not start within {_START_S:g} s") from err
            raise
        return process

    async def wait(self) -> int:
        """Waits until the program and all that it has started are gone. Returns: `code`."""
        while self.code is None:
            await self._read_status()
        return self.code

    async def end(self, last_words: bytes = b"") -> int:
        """Ends the program and all that it has started. Returns once they are gone, even if the caller is
        cancelled meanwhile. `last_words`: nothing, or `keeper.KEEP`."""
        self._let_go(last_words)
        ending = asyncio.ensure_future(self._end())
        try:
            return await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending])
            raise

    def kill(self) -> None:
        """Kills the program's session, and the keeper, which may be stopped. `wait` then returns soon."""
        if self.code is None:
            self._kill_session()
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._keeper_pid, signal.SIGKILL)

    def __del__(self) -> None:
        if self.code is None:
            self._let_go()
            os.close(self._status)
            with contextlib.suppress(RuntimeError):  # the interpreter ends
                threading.Thread(target=os.waitpid, args=(self._keeper_pid, 0), daemon=True).start()

    async def _until_started(self) -> None:
        while self.code is None and b"\n" not in self._report:
            await self._read_status()
        told = self._decode_report()
        self.pid = told.pop("pid", 0)
        self.problems = {kind: told[kind] for kind in ("start", "box") if kind in told}

    async def _end(self) -> int:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience_s):
                return await self.wait()
        self.kill()
        return await self.wait()

    async def _read_status(self) -> None:
        # Several callers may wait, and an event loop has only one reader per descriptor.
        own = os.dup(self._status)
        try:
            await until_readable(own)
        finally:
            os.close(own)
        if self.code is not None:
            return
        with contextlib.suppress(BlockingIOError):  # another caller has read it
            part = os.read(self._status, _READ_BYTES)
            self._report += part
            if not part:
                self._note_end()

    def _note_end(self) -> None:
        """Notes the exit code. The keeper has closed the status, so it has ended."""
        os.close(self._status)
        self._let_go()
        keeper_code = 0
        with contextlib.suppress(ChildProcessError):  # other code of this process has waited for all children
            keeper_code = os.waitstatus_to_exitcode(os.waitpid(self._keeper_pid, 0)[1])
        code = self._decode_report().get("code")
        if code is None:  # the keeper was killed, and only the program itself has died with it
            self._kill_session()
            code = keeper_code or 1
        self.code = code

    def _decode_report(self) -> dict[str, Any]:
        told: dict[str, Any] = {}
        for line in self._report.splitlines():
            told |= json.loads(line)
        return told

    def _let_go(self, last_words: bytes = b"") -> None:
        if self._lifeline >= 0:
            with contextlib.suppress(OSError):  # the keeper has ended
                os.write(self._lifeline, last_words)
            os.close(self._lifeline)
            self._lifeline = -1

    def _kill_session(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


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
        """Waits for the end of the output, but not for ever: a process that was left may hold it open."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=patience_s)

    async def close(self, patience_s: float) -> None:
        """Waits for the end of the output, and reads no more then."""
        await self.until_end(patience_s)
        if self._reading is not None:
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

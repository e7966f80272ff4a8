"""The base class of handles of processes on other machines.

follow: processes news -> output into the log here, signs of life, exit code; ends with the process, or when
        no more news can arrive

A subclass implements how news arrive (`_follow_news`), how the process is signaled (`_signal`), and how its
holder on the other machine, a host program or an actor, is ended (`_release`).
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import Literal

from astraflow.protocols import ProcessLife

__all__ = ["KILLED", "RemoteProcess", "Verb"]

_log = logging.getLogger(__name__)

Verb = Literal["terminate", "kill"]

KILLED = -9
"""The exit code of a process that was killed."""
_LATE_NEWS_S = 4.0
"""Time without news after which a machine is reported as silent. News normally arrive once per second."""
_KILL_GRACE_S = 2.0
"""Time for a machine to kill its process before the process's holder is ended."""


class RemoteProcess(ABC):
    """Implements `LifeReporter`, and all of `ProcessHandle` but `silence`.

    The constructor creates the task that follows the process. The task first runs at the next `await`, so a
    subclass sets its own attributes before that. `place`: where the process runs, in messages, e.g. `machine
    gpu-1`.
    """

    def __init__(self, place: str, *, pid: int, log_path: Path) -> None:
        self._place = place
        self._pid = pid
        self._log_path = log_path
        self._loop = asyncio.get_running_loop()
        self._life = ProcessLife()
        self._news_s = self._loop.time()
        """Time of the last news."""
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._follower = asyncio.create_task(self._follow(), name=f"follow:{log_path.stem}")

    @property
    def pid(self) -> int:
        """The process id on its machine."""
        return self._pid

    async def wait(self) -> int:
        """Waits for the exit code, and returns it.

        Returns `MACHINE_LOST` if the machine is lost or was taken away.
        """
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        """Asks the process to stop (SIGTERM)."""
        if not self._code.done():
            self._signal("terminate")

    def kill(self) -> None:
        """Kills the process. If that takes too long, ends its holder."""
        if not self._code.done():
            self._signal("kill")
            self._loop.call_later(_KILL_GRACE_S, self._end, KILLED)

    def life(self) -> ProcessLife:
        """Returns the last report, or that the machine doesn't answer."""
        late_s = self._loop.time() - self._news_s
        if late_s > _LATE_NEWS_S:
            silent_s = (self._life.silent_s or 0.0) + late_s
            return ProcessLife(silent_s, works=False, condition=f"its {self._place} does not answer")
        if self._life.condition:
            return replace(self._life, condition=f"on {self._place}: {self._life.condition}")
        return self._life

    # --- for subclasses ---

    @abstractmethod
    async def _follow_news(self) -> int:
        """Passes news to `_note_life` and `_write` until no more can arrive. Returns: the exit code."""

    @abstractmethod
    def _signal(self, verb: Verb) -> None:
        """Has the process's holder terminate or kill it. Returns at once."""

    @abstractmethod
    def _release(self) -> None:
        """Ends the process's holder, unless it has ended. Called once."""

    def _note_life(self, life: ProcessLife) -> None:
        """Records a report on the process."""
        self._life = life
        self._news_s = self._loop.time()

    def _write(self, log: bytes) -> None:
        """Appends output to the log on this machine. An error, such as a full disk, is only logged, because
        it must not end the task that follows the process."""
        try:
            with self._log_path.open("ab") as file:
                file.write(log)
        except OSError as err:
            _log.warning("%s cannot be written: %s", self._log_path, err)

    def _end(self, code: int) -> None:
        """Records the exit code, and releases the holder. Does nothing at the second call."""
        if self._code.done():
            return
        self._code.set_result(code)
        self._follower.cancel()
        self._release()

    async def _follow(self) -> None:
        """Follows the process to its end. Whatever goes wrong, `wait` returns."""
        # An error in this class counts as a crash. The supervisor would restart after a lost machine forever.
        code = KILLED
        try:
            self._write(f"--- on {self._place}\n".encode())
            code = await self._follow_news()
        finally:
            self._end(code)

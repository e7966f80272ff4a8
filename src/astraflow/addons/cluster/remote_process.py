"""A process on another machine, as the launcher sees it, whatever brings the news of it.

follow: takes the news -> output into the log here, signs of life, exit code; ends with the process, or when
        there can be no more news

A subclass says how news come (`_last_news`), how the process is signalled (`_signal`), and how what holds it
there is ended (`_let_go`).
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
"""A machine that has told nothing for this long, four times as long as it takes, is named."""
_KILL_GRACE_S = 2.0
"""Time for a machine to kill its process; then what holds the process there is ended."""


class RemoteProcess(ABC):
    """Implements `LifeReporter`, and `ProcessHandle` but for `silence`. Follows its process from the moment
    it is made, so a subclass sets its own attributes before it waits for anything.

    `place` is where the process runs, in messages: `machine gpu-1`.
    """

    def __init__(self, place: str, *, pid: int, log_path: Path) -> None:
        self._place = place
        self._pid = pid
        self._log_path = log_path
        self._loop = asyncio.get_running_loop()
        self._life = ProcessLife()
        self._heard_s = self._loop.time()
        """When something was told last."""
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._follower = asyncio.create_task(self._follow(), name=f"follow:{log_path.stem}")

    @property
    def pid(self) -> int:
        """Its process id on its machine."""
        return self._pid

    async def wait(self) -> int:
        """Its exit code; `MACHINE_LOST` if its machine is lost or was taken away."""
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM)."""
        if not self._code.done():
            self._signal("terminate")

    def kill(self) -> None:
        """Kills it, or ends what holds it if that does not do it."""
        if not self._code.done():
            self._signal("kill")
            self._loop.call_later(_KILL_GRACE_S, self._end, KILLED)

    def life(self) -> ProcessLife:
        """What was told last, or that nothing is told."""
        late_s = self._loop.time() - self._heard_s
        if late_s > _LATE_NEWS_S:
            silent_s = (self._life.silent_s or 0.0) + late_s
            return ProcessLife(silent_s, works=False, condition=f"its {self._place} does not answer")
        if self._life.condition:
            return replace(self._life, condition=f"on {self._place}: {self._life.condition}")
        return self._life

    # --- for subclasses ---

    @abstractmethod
    async def _last_news(self) -> int:
        """Takes news, with `_heard` and `_write`, until there can be no more; returns the exit code."""

    @abstractmethod
    def _signal(self, verb: Verb) -> None:
        """Has the process asked to stop, or killed. Returns at once."""

    @abstractmethod
    def _let_go(self) -> None:
        """Ends what holds the process, which may have ended. Called once."""

    def _heard(self, life: ProcessLife) -> None:
        """Notes what was told."""
        self._life = life
        self._heard_s = self._loop.time()

    def _write(self, log: bytes) -> None:
        """Into its log on this machine; a full disk must not lose the process."""
        try:
            with self._log_path.open("ab") as file:
                file.write(log)
        except OSError as err:
            _log.warning("%s cannot be written: %s", self._log_path, err)

    def _end(self, code: int) -> None:
        """Notes how it ended, and lets go. Does nothing if it has ended."""
        if self._code.done():
            return
        self._code.set_result(code)
        self._follower.cancel()
        self._let_go()

    async def _follow(self) -> None:
        """Notes how the process ended; whatever goes wrong, `wait` returns."""
        # An error of the follower's own counts as a crash: a lost machine would be no reason ever to give up.
        code = KILLED
        try:
            self._write(f"--- on {self._place}\n".encode())
            code = await self._last_news()
        finally:
            self._end(code)

"""The one way into the core: applies a command, journals it, wakes who waits; and parks who must wait.

Everything here runs in one event loop; between a command and its record there is no `await`, so the order of
records is the order of commands. An answer that rests on the core's state is given after `settled`: then
everything that the state was made of is durable.
"""

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from starlette.requests import Request

from astraflow.dataflow.api import MAX_WAIT_S
from astraflow.dataflow.core.commands import (
    Command,
    Decision,
    Event,
    IssueLeases,
    LeaseIssued,
    RunEnded,
    TakeBatch,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.journal import Journal
from astraflow.dataflow.liveness import Liveness
from astraflow.dataflow.scaling import WaitShares
from astraflow.dataflow.waiting import Topics, WaitList, waited
from astraflow.errors import JournalError, RefusedError
from astraflow.types import Wait

__all__ = ["Dispatcher", "clamped_wait_s"]

_log = logging.getLogger(__name__)
_FoundT = TypeVar("_FoundT")


class Dispatcher:
    """Core, journal and waiters of one run. `fatal` is set if the core itself failed: restart the process."""

    def __init__(self, core: Core, journal: Journal, liveness: Liveness) -> None:
        self.core = core
        self.journal = journal
        self.liveness = liveness
        self.topics = Topics()
        self.waits = WaitList()
        self.shares = WaitShares()
        self.fatal = asyncio.Event()
        self.deadline_moved = asyncio.Event()
        """Set when something may be overdue earlier than `watched_until_s`."""
        self.watched_until_s = math.inf
        self._is_stopping = False

    def apply(self, command: Command) -> Decision:
        """What the command leads to; its record is on the way to the disk when this returns.

        Raises: RefusedError, FencedError (nothing changed); JournalError while nothing can be written.
        """
        (decision,) = self.apply_all((command,))
        if isinstance(decision, RefusedError):
            raise decision
        return decision

    def apply_all(self, commands: Iterable[Command]) -> list[Decision | RefusedError]:
        """What commands of one moment lead to, in order: one record, without those that were refused.

        Raises: JournalError while nothing can be written; nothing is applied then.
        """
        self.check()
        now_s = time.time()
        decisions: list[Decision | RefusedError] = []
        applied: list[Command] = []
        events: list[tuple[Event, ...]] = []
        wakes: dict[str, None] = {}
        for command in commands:
            decision = self._decided(command, now_s)
            decisions.append(decision)
            if isinstance(decision, RefusedError):
                continue
            if decision.events or not isinstance(command, IssueLeases | TakeBatch):
                applied.append(command)
                events.append(decision.events)
            wakes.update(dict.fromkeys(decision.wakes))
        if applied:
            self.journal.append(applied, events, at_s=now_s)
            self.journal.snapshot_if_due(self.core)
            self._follow(events)
        self.topics.wake(wakes)
        return decisions

    def check(self) -> None:
        """Raises: JournalError if no command can be accepted now."""
        if self.journal.is_broken:
            self.fatal.set()
        if self.fatal.is_set():
            raise JournalError("the dataflow's core or journal failed; the service restarts from its journal")
        self.journal.check()

    def _decided(self, command: Command, now_s: float) -> Decision | RefusedError:
        """An exception that is no refusal leaves the core in an unknown state: nothing more is accepted."""
        is_sound = False
        try:
            decision = self.core.apply(command, now_s)
            is_sound = True
        except RefusedError as refusal:
            is_sound = True
            return refusal
        finally:
            if not is_sound:
                _log.critical("the core failed on %s; restart from the journal", type(command).__name__)
                self.fatal.set()
        return decision

    def _follow(self, events: Iterable[tuple[Event, ...]]) -> None:
        """Soft state that follows from events."""
        issued: list[str] = []
        has_ended = False
        for event in itertools.chain.from_iterable(events):
            if isinstance(event, LeaseIssued):
                issued.append(event.lease_id)
            has_ended |= isinstance(event, RunEnded)
        if issued:
            self.liveness.grant(issued, asyncio.get_running_loop().time())
        self.watch()
        if has_ended:
            self.topics.wake_all()

    def watch(self) -> None:
        """Wakes the timer if a new lease, service or evaluation round is due before it would look again."""
        now_s = asyncio.get_running_loop().time()
        if min(now_s + self.liveness.timeout_s, self.round_deadline_s()) < self.watched_until_s:
            self.deadline_moved.set()

    def round_deadline_s(self) -> float:
        """When the next evaluation round is overdue, by the loop's clock."""
        to_loop_s = asyncio.get_running_loop().time() - time.time()
        deadlines = [deadline_s + to_loop_s for _, deadline_s in self.core.eval_deadlines()]
        return min(deadlines, default=math.inf)

    async def settled(self) -> None:
        """Returns when all that was applied so far is durable. Raises: JournalError."""
        await self.journal.durable(self.journal.seq)

    async def poll(
        self,
        topic: str,
        look: Callable[[], _FoundT | None],
        *,
        wait_s: float,
        request: Request,
        wait: Callable[[], Wait] | None = None,
        who: str = "",
    ) -> _FoundT | None:
        """What `look` finds, asked again after each wake-up of the topic, or of `who` alone; None after
        `wait_s`, at the end of the service, or if the caller hung up. `wait` is listed meanwhile."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + clamped_wait_s(wait_s)
        hang_up: asyncio.Task[None] | None = None
        try:
            while True:
                event = self.topics.next(topic, who)
                found = look()
                if found is not None or self._is_stopping or self.core.state in {"finished", "failed"}:
                    return found
                hang_up = hang_up or loop.create_task(_hung_up(request), name="hang-up")
                with self.waits.entry(wait()) if wait is not None else contextlib.nullcontext():
                    if not await waited(event, deadline_s) or hang_up.done():
                        return None
        finally:
            if hang_up is not None:
                hang_up.cancel()

    def stop_waiting(self) -> None:
        """Lets every long-poll answer now: the service ends."""
        self._is_stopping = True
        self.topics.wake_all()


def clamped_wait_s(wait_s: float) -> float:
    """A long-poll's length within 0 and the maximum; nonsense is the maximum."""
    return wait_s if 0 <= wait_s <= MAX_WAIT_S else MAX_WAIT_S


async def _hung_up(request: Request) -> None:
    """Returns once the caller is gone; nothing else comes after a request's body."""
    while (await request.receive())["type"] != "http.disconnect":
        pass

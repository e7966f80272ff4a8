"""The one way into the core: applies a command, journals it, and wakes whoever waits for what it changed.

Everything here runs in one event loop. Between a command and its record there is no `await`, so the order of
records is the order of commands. An answer that rests on the core's state is given after `settled`, when
every record behind that state is durable.
"""

import asyncio
import functools
import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterable

import msgspec

from astraflow.dataflow.core.commands import (
    BatchDropped,
    Command,
    Decision,
    DropWorker,
    Event,
    IssueLeases,
    LeaseIssued,
    RunEnded,
    RunResumed,
    ScheduleChanged,
    ServiceRestored,
    ServiceSetAside,
    StopRun,
    TakeBatch,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.journal.records import UNWRITABLE, encode_command
from astraflow.dataflow.service.clock import SteadyClock
from astraflow.dataflow.service.liveness import Liveness
from astraflow.dataflow.service.scaling import WaitShares
from astraflow.dataflow.service.waiting import LeaseQueue, Topics
from astraflow.errors import ComponentError, JournalError, RefusedError

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)


class Dispatcher:
    """The core and the journal of one run, and those who wait for their changes.

    `fatal` is set if the core itself failed: restart the process.
    """

    def __init__(
        self,
        core: Core,
        journal: Journal,
        liveness: Liveness,
        *,
        clock: Callable[[], float] | None = None,
        shares: WaitShares | None = None,
    ) -> None:
        """`clock`: Unix time of records and deadlines; by default a `SteadyClock`. `shares`: who waits for
        whom, for the advice on the number of services."""
        self.core = core
        self.journal = journal
        self.liveness = liveness
        self.clock = clock or SteadyClock(at_least_s=journal.newest_s)
        self.started_s = self.clock()
        self.topics = Topics()
        self.lease_queue = LeaseQueue()
        self.shares = shares or WaitShares()
        self.fatal = asyncio.Event()
        journal.on_broken = self.fatal.set
        self.deadline_moved = asyncio.Event()
        """Set when something may be overdue earlier than `watched_until_s`."""
        self.watched_until_s = math.inf

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop in which all of this runs. Kept, because Python 3.11 makes a system call to find it."""
        return asyncio.get_running_loop()

    def apply(self, command: Command) -> Decision:
        """What the command leads to; its record is on the way to the disk when this returns.

        Raises: RefusedError, FencedError (nothing changed); JournalError while nothing can be written.
        """
        (decision,) = self.apply_all((command,))
        if isinstance(decision, RefusedError):
            raise decision
        return decision

    def apply_all(self, commands: Iterable[Command]) -> list[Decision | RefusedError]:
        """What several commands lead to, in order. They share one record, without those that were refused.

        Raises: JournalError while nothing can be written; nothing is applied then.
        """
        self.check()
        now_s = self.clock()
        decisions: list[Decision | RefusedError] = []
        applied: list[msgspec.Raw] = []
        events: list[tuple[Event, ...]] = []
        wakes: dict[str, None] = {}
        for command in commands:
            encoded = _encoded(command)
            if isinstance(encoded, RefusedError):
                decisions.append(encoded)
                continue
            decision = self._decided(command, now_s)
            decisions.append(decision)
            if isinstance(decision, RefusedError):
                continue
            if decision.events or not isinstance(command, IssueLeases | TakeBatch):
                # A request for leases or a batch that changed nothing needs no record; polls make many.
                applied.append(encoded)
                events.append(decision.events)
            wakes.update(dict.fromkeys(decision.wakes))
        if applied:
            try:
                self.journal.append(applied, events, at_s=now_s)
            except BaseException:
                self._fail("a record could not be appended to the journal")
                raise
            if _has_failed(events):
                # A component of the user's own may have ended the run. Once fixed, it would decide
                # otherwise, and the records could not be replayed.
                self.journal.snapshot(self.core)
            self._snapshot_if_due()
            self._follow(events)
        self._wake(wakes)
        return decisions

    def _snapshot_if_due(self) -> None:
        try:
            self.journal.snapshot_if_due(self.core)
        except ComponentError as err:  # e.g. the `state()` of a curator of the user's own
            self.apply(StopRun(reason=str(err), is_failure=True))

    def drop_worker(self, worker_id: str, reason: str) -> None:
        """A rollout service is gone; what is known of it goes too. Raises: JournalError."""
        leases = self.core.worker_leases(worker_id)
        self.apply(DropWorker(worker_id=worker_id, reason=reason))
        self.liveness.end(leases)
        self.liveness.drop(worker_id)
        self.shares.forget(worker_id)

    def check(self) -> None:
        """Raises: JournalError if no command can be accepted now."""
        if self.journal.is_broken:
            self.fatal.set()
        if self.fatal.is_set():
            raise JournalError("the dataflow's core or journal failed; the service restarts from its journal")
        self.journal.check()

    def _decided(self, command: Command, now_s: float) -> Decision | RefusedError:
        """An exception that is no refusal leaves the core in an unknown state: nothing more is accepted."""
        try:
            return self.core.apply(command, now_s)
        except RefusedError as refusal:
            return refusal
        except BaseException:
            self._fail(f"the core failed on {type(command).__name__}")
            raise

    def _fail(self, what: str) -> None:
        """Memory and journal no longer agree."""
        _log.critical("%s; the process ends, and restarts from the journal", what)
        self.fatal.set()

    def _follow(self, events: Iterable[tuple[Event, ...]]) -> None:
        """Soft state that follows from events."""
        issued: list[str] = []
        has_ended = False
        for event in itertools.chain.from_iterable(events):
            if isinstance(event, LeaseIssued):
                issued.append(event.lease_id)
            has_ended |= isinstance(event, RunEnded)
            _tell(event)
        if issued:
            self.liveness.grant(issued, self.loop.time())
        self.watch()
        if has_ended:
            self.wake_all()

    def watch(self) -> None:
        """Wakes the timer if a new lease, service or evaluation round is due before it would look again."""
        earliest_s = self.loop.time() + self.liveness.timeout_s
        if min(earliest_s, self.round_deadline_s()) < self.watched_until_s:
            self.deadline_moved.set()

    def round_deadline_s(self) -> float:
        """When the next evaluation round is overdue, by the loop's clock."""
        if not (deadlines := self.core.eval_deadlines()):
            return math.inf
        to_loop_s = self.loop.time() - self.clock()
        return min(deadline_s for _, deadline_s in deadlines) + to_loop_s

    async def settled(self) -> None:
        """Returns when all that was applied so far is durable. Raises: JournalError."""
        await self.journal.wait_durable(self.journal.seq)

    def _wake(self, topics: Collection[str]) -> None:
        self.topics.wake(topics)
        for topic in topics:
            kind, _, worker_id = topic.partition("/")
            if kind == "worker":
                # The service was set aside or restored, so it is of another kind than before.
                self.lease_queue.recheck(worker_id)
        if "leases" in topics:
            self.lease_queue.wake()

    def wake_all(self) -> None:
        """Lets everybody who waits look again."""
        self.topics.wake_all()
        self.lease_queue.recheck()


def _has_failed(events: Iterable[tuple[Event, ...]]) -> bool:
    """Whether the run ended with a failure just now."""
    return any(isinstance(e, RunEnded) and e.is_failure for e in itertools.chain.from_iterable(events))


def _encoded(command: Command) -> msgspec.Raw | RefusedError:
    """The command as the journal stores it. What cannot be stored must not be applied: it is refused."""
    try:
        return encode_command(command)
    except UNWRITABLE as err:
        return RefusedError(
            f"{type(command).__name__} holds a value that cannot be written to the journal: {err}; integers "
            "have at most 64 bits, texts are valid Unicode",
            code="invalid",
            status=422,
        )


def _tell(event: Event) -> None:
    """Logs what a person should know of."""
    if isinstance(event, ServiceSetAside):
        _log.warning(
            "rollout service %s (%s) failed %d times in a row, the last with %s; it is set aside, and tried "
            "with one lease now and then until one succeeds",
            event.name, event.worker_id, event.strikes, event.last_failure,
        )  # fmt: skip
    elif isinstance(event, ServiceRestored):
        _log.info("rollout service %s (%s) works again", event.name, event.worker_id)
    elif isinstance(event, BatchDropped):
        _log.warning(
            "policy %s: the batches of steps %s were dropped: %s", event.policy, event.steps, event.reason
        )
    elif isinstance(event, RunResumed):
        _log.info("the run, which was over, continues")
    elif isinstance(event, ScheduleChanged):
        _log.info("the schedule is now %s", event.schedule)
    elif isinstance(event, RunEnded):
        _log.log(logging.ERROR if event.is_failure else logging.INFO, "the run is over: %s", event.reason)

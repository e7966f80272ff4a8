"""The only way into the core: applies a command, journals it, and wakes whoever waits for the change.

Everything here runs in one event loop. There is no `await` between a command and its record, so the order of
records is the order of commands. A reply that depends on the core's state is sent after `wait_durable`,
when every record that led to that state is durable.
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
from astraflow.user_input.own_code import ending_forks

__all__ = ["Dispatcher"]

_log = logging.getLogger(__name__)
_POLLS = (IssueLeases, TakeBatch)
"""Commands of polls. Many of them change nothing, and need no record then."""


class Dispatcher:
    """The core and the journal of one run, and the callers that wait for changes.

    `fatal` is set if the core itself failed. Then the process must be restarted.
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
        """`clock`: Unix time of records and deadlines; by default a `SteadyClock`. `shares`: the wait shares,
        from which the advice on the number of services follows."""
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
        """Set when something may become overdue before `watched_until_s`."""
        self.watched_until_s = math.inf

    @functools.cached_property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop in which all of this runs. Cached, because Python 3.11 makes a system call to find it."""
        return asyncio.get_running_loop()

    def apply(self, command: Command) -> Decision:
        """Applies a command. Its record is on the way to the disk, but not yet durable, when this returns.

        Raises: RefusedError, FencedError (nothing changed); JournalError while nothing can be written.
        """
        (decision,) = self.apply_all((command,))
        if isinstance(decision, RefusedError):
            raise decision
        return decision

    def apply_all(self, commands: Iterable[Command]) -> list[Decision | RefusedError]:
        """Applies several commands in order. The accepted ones share one record.

        Raises: JournalError while nothing can be written. Then no command is applied.
        """
        self.check()
        now_s = self.clock()
        decisions: list[Decision | RefusedError] = []
        applied: list[msgspec.Raw] = []
        events: list[tuple[Event, ...]] = []
        wakes: dict[str, None] = {}
        for command in commands:
            encoded = _encode(command)
            if isinstance(encoded, RefusedError):
                decisions.append(encoded)
                continue
            decision = self._decide(command, now_s)
            decisions.append(decision)
            if isinstance(decision, RefusedError):
                continue
            if decision.events or not isinstance(command, _POLLS):
                applied.append(encoded)
                events.append(decision.events)
            wakes.update(dict.fromkeys(decision.wakes))
        if applied:
            try:
                self.journal.append(applied, events, at_s=now_s)
            except BaseException:
                self._fail("a record could not be appended to the journal")
                raise
            if any(isinstance(e, RunEnded) and e.is_failure for of_one in events for e in of_one):
                # A user's component may have ended the run. After a fix it would decide differently, so the
                # records before this point could not be replayed. The snapshot makes that unnecessary.
                self.journal.snapshot(self.core)
            try:
                self.journal.snapshot_if_due(self.core)
            except ComponentError as err:  # e.g. from the `state()` of a user's curator
                self.apply(StopRun(reason=str(err), is_failure=True))
            self._follow(events)
        self._wake(wakes)
        return decisions

    def drop_worker(self, worker_id: str, reason: str) -> None:
        """Removes a rollout service that is gone, with all state about it. Raises: JournalError."""
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

    def _decide(self, command: Command, now_s: float) -> Decision | RefusedError:
        """Any exception except a refusal leaves the core in an unknown state, so nothing more is accepted."""
        try:
            with ending_forks():  # curators and other parts may be the user's
                return self.core.apply(command, now_s)
        except RefusedError as refusal:
            return refusal
        except BaseException:
            self._fail(f"the core failed on {type(command).__name__}")
            raise

    def _fail(self, what: str) -> None:
        """Ends the process, because the state in memory and the journal no longer agree."""
        _log.critical("%s; the process ends and is restarted from the journal", what)
        self.fatal.set()

    def _follow(self, events: Iterable[tuple[Event, ...]]) -> None:
        """Updates soft state after events."""
        issued: list[str] = []
        has_ended = False
        for event in itertools.chain.from_iterable(events):
            if isinstance(event, LeaseIssued):
                issued.append(event.lease_id)
            else:
                has_ended |= isinstance(event, RunEnded)
                _log_event(event)
        if issued:
            self.liveness.grant(issued, self.loop.time())
        self.watch()
        if has_ended:
            self.wake_all()

    def watch(self) -> None:
        """Wakes the deadline watch if a lease, service or evaluation round is due before its next check."""
        earliest_s = self.loop.time() + self.liveness.timeout_s
        if min(earliest_s, self.round_deadline_s()) < self.watched_until_s:
            self.deadline_moved.set()

    def round_deadline_s(self) -> float:
        """When the next evaluation round becomes overdue, on the loop's clock."""
        if not (deadlines := self.core.eval_deadlines()):
            return math.inf
        to_loop_s = self.loop.time() - self.clock()
        return min(deadline_s for _, deadline_s in deadlines) + to_loop_s

    async def wait_durable(self) -> None:
        """Returns once all commands applied so far are durable. Raises: JournalError."""
        await self.journal.wait_durable(self.journal.seq)

    def _wake(self, topics: Collection[str]) -> None:
        self.topics.wake(topics)
        for topic in topics:
            kind, _, worker_id = topic.partition("/")
            if kind == "worker":
                # The service was set aside or restored, so its waiters are of a different kind now.
                self.lease_queue.recheck(worker_id)
        if "leases" in topics:
            self.lease_queue.wake()

    def wake_all(self) -> None:
        """Lets all waiters check again."""
        self.topics.wake_all()
        self.lease_queue.recheck()


def _encode(command: Command) -> msgspec.Raw | RefusedError:
    """Encodes a command for the journal. One that cannot be stored must not be applied; it is refused."""
    try:
        return encode_command(command)
    except UNWRITABLE as err:
        return RefusedError(
            f"{type(command).__name__} has a value that cannot be written to the journal: {err}; integers "
            "may have at most 64 bits, and texts must be valid Unicode",
            code="invalid",
            status=422,
        )


def _log_event(event: Event) -> None:
    """Logs an event that a person should know about."""
    if isinstance(event, ServiceSetAside):
        _log.warning(
            "rollout service %s (%s) failed %d times in a row, last with %s; it is set aside, and gets "
            "single leases from time to time until one succeeds",
            event.name, event.worker_id, event.strikes, event.last_failure,
        )  # fmt: skip
    elif isinstance(event, ServiceRestored):
        _log.info("rollout service %s (%s) works again", event.name, event.worker_id)
    elif isinstance(event, BatchDropped):
        _log.warning(
            "policy %s: the batches of steps %s were dropped: %s", event.policy, event.steps, event.reason
        )
    elif isinstance(event, RunResumed):
        _log.info("the run was over, and is resumed")
    elif isinstance(event, ScheduleChanged):
        _log.info("the schedule is now %s", event.schedule)
    elif isinstance(event, RunEnded):
        _log.log(logging.ERROR if event.is_failure else logging.INFO, "the run is over: %s", event.reason)

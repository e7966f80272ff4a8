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
from collections.abc import Callable, Generator, Hashable, Iterable
from functools import partial
from typing import TypeVar

import msgspec
from starlette.requests import Request

from astraflow import wire
from astraflow.dataflow.api import MAX_WAIT_S
from astraflow.dataflow.clock import SteadyClock
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
    ServiceRestored,
    ServiceSetAside,
    StopRun,
    TakeBatch,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.journal import Journal
from astraflow.dataflow.liveness import Liveness
from astraflow.dataflow.records import UNWRITABLE, encode_command
from astraflow.dataflow.scaling import WaitShares
from astraflow.dataflow.waiting import Line, Topics, WaitList, waited
from astraflow.errors import ComponentError, JournalError, RefusedError
from astraflow.types import Wait

__all__ = ["Dispatcher", "clamped_wait_s"]

_log = logging.getLogger(__name__)
_FoundT = TypeVar("_FoundT")
_CHANCE_SLACK_S = 0.01
"""A service looks this long after its chance has come, so that clocks that differ a little do no harm."""


class Dispatcher:
    """Core, journal and waiters of one run. `fatal` is set if the core itself failed: restart the process."""

    def __init__(
        self, core: Core, journal: Journal, liveness: Liveness, *, clock: Callable[[], float] | None = None
    ) -> None:
        """`clock`: Unix time of records and deadlines; a `SteadyClock` without one."""
        self.core = core
        self.journal = journal
        self.liveness = liveness
        self.clock = clock or SteadyClock(at_least_s=journal.newest_s)
        self.topics = Topics()
        self.line = Line()
        """Who waits for leases."""
        self.waits = WaitList()
        self.shares = WaitShares()
        self.max_batch_bytes = wire.MAX_BODY_BYTES
        """A slice of a batch is one body."""
        self.oversized: dict[str, Wait] = {}
        """By policy: the batch that is too large to be sent, as those see it who ask what the trainer waits
        for."""
        self.fatal = asyncio.Event()
        journal.on_broken = self.fatal.set
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
                applied.append(encoded)
                events.append(decision.events)
            wakes.update(dict.fromkeys(decision.wakes))
        if applied:
            with self._fatal_if_raised("a record could not be appended to the journal"):
                self.journal.append(applied, events, at_s=now_s)
            if _has_failed(events):
                # A component of the user's own may have ended the run: mended, it would not do so again, and
                # its records could not be replayed.
                self.journal.snapshot(self.core)
            self._snapshot_if_due()
            self._follow(events)
        self.topics.wake(wakes)
        for topic in wakes:
            kind, _, worker_id = topic.partition("/")
            if kind == "worker":
                self.line.stir(worker_id)  # It may not have now what others of its kind may, or may again.
        if "leases" in wakes:
            self.line.wake()
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
        with self._fatal_if_raised(f"the core failed on {type(command).__name__}"):
            try:
                return self.core.apply(command, now_s)
            except RefusedError as refusal:
                return refusal

    @contextlib.contextmanager
    def _fatal_if_raised(self, what: str) -> Generator[None]:
        """Around what changes the state: if it raises, memory and journal no longer agree."""
        is_sound = False
        try:
            yield
            is_sound = True
        finally:
            if not is_sound:
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
            self.liveness.grant(issued, asyncio.get_running_loop().time())
        self.watch()
        if has_ended:
            self._wake_all()

    def watch(self) -> None:
        """Wakes the timer if a new lease, service or evaluation round is due before it would look again."""
        earliest_s = asyncio.get_running_loop().time() + self.liveness.timeout_s
        if min(earliest_s, self.round_deadline_s()) < self.watched_until_s:
            self.deadline_moved.set()

    def round_deadline_s(self) -> float:
        """When the next evaluation round is overdue, by the loop's clock."""
        if not (deadlines := self.core.eval_deadlines()):
            return math.inf
        to_loop_s = asyncio.get_running_loop().time() - self.clock()
        return min(deadline_s for _, deadline_s in deadlines) + to_loop_s

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
    ) -> _FoundT | None:
        """What `look` finds, asked again after each wake-up of the topic; None after `wait_s`, at the end of
        the service, or if the caller hung up. `wait` is listed meanwhile."""
        deadline_s = asyncio.get_running_loop().time() + clamped_wait_s(wait_s)
        with _HangUp(request) as hang_up:
            while True:
                event = self.topics.next(topic)
                found = look()
                if found is not None or self._is_over:
                    return found
                hang_up.watch()
                with self.waits.entry(wait) if wait is not None else contextlib.nullcontext():
                    if not await waited(event, deadline_s) or hang_up.is_heard:
                        return None

    async def poll_leases(
        self,
        look: Callable[[], _FoundT | None],
        *,
        worker_id: str,
        kind: Callable[[], Hashable],
        wait_s: float,
        request: Request,
        wait: Callable[[], Wait],
    ) -> _FoundT | None:
        """As `poll`, for leases: those who wait get them in the order in which they came. Services of one
        `kind` may have the same leases. Looks again when time alone may bring a lease, too."""
        deadline_s = asyncio.get_running_loop().time() + clamped_wait_s(wait_s)
        number = self.line.new_number()
        with _HangUp(request) as hang_up:
            while True:
                self.line.serve_if_due()
                found = look()
                if found is not None or self._is_over:
                    return found
                with self.waits.entry(wait), self.line.place(worker_id, kind(), look, number=number) as place:
                    hang_up.watch(partial(self.line.remove, place))
                    await waited(place.event, min(deadline_s, self._next_chance_s(worker_id)))
                if place.is_served:
                    return place.taken()
                if asyncio.get_running_loop().time() >= deadline_s or hang_up.is_heard:
                    return None

    def _next_chance_s(self, worker_id: str) -> float:
        """When the service should look for leases again though nothing happened, by the loop's clock."""
        now_s = self.clock()
        chance_s = self.core.next_chance_s(worker_id, now_s)
        return asyncio.get_running_loop().time() + chance_s - now_s + _CHANCE_SLACK_S

    @property
    def _is_over(self) -> bool:
        """Whether nobody should wait any longer."""
        return self._is_stopping or self.core.state in {"finished", "failed"}

    def _wake_all(self) -> None:
        self.topics.wake_all()
        self.line.stir()

    def stop_waiting(self) -> None:
        """Lets every long-poll answer now: the service ends."""
        self._is_stopping = True
        self._wake_all()


def clamped_wait_s(wait_s: float) -> float:
    """A long-poll's length within 0 and the maximum; nonsense is the maximum."""
    return wait_s if 0 <= wait_s <= MAX_WAIT_S else MAX_WAIT_S


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


class _HangUp:
    """Notices that the caller of a request is gone, from `watch` to the end of the block."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._task: asyncio.Task[None] | None = None

    def __enter__(self) -> "_HangUp":
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def is_heard(self) -> bool:
        """Whether it was noticed."""
        return self._task is not None and self._task.done()

    def watch(self, then: Callable[[], None] = lambda: None) -> None:
        """Begins to listen; calls `then` when the caller is gone."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(_hung_up(self._request), name="hang-up")
        self._task.add_done_callback(lambda _: then())


async def _hung_up(request: Request) -> None:
    """Returns once the caller is gone; nothing else comes after a request's body."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
        _log.info("the run, which had failed, goes on")
    elif isinstance(event, RunEnded):
        _log.log(logging.ERROR if event.is_failure else logging.INFO, "the run is over: %s", event.reason)

"""The books of a run: what its events add up to, booked record by record.

The structs say what the books hold; `Ledger` puts records into them. It reads records only and knows nothing
of the core's state. What cannot be booked (a second fate, a second batch of a step) is a problem, in words;
`rules` and `audit` add the checks over the whole.

The books can be carried from one compaction to the next: what is closed leaves them, so that they stay as
small as what is open, however long the run. Whatever happens to a group afterwards is a problem, for it is
not in the books any more. The journal stores the structs: those with named fields keep their names for
ever, those that are `array_like` keep the order of their fields.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import xxhash

from astraflow.dataflow.core.commands import (
    AddTasks,
    AttemptFailed,
    BatchDropped,
    BatchTaken,
    Command,
    EpisodeFacts,
    EvalFinished,
    Event,
    FateDecided,
    GroupDrawn,
    LeaseIssued,
    PayloadRef,
    RecordResult,
    ReleaseSteps,
    ResultDropped,
    RunEnded,
    RunResumed,
    ScheduleChanged,
    ServiceRestored,
    ServiceSetAside,
    StepCommitted,
    StepRedone,
    TasksPushed,
    VersionPublished,
)
from astraflow.dataflow.journal.failure_kinds import FailureKind, count_failure
from astraflow.dataflow.journal.journal_db import FateRow
from astraflow.dataflow.journal.records import (
    PlanRow,
    Record,
    chain_of,
    decode_commands,
    decode_events,
    schedule_of,
)
from astraflow.types import Failure, StepRecord, lease_kind

__all__ = [
    "Books",
    "ClosedFates",
    "Contribution",
    "EpisodeBooks",
    "GroupBooks",
    "Ledger",
    "PolicyBooks",
    "ReplayedGroups",
    "TakenBatch",
]

_ENCODER = msgspec.msgpack.Encoder()


# --- what the books hold --------------------------------------------------------------------------


class Contribution(msgspec.Struct, array_like=True, gc=False):
    """What one group contributes to one policy."""

    oldest_version: int = -1
    num_samples: int = 0
    num_trained_tokens: int = 0
    payloads: list[PayloadRef] = []
    first_step: int = -1
    """The first step whose batch held the group."""
    num_uses: int = 0
    """Batches that hold the group."""


class EpisodeBooks(msgspec.Struct, array_like=True):
    """The leases of a group or evaluation round, and which of them won."""

    leases: set[str] = set()
    accepted: dict[int, str] = {}
    """Episode -> winning lease."""


class GroupBooks(EpisodeBooks, array_like=True):
    """One draw."""

    drawn: list[str] = []
    """Policies that it was drawn for."""
    fates: dict[str, FateDecided] = {}
    """One entry per policy."""
    contributions: dict[str, Contribution] = {}
    """One entry per policy."""

    @property
    def is_decided(self) -> bool:
        """Whether it ended for every policy."""
        return len(self.fates) >= len(self.drawn) > 0

    def contribution(self, policy: str) -> Contribution:
        """What it contributes to a policy."""
        return self.contributions.get(policy) or Contribution()

    def fate_row(self, policy: str, group_id: int) -> FateRow:
        """How it ended for a policy. Raises: KeyError if it is undecided."""
        event = self.fates[policy]
        contribution = self.contribution(policy)
        return FateRow(
            policy=policy,
            group_id=group_id,
            fate=event.fate,
            step=event.step,
            staleness=event.staleness,
            tokens=event.num_tokens,
            samples=contribution.num_samples,
            trained_tokens=contribution.num_trained_tokens,
        )


class TakenBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch, and the record that took it: the plan of that moment covers it."""

    event: BatchTaken
    seq: int

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Its groups, fresh ones first."""
        return (*self.event.group_ids, *self.event.replayed_ids)

    @property
    def all_staleness(self) -> tuple[int, ...]:
        """The staleness of each group, in the order of `all_ids`."""
        return (*self.event.staleness, *self.event.replayed_staleness)


class ReplayedGroups(msgspec.Struct, frozen=True, array_like=True):
    """The groups that a closed step trained on again."""

    staleness: tuple[int, ...] = ()
    """One per group."""
    num_samples: int = 0
    num_trained_tokens: int = 0


class ClosedFates(msgspec.Struct):
    """How many fates are closed, and a sum over them that no row can leave, enter or change unseen.

    The sum is that of the rows' xxh3-128 hashes modulo 2^128: rows may come in any order, and a row that
    comes twice shows.
    """

    num: int = 0
    digest: bytes = bytes(16)

    def add(self, row: FateRow) -> None:
        """Counts a row in."""
        digest = xxhash.xxh3_128_intdigest(_ENCODER.encode(row))
        total = int.from_bytes(self.digest, "big") + digest
        self.num += 1
        self.digest = (total % (1 << 128)).to_bytes(16, "big")


class PolicyBooks(msgspec.Struct):
    """The books of one policy."""

    batches: dict[int, TakenBatch] = {}
    """Those that are not closed, by step."""
    committed: dict[int, StepRecord] = {}
    """Committed steps that are not closed, by step."""
    num_committed: int = 0
    released: int = 0
    """The first step whose batch a trainer may still ask for."""
    newest_version: int = -1
    num_redone: int = 0
    num_dropped: int = 0
    """Batches that a person gave up."""
    closed: ClosedFates = msgspec.field(default_factory=ClosedFates)
    num_closed_steps: int = 0
    replayed: dict[int, ReplayedGroups] = {}
    """One entry per closed step that replayed groups."""
    first_segments: dict[int, int] = {}
    """Closed step whose payloads may be kept -> the first segment that holds some of them."""


class Books(msgspec.Struct):
    """Everything but the groups that are open."""

    policies: dict[str, PolicyBooks]
    seq: int = 0
    """Newest record in them."""
    chain: bytes = b""
    """The chain of that record."""
    rounds: dict[int, EpisodeBooks] = {}
    """Evaluation rounds."""
    drawn_below: int = 0
    """No group with a smaller number is drawn from here on."""
    pushed: set[str] = set()
    """Ids of accepted tasks from outside; the run's limits bound them."""
    pushed_waiting: set[str] = set()
    """Those that were not drawn."""
    num_push_refused: int = 0
    num_results: int = 0
    num_dropped: int = 0
    num_failed_attempts: int = 0
    failures: dict[str, FailureKind] = {}
    """The failed attempts by kind."""
    num_evals: int = 0
    num_records: int = 0
    ended: RunEnded | None = None
    first_lease_s: float = 0.0
    """When the first training lease went out; 0 if none did."""
    last_commit_s: float = 0.0


# --- booking --------------------------------------------------------------------------------------


class Ledger:
    """The books of a run. Feed it every record in order with `book`."""

    def __init__(
        self,
        plans: list[tuple[int, PlanRow]],
        books: Books | None = None,
        groups: Mapping[int, GroupBooks] | None = None,
    ) -> None:
        """`plans`: (number of the record after which it holds, plan), oldest first. `books`, `groups`: what
        the last compaction carried on, if there was one."""
        self._plans = plans
        self.books = books or Books(policies={})
        self.groups = dict(groups or {})
        """Open ones."""
        self.problems: list[str] = []
        for _, plan in plans:
            for name in plan.policies:
                self.books.policies.setdefault(name, PolicyBooks())
        self._bookings: dict[type[Event], Callable[[Any, Record], None]] = {
            TasksPushed: self._push,
            GroupDrawn: self._draw,
            LeaseIssued: self._lease,
            AttemptFailed: self._count_failed,
            ResultDropped: self._count_dropped,
            FateDecided: self._decide,
            BatchTaken: self._take,
            BatchDropped: self._drop,
            VersionPublished: self._publish,
            StepCommitted: self._commit,
            StepRedone: self._redo,
            EvalFinished: self._count_eval,
            RunEnded: self._end,
            RunResumed: self._resume,
            ScheduleChanged: self._change_schedule,
            ServiceSetAside: self._pass_over,
            ServiceRestored: self._pass_over,
        }

    @property
    def policies(self) -> dict[str, PolicyBooks]:
        """By name."""
        return self.books.policies

    def book(self, record: Record) -> None:
        """Books one record, and checks its place and its chain. Raises: JournalError if it cannot be read."""
        if record.seq != self.books.seq + 1:
            self._problem(f"record {self.books.seq + 1} is missing: {record.seq} follows {self.books.seq}")
        if chain_of(self.books.chain, record) != record.chain:
            self._problem(f"record {record.seq} was changed, or a record before it is missing")
        self.books.num_records += 1
        self.books.seq = record.seq
        self.books.chain = record.chain
        commands = decode_commands(record)
        events = decode_events(record)
        if len(commands) != len(events):
            self._problem(f"record {record.seq} holds {len(commands)} commands, and events of {len(events)}")
        for command, led_to in zip(commands, events, strict=False):
            self._book(command, led_to, record)

    def _book(self, command: Command, events: tuple[Event, ...], record: Record) -> None:
        for event in events:
            self._bookings[type(event)](event, record)
            if isinstance(event, AttemptFailed):
                self._tell_failure(event, command)
        if isinstance(command, RecordResult) and isinstance(command.outcome, EpisodeFacts):
            is_dropped = any(isinstance(event, ResultDropped) for event in events)
            if not is_dropped:
                self._accept(command.lease_id, command.outcome)
        elif isinstance(command, ReleaseSteps):
            books = self._books(command.policy)
            books.released = max(books.released, command.step)
        elif isinstance(command, AddTasks) and not events:
            # Written by a version without that event: tasks that were known were not accepted again.
            new = {task.id for task in command.tasks} - self.books.pushed
            self._push(TasksPushed(accepted=tuple(new), num_known=0, num_refused=0), record)

    def plan_at(self, seq: int) -> PlanRow | None:
        """The plan in force for a record."""
        known = [plan for after, plan in self._plans if after < seq]
        return known[-1] if known else None

    def live(self, name: str) -> set[int]:
        """The groups of a policy that have no fate yet."""
        return {idx for idx, group in self.groups.items() if name in group.drawn and name not in group.fates}

    def group(self, group_id: int) -> GroupBooks:
        """An open group; an empty one if there is none."""
        return self.groups.get(group_id) or GroupBooks()

    # --- events ---

    def _problem(self, text: str) -> None:
        self.problems.append(text)

    def _books(self, policy: str) -> PolicyBooks:
        if policy not in self.policies:
            self._problem(f"policy {policy!r} is in no plan of the run")
        return self.policies.setdefault(policy, PolicyBooks())

    def _push(self, event: TasksPushed, _: Record) -> None:
        books = self.books
        again = books.pushed & set(event.accepted)
        if again:
            self._problem(f"pushed task {min(again)} is accepted twice")
        books.pushed.update(event.accepted)
        books.pushed_waiting.update(event.accepted)
        books.num_push_refused += event.num_refused

    def _draw(self, event: GroupDrawn, _: Record) -> None:
        if event.task_idx < 0:  # A pushed task: it is in no source.
            if event.task_id not in self.books.pushed_waiting:
                self._problem(
                    f"group {event.group_id}: pushed task {event.task_id} is drawn twice, or unasked"
                )
            self.books.pushed_waiting.discard(event.task_id)
        drawn = [*event.admitted, *event.unadmitted]
        if event.group_id in self.groups or event.group_id < self.books.drawn_below:
            self._problem(f"{', '.join(drawn)}: group {event.group_id} is drawn twice")
            return
        for policy in drawn:
            self._books(policy)
        self.groups[event.group_id] = GroupBooks(drawn=drawn)

    def _episodes(self, lease_id: str) -> EpisodeBooks | None:
        """The group or round of a lease, if it is open."""
        if lease_kind(lease_id) == "eval":
            return self.books.rounds.get(_group_of(lease_id))
        return self.groups.get(_group_of(lease_id))

    def _lease(self, event: LeaseIssued, record: Record) -> None:
        if event.kind == "eval":
            self.books.rounds.setdefault(event.group_id, EpisodeBooks())
        elif not self.books.first_lease_s:
            self.books.first_lease_s = record.at_s
        episodes = self._episodes(event.lease_id)
        if episodes is None:
            self._problem(f"lease {event.lease_id} is issued of a group that is not open")
        elif event.lease_id in episodes.leases:
            self._problem(f"lease {event.lease_id} is issued twice")
        else:
            episodes.leases.add(event.lease_id)

    def _decide(self, event: FateDecided, _: Record) -> None:
        self._books(event.policy)
        group = self.groups.get(event.group_id)
        if group is None or event.policy not in group.drawn:
            self._problem(f"{event.policy}: group {event.group_id} is {event.fate} but was never drawn")
        elif (first := group.fates.get(event.policy)) is not None:
            self._problem(f"{event.policy}: group {event.group_id} is {first.fate} and then {event.fate}")
        else:
            group.fates[event.policy] = event
        taken = self.policies[event.policy].batches.get(event.step)
        if event.fate == "trained" and (taken is None or event.group_id not in taken.event.group_ids):
            self._problem(
                f"{event.policy}: group {event.group_id} is trained in step {event.step + 1}, whose batch "
                "does not hold it"
            )

    def _take(self, event: BatchTaken, record: Record) -> None:
        books = self._books(event.policy)
        if event.step in books.batches or event.step < books.num_committed:
            self._problem(f"{event.policy}: step {event.step + 1} gets a second batch")
            return
        books.batches[event.step] = TakenBatch(event, record.seq)
        self._use(event, record)

    def _drop(self, event: BatchDropped, _: Record) -> None:
        """The batches leave the books: their steps get others.

        None of their groups was, or will be, trained on; a replayed one keeps the fate of its first step.
        """
        name = event.policy
        books = self._books(name)
        open_steps = tuple(sorted(step for step in books.batches if step >= books.num_committed))
        if event.steps != open_steps or not open_steps:
            self._problem(
                f"{name}: the batches of steps {_numbers(event.steps)} are dropped; those of "
                f"{_numbers(open_steps)} are not committed"
            )
        for step in open_steps:
            taken = books.batches.pop(step)
            for idx in taken.event.group_ids:
                fate = self.group(idx).fates.get(name)
                if fate is None or fate.fate != "evicted":
                    said = fate.fate if fate else "undecided"
                    self._problem(f"{name}: group {idx} of the dropped batch of step {step + 1} is {said}")
            for idx in taken.all_ids:
                self.group(idx).contribution(name).num_uses -= 1
        books.num_dropped += len(open_steps)

    def _use(self, event: BatchTaken, record: Record) -> None:
        """Counts the uses of a batch's groups: it is the first batch of a fresh one, and one more of a
        replayed one."""
        name = event.policy
        at = f"{name}: batch of step {event.step + 1}"
        for idx in event.group_ids:
            contribution = self.group(idx).contribution(name)
            if contribution.num_uses:
                self._problem(
                    f"{name}: group {idx} is in the batches of steps {contribution.first_step + 1} and "
                    f"{event.step + 1}"
                )
        if twice := len(event.replayed_ids) - len(set(event.replayed_ids)):
            self._problem(f"{at}: {twice} groups are replayed twice in it")
        for idx in event.replayed_ids:
            if not self.group(idx).contribution(name).num_uses:
                self._problem(f"{at}: group {idx} is replayed, but no earlier batch holds it")
        plan = self.plan_at(record.seq)
        most = plan.policies[name].max_uses if plan and name in plan.policies else 1
        for idx in (*event.group_ids, *event.replayed_ids):
            contribution = self.group(idx).contributions.setdefault(name, Contribution())
            contribution.num_uses += 1
            if contribution.num_uses == 1:
                contribution.first_step = event.step
            if contribution.num_uses > most:
                self._problem(
                    f"{name}: group {idx} is in {contribution.num_uses} batches, at most {most} may hold it"
                )

    def _publish(self, event: VersionPublished, _: Record) -> None:
        books = self._books(event.policy)
        if event.version <= books.newest_version:
            self._problem(
                f"{event.policy}: version {event.version} is published after {books.newest_version}"
            )
        books.newest_version = max(books.newest_version, event.version)

    def _commit(self, event: StepCommitted, record: Record) -> None:
        step = event.record
        books = self._books(step.policy)
        if step.step != books.num_committed:
            self._problem(
                f"{step.policy}: step {step.number} is committed where {books.num_committed + 1} is next"
            )
        if step.version > books.newest_version:
            self._problem(
                f"{step.policy}: step {step.number} is committed as version {step.version}, which was "
                "never published"
            )
        books.num_committed += 1
        books.committed[step.step] = step
        self.books.last_commit_s = record.at_s

    def _redo(self, event: StepRedone, _: Record) -> None:
        self._books(event.policy).num_redone += 1

    def _end(self, event: RunEnded, record: Record) -> None:
        if self.books.ended is not None:
            self._problem(f"record {record.seq}: the run ends a second time")
        self.books.ended = event

    def _change_schedule(self, event: ScheduleChanged, record: Record) -> None:
        """The plan that the dataflow noted before says the same."""
        plan = self.plan_at(record.seq)
        if plan is None or schedule_of(plan) != event.schedule:
            self._problem(f"record {record.seq}: the schedule changes to one that no plan of the run tells")

    def _resume(self, _: RunResumed, record: Record) -> None:
        """Steps that were not committed when the run ended get other batches."""
        ended = self.books.ended
        if ended is None or not (ended.is_failure or self._has_more_steps(record.seq)):
            self._problem(f"record {record.seq}: a run is resumed that had not failed, nor got more steps")
        self.books.ended = None
        for books in self.policies.values():
            for step in [step for step in books.batches if step >= books.num_committed]:
                del books.batches[step]

    def _has_more_steps(self, seq: int) -> bool:
        """Whether a policy has steps to do, by the plan in force for a record."""
        plan = self.plan_at(seq)
        facts = {} if plan is None else plan.policies
        return any(self._books(name).num_committed < each.num_steps for name, each in facts.items())

    def _pass_over(self, _: ServiceSetAside | ServiceRestored, __: Record) -> None:
        """The books do not count it."""

    def _count_failed(self, event: AttemptFailed, _: Record) -> None:
        self.books.num_failed_attempts += 1

    def _tell_failure(self, event: AttemptFailed, command: Command) -> None:
        """Only the result that says so has a message; an attempt may also be lost."""
        told = event.error_class
        if isinstance(command, RecordResult) and isinstance(command.outcome, Failure):
            told = f"{told}: {command.outcome.message}"
        count_failure(self.books.failures, told)

    def _count_dropped(self, event: ResultDropped, _: Record) -> None:
        self.books.num_dropped += 1

    def _count_eval(self, event: EvalFinished, _: Record) -> None:
        self.books.num_evals += 1

    def _accept(self, lease_id: str, facts: EpisodeFacts) -> None:
        """Books an accepted result; the same lease again is a repeated message, and counts once."""
        episodes = self._episodes(lease_id)
        if episodes is None or lease_id not in episodes.leases:
            self._problem(f"a result of lease {lease_id} is accepted, which was never issued")
        if episodes is None:
            return
        group, episode_idx, _ = lease_id.split(".")
        if (winner := episodes.accepted.get(int(episode_idx))) is not None:
            if winner != lease_id:
                self._problem(f"episode {group}.{episode_idx} is accepted twice: {winner} and {lease_id}")
            return
        episodes.accepted[int(episode_idx)] = lease_id
        self.books.num_results += 1
        if isinstance(episodes, GroupBooks):
            _contribute(episodes, facts)


def _contribute(group: GroupBooks, facts: EpisodeFacts) -> None:
    """Adds what an accepted episode gives to each policy. A trajectory without trained tokens adds
    nothing."""
    for meta in facts.trajectories:
        contribution = group.contributions.setdefault(meta.policy, Contribution())
        if meta.num_trained_tokens == 0:
            continue
        if contribution.num_samples == 0:
            contribution.oldest_version = meta.oldest_version
        contribution.oldest_version = min(contribution.oldest_version, meta.oldest_version)
        contribution.num_samples += 1
        contribution.num_trained_tokens += meta.num_trained_tokens
        contribution.payloads.append(meta.payload)


def _numbers(steps: tuple[int, ...]) -> list[int]:
    """The numbers of steps, as people count them."""
    return [step + 1 for step in steps]


def _group_of(lease_id: str) -> int:
    """The number of the group or evaluation round that a lease belongs to."""
    return int(lease_id.partition(".")[0].lstrip("e"))

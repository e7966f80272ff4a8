"""Adds up a run's events, record by record, for the audit and for compaction.

`AuditState` and its parts hold the sums; `Ledger` applies records to them. It reads only records and knows
nothing of the core's state. An event that contradicts the state (a second fate, a second batch of a step) is
a problem, described in words. `rules` and `audit` add further checks.

The state is carried from one compaction to the next. What is closed leaves it, so its size depends on what is
open, not on the length of the run. Any later event of a closed group is a problem, because the group is no
longer in the state. The journal stores these structs, so changing their fields changes `JOURNAL_SCHEMA`.

"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import xxhash

from astraflow.dataflow.core.commands import (
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
from astraflow.dataflow.journal.journal_db import FateRow
from astraflow.dataflow.journal.records import (
    Record,
    RecordedPlan,
    chain_of,
    decode_commands,
    decode_events,
)
from astraflow.types import HANDED_IN, Failure, StepRecord, lease_kind

__all__ = [
    "AuditState",
    "AuditedBatch",
    "AuditedEpisodes",
    "AuditedGroup",
    "AuditedPolicy",
    "ClosedFates",
    "Contribution",
    "FailureKind",
    "Ledger",
    "ReplayedGroups",
    "count_failure",
]

_ENCODER = msgspec.msgpack.Encoder()
_MAX_KINDS = 30
"""Kinds of failures that are counted; all further ones are counted as one, so the state stays bounded."""
_MAX_MESSAGE_CHARS = 300
"""Characters of a message that are kept."""
_OTHERS = "failures of other kinds"


# --- the audit state ------------------------------------------------------------------------------


class Contribution(msgspec.Struct, array_like=True, gc=False):
    """The contribution of one group to one policy."""

    oldest_version: int = -1
    num_samples: int = 0
    num_trained_tokens: int = 0
    payloads: list[PayloadRef] = []
    first_step: int = -1
    """The first step whose batch held the group."""
    num_uses: int = 0
    """Number of batches that hold the group."""


class AuditedEpisodes(msgspec.Struct, array_like=True):
    """The leases of a group or evaluation round, and those whose results counted."""

    leases: set[str] = set()
    accepted: dict[int, str] = {}
    """Episode -> lease whose result counted."""


class AuditedGroup(AuditedEpisodes, array_like=True):
    """One draw."""

    drawn: list[str] = []
    """Policies for which it was drawn."""
    fates: dict[str, FateDecided] = {}
    """One entry per policy."""
    contributions: dict[str, Contribution] = {}
    """One entry per policy."""

    @property
    def is_decided(self) -> bool:
        """Whether it has a fate for every policy."""
        return len(self.fates) >= len(self.drawn) > 0

    def contribution(self, policy: str) -> Contribution:
        """Its contribution to a policy."""
        return self.contributions.get(policy) or Contribution()

    def fate_row(self, policy: str, group_id: int) -> FateRow:
        """Its fate for a policy. Raises: KeyError if it has none."""
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


class AuditedBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch and the number of its record, which determines the plan by which it is checked."""

    event: BatchTaken
    seq: int

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Ids of its groups, fresh ones first."""
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
    """The number of closed fates, and a sum that reveals any deleted, added or changed row.

    It is the sum of the rows' xxh3-128 hashes modulo 2^128, which does not depend on their order.
    """

    num: int = 0
    digest: bytes = bytes(16)

    def add(self, row: FateRow) -> None:
        """Adds a row."""
        digest = xxhash.xxh3_128_intdigest(_ENCODER.encode(row))
        total = int.from_bytes(self.digest, "big") + digest
        self.num += 1
        self.digest = (total % (1 << 128)).to_bytes(16, "big")


class AuditedPolicy(msgspec.Struct):
    """The audit state of one policy."""

    batches: dict[int, AuditedBatch] = {}
    """Step -> batch, for steps that are not closed."""
    committed: dict[int, StepRecord] = {}
    """Committed steps that are not closed."""
    num_committed: int = 0
    released: int = 0
    """The first step whose batch a trainer may still request."""
    newest_version: int = -1
    num_redone: int = 0
    num_dropped: int = 0
    """Batches dropped by a person."""
    closed: ClosedFates = msgspec.field(default_factory=ClosedFates)
    num_closed_steps: int = 0
    replayed: dict[int, ReplayedGroups] = {}
    """One entry per closed step that replayed groups."""
    first_segments: dict[int, int] = {}
    """Closed step whose payloads may be kept -> the first segment with one of them."""


class FailureKind(msgspec.Struct):
    """The failed attempts with one class of error and one line of code that raised it."""

    num: int = 0
    """Number of attempts that failed in this way."""
    example: str = ""
    """Error class and message of the first of them."""


class AuditState(msgspec.Struct):
    """The audit state except for the open groups."""

    policies: dict[str, AuditedPolicy]
    seq: int = 0
    """The newest record that was applied."""
    chain: bytes = b""
    """The chain of that record."""
    rounds: dict[int, AuditedEpisodes] = {}
    """Evaluation rounds."""
    drawn_below: int = 0
    """No group with a smaller id is drawn from now on."""
    pushed: set[str] = set()
    """Ids of accepted pushed tasks. The run's limits bound their number."""
    pushed_waiting: set[str] = set()
    """Those that are not drawn yet."""
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


# --- the ledger -----------------------------------------------------------------------------------


class Ledger:
    """Applies a run's records to its audit state. Call `apply` for every record in order."""

    def __init__(
        self,
        plans: list[tuple[int, RecordedPlan]],
        state: AuditState | None = None,
        groups: Mapping[int, AuditedGroup] | None = None,
    ) -> None:
        """`plans`: (number of the record after which it is in force, plan), oldest first. `state`, `groups`:
        as stored by the last compaction, if there was one."""
        self._plans = plans
        self.state = state or AuditState(policies={})
        self.groups = dict(groups or {})
        """Open groups by id."""
        self.problems: list[str] = []
        for _, plan in plans:
            for name in plan.policies:
                self.state.policies.setdefault(name, AuditedPolicy())
        self._handlers: dict[type[Event], Callable[[Any, Record], None]] = {
            TasksPushed: self._push,
            GroupDrawn: self._draw,
            LeaseIssued: self._lease,
            FateDecided: self._decide,
            BatchTaken: self._take,
            BatchDropped: self._drop,
            VersionPublished: self._publish,
            StepCommitted: self._commit,
            RunEnded: self._end,
            RunResumed: self._resume,
            ScheduleChanged: self._change_schedule,
            **dict.fromkeys((AttemptFailed, ResultDropped, StepRedone, EvalFinished), self._count),
            **dict.fromkeys((ServiceSetAside, ServiceRestored), self._count),
        }

    @property
    def policies(self) -> dict[str, AuditedPolicy]:
        """By name."""
        return self.state.policies

    def apply(self, record: Record) -> None:
        """Applies one record, and checks its number and chain. Raises: JournalError if it cannot be read."""
        if record.seq != self.state.seq + 1:
            self._problem(f"record {self.state.seq + 1} is missing: {record.seq} follows {self.state.seq}")
        if chain_of(self.state.chain, record) != record.chain:
            self._problem(f"record {record.seq} was changed, or a record before it is missing")
        self.state.num_records += 1
        self.state.seq = record.seq
        self.state.chain = record.chain
        commands = decode_commands(record)
        events = decode_events(record)
        if len(commands) != len(events):
            self._problem(f"record {record.seq} holds {len(commands)} commands, and events of {len(events)}")
        for command, led_to in zip(commands, events, strict=False):
            self._apply(command, led_to, record)

    def _apply(self, command: Command, events: tuple[Event, ...], record: Record) -> None:
        for event in events:
            self._handlers[type(event)](event, record)
            if isinstance(event, AttemptFailed):
                self._count_failure_kind(event, command)
        if isinstance(command, RecordResult) and isinstance(command.outcome, EpisodeFacts):
            is_dropped = any(isinstance(event, ResultDropped) for event in events)
            if not is_dropped:
                self._accept(command.lease_id, command.outcome)
        elif isinstance(command, ReleaseSteps):
            policy = self._policy(command.policy)
            policy.released = max(policy.released, command.step)

    def plan_at(self, seq: int) -> RecordedPlan | None:
        """The plan in force for a record."""
        known = [plan for after, plan in self._plans if after < seq]
        return known[-1] if known else None

    def live(self, name: str) -> set[int]:
        """Ids of a policy's groups that have no fate yet."""
        return {idx for idx, group in self.groups.items() if name in group.drawn and name not in group.fates}

    def group(self, group_id: int) -> AuditedGroup:
        """An open group; an empty one if there is none."""
        return self.groups.get(group_id) or AuditedGroup()

    # --- events ---

    def _problem(self, text: str) -> None:
        self.problems.append(text)

    def _policy(self, policy: str) -> AuditedPolicy:
        if policy not in self.policies:
            self._problem(f"policy {policy!r} is in no plan of the run")
        return self.policies.setdefault(policy, AuditedPolicy())

    def _push(self, event: TasksPushed, _: Record) -> None:
        state = self.state
        again = state.pushed & set(event.accepted)
        if again:
            self._problem(f"pushed task {min(again)} is accepted twice")
        state.pushed.update(event.accepted)
        state.pushed_waiting.update(event.accepted)
        state.num_push_refused += event.num_refused

    def _draw(self, event: GroupDrawn, record: Record) -> None:
        plan = self.plan_at(record.seq)
        num_before = event.group_id - len(self.state.pushed) + len(self.state.pushed_waiting)
        if event.task_idx >= 0 and plan is not None and 0 < plan.most_drawn <= num_before:
            self._problem(f"group {event.group_id} is drawn after the {plan.most_drawn} draws of all epochs")
        if event.task_idx < 0:  # A pushed task: it is in no source.
            if event.task_id not in self.state.pushed_waiting:
                self._problem(
                    f"group {event.group_id}: pushed task {event.task_id} is drawn twice, or unasked"
                )
            self.state.pushed_waiting.discard(event.task_id)
        drawn = [*event.admitted, *event.unadmitted]
        if event.group_id in self.groups or event.group_id < self.state.drawn_below:
            self._problem(f"{', '.join(drawn)}: group {event.group_id} is drawn twice")
            return
        for policy in drawn:
            self._policy(policy)
        self.groups[event.group_id] = AuditedGroup(drawn=drawn)

    def _episodes(self, lease_id: str) -> AuditedEpisodes | None:
        """The group or round of a lease, if it is open."""
        if lease_kind(lease_id) == "eval":
            return self.state.rounds.get(_group_of(lease_id))
        return self.groups.get(_group_of(lease_id))

    def _lease(self, event: LeaseIssued, record: Record) -> None:
        if event.kind == "eval":
            self.state.rounds.setdefault(event.group_id, AuditedEpisodes())
        elif not self.state.first_lease_s:
            self.state.first_lease_s = record.at_s
        episodes = self._episodes(event.lease_id)
        if episodes is None:
            self._problem(f"lease {event.lease_id} is issued of a group that is not open")
        elif event.lease_id in episodes.leases:
            self._problem(f"lease {event.lease_id} is issued twice")
        else:
            episodes.leases.add(event.lease_id)

    def _decide(self, event: FateDecided, _: Record) -> None:
        self._policy(event.policy)
        group = self.groups.get(event.group_id)
        if group is None or event.policy not in group.drawn:
            self._problem(f"{event.policy}: group {event.group_id} is {event.fate} but was never drawn")
        elif (first := group.fates.get(event.policy)) is not None:
            self._problem(f"{event.policy}: group {event.group_id} is {first.fate} and then {event.fate}")
        else:
            group.fates[event.policy] = event
        batch = self.policies[event.policy].batches.get(event.step)
        if event.fate == "trained" and (batch is None or event.group_id not in batch.event.group_ids):
            self._problem(
                f"{event.policy}: group {event.group_id} is trained in step {event.step + 1}, whose batch "
                "does not hold it"
            )

    def _take(self, event: BatchTaken, record: Record) -> None:
        policy = self._policy(event.policy)
        if event.step in policy.batches or event.step < policy.num_committed:
            self._problem(f"{event.policy}: step {event.step + 1} gets a second batch")
            return
        policy.batches[event.step] = AuditedBatch(event, record.seq)
        self._use(event, record)

    def _drop(self, event: BatchDropped, _: Record) -> None:
        """Removes dropped batches; their steps get others.

        None of their fresh groups will be trained on. Replayed groups keep the fate of their first step.
        """
        name = event.policy
        policy = self._policy(name)
        open_steps = tuple(sorted(step for step in policy.batches if step >= policy.num_committed))
        if event.steps != open_steps or not open_steps:
            self._problem(
                f"{name}: the batches of steps {_numbers(event.steps)} are dropped; those of "
                f"{_numbers(open_steps)} are not committed"
            )
        for step in open_steps:
            batch = policy.batches.pop(step)
            for idx in batch.event.group_ids:
                fate = self.group(idx).fates.get(name)
                if fate is None or fate.fate != "evicted":
                    fate_text = fate.fate if fate else "undecided"
                    self._problem(
                        f"{name}: group {idx} of the dropped batch of step {step + 1} is {fate_text}"
                    )
            for idx in batch.all_ids:
                self.group(idx).contribution(name).num_uses -= 1
        policy.num_dropped += len(open_steps)

    def _use(self, event: BatchTaken, record: Record) -> None:
        """Counts the uses of a batch's groups: the first of fresh ones, a further one of replayed ones."""
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
        policy = self._policy(event.policy)
        if event.version <= policy.newest_version:
            self._problem(
                f"{event.policy}: version {event.version} is published after {policy.newest_version}"
            )
        policy.newest_version = max(policy.newest_version, event.version)

    def _commit(self, event: StepCommitted, record: Record) -> None:
        step = event.record
        policy = self._policy(step.policy)
        if step.step != policy.num_committed:
            self._problem(
                f"{step.policy}: step {step.number} is committed where {policy.num_committed + 1} is next"
            )
        if step.version > policy.newest_version:
            self._problem(
                f"{step.policy}: step {step.number} is committed as version {step.version}, which was "
                "never published"
            )
        policy.num_committed += 1
        policy.committed[step.step] = step
        self.state.last_commit_s = record.at_s

    def _end(self, event: RunEnded, record: Record) -> None:
        if self.state.ended is not None:
            self._problem(f"record {record.seq}: the run ends a second time")
        self.state.ended = event

    def _change_schedule(self, event: ScheduleChanged, record: Record) -> None:
        """Checks that the plan in force has the same schedule."""
        plan = self.plan_at(record.seq)
        if plan is None or plan.schedule != event.schedule:
            self._problem(f"record {record.seq}: the schedule changes to one that is in no plan of the run")

    def _resume(self, _: RunResumed, record: Record) -> None:
        """Removes the batches of uncommitted steps, which get others."""
        ended = self.state.ended
        if ended is None or not (ended.is_failure or self._has_more_steps(record.seq)):
            self._problem(f"record {record.seq}: a run is resumed that neither failed nor got more steps")
        self.state.ended = None
        for policy in self.policies.values():
            for step in [step for step in policy.batches if step >= policy.num_committed]:
                del policy.batches[step]

    def _has_more_steps(self, seq: int) -> bool:
        """Whether a policy has steps to do, according to the plan in force for a record."""
        plan = self.plan_at(seq)
        facts = {} if plan is None else plan.policies
        return any(self._policy(name).num_committed < each.num_steps for name, each in facts.items())

    def _count(self, event: Event, _: Record) -> None:
        """Counts an event that no rule is about. Changes of a service's standing are not counted."""
        match event:
            case AttemptFailed():
                self.state.num_failed_attempts += event.error_class != HANDED_IN
            case ResultDropped():
                self.state.num_dropped += 1
            case StepRedone():
                self._policy(event.policy).num_redone += 1
            case EvalFinished():
                self.state.num_evals += 1
            case _:
                pass

    def _count_failure_kind(self, event: AttemptFailed, command: Command) -> None:
        """Counts a failure by its kind. A lost attempt has no message, and a hand-in is not a failure."""
        if event.error_class == HANDED_IN:
            return
        failure = Failure(error_class=event.error_class, message="")
        if isinstance(command, RecordResult) and isinstance(command.outcome, Failure):
            failure = command.outcome
        count_failure(self.state.failures, failure)

    def _accept(self, lease_id: str, facts: EpisodeFacts) -> None:
        """Counts an accepted result. A repeated result of the same lease counts once."""
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
        self.state.num_results += 1
        if isinstance(episodes, AuditedGroup):
            _contribute(episodes, facts)


def _contribute(group: AuditedGroup, facts: EpisodeFacts) -> None:
    """Adds an accepted episode to each policy's contribution, without trajectories that are not trained."""
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
    """Numbers of steps as people count them, from 1."""
    return [step + 1 for step in steps]


def _group_of(lease_id: str) -> int:
    """The id of the group or evaluation round to which a lease belongs."""
    return int(lease_id.partition(".")[0].lstrip("e"))


def count_failure(kinds: dict[str, FailureKind], failure: Failure) -> None:
    """Counts a failed attempt."""
    key = f"{failure.error_class} {failure.place}"
    example = f"{failure.error_class}: {failure.message}" if failure.message else failure.error_class
    if key not in kinds and len(kinds) >= _MAX_KINDS:
        key = example = _OTHERS
    kinds.setdefault(key, FailureKind(example=example[:_MAX_MESSAGE_CHARS])).num += 1

"""Folds the journal's events into books: what was drawn, leased, accepted, taken and committed, and its end.

Reads rows only; knows nothing of the core's state. What cannot be booked (a second fate, a batch of a step
that has one) is a problem, in words; `audit` adds the checks over the whole.

The books can be carried (`books` holds all but the groups), and what is closed leaves them: `compaction` does
that, so that a long run's books stay as small as what is open. Anything that happens to a group afterwards is
a problem: it is not in the books.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from astraflow.dataflow.books import Books, Brought, EpisodeBooks, GroupBooks, PolicyBooks, TakenBatch
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
    PushTaskIds,
    RecordResult,
    ReleaseSteps,
    ResultDropped,
    RunEnded,
    RunResumed,
    ServiceRestored,
    ServiceSetAside,
    StepCommitted,
    StepRedone,
    TasksPushed,
    VersionPublished,
)
from astraflow.dataflow.ingest import lease_kind
from astraflow.dataflow.records import PlanRow, Record, chain_of, decode_commands, decode_events

__all__ = ["Ledger"]


class Ledger:
    """The books of a run. Feed it every record in order with `book`."""

    def __init__(
        self,
        plans: list[tuple[int, PlanRow]],
        books: Books | None = None,
        groups: Mapping[int, GroupBooks] | None = None,
    ) -> None:
        """`books` and `groups`: what was carried, if anything was."""
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
            ServiceSetAside: self._pass_over,
            ServiceRestored: self._pass_over,
        }

    @property
    def policies(self) -> dict[str, PolicyBooks]:
        """By name."""
        return self.books.policies

    def book(self, record: Record) -> None:
        """Books one record, its place and its chain checked. Raises: JournalError if it cannot be read."""
        if record.seq != self.books.seq + 1:
            self._problem(f"record {self.books.seq + 1} is missing: {record.seq} follows {self.books.seq}")
        if chain_of(self.books.chain, record) != record.chain:
            self._problem(f"record {record.seq} was changed, or a record before it is missing")
        self.books.num_records += 1
        self.books.seq, self.books.chain = record.seq, record.chain
        commands, events = decode_commands(record), decode_events(record)
        if len(commands) != len(events):
            self._problem(f"record {record.seq} holds {len(commands)} commands, and events of {len(events)}")
        for command, led_to in zip(commands, events, strict=False):
            self._book(command, led_to, record)

    def _book(self, command: Command, events: tuple[Event, ...], record: Record) -> None:
        for event in events:
            self._bookings[type(event)](event, record)
        if isinstance(command, RecordResult) and isinstance(command.outcome, EpisodeFacts):
            is_dropped = any(isinstance(event, ResultDropped) for event in events)
            if not is_dropped:
                self._accept(command.lease_id, command.outcome)
        elif isinstance(command, ReleaseSteps):
            books = self._books(command.policy)
            books.released = max(books.released, command.step)
        elif isinstance(command, PushTaskIds) and not events:
            # Of a version that wrote no such event: the known ones among them were not accepted again.
            new = {task.id for task in command.tasks} - self.books.pushed
            self._push(TasksPushed(accepted=tuple(new), num_known=0, num_refused=0), record)

    def plan_at(self, seq: int) -> PlanRow | None:
        """The plan in force for a record."""
        known = [plan for after, plan in self._plans if after < seq]
        return known[-1] if known else None

    def live(self, name: str) -> set[int]:
        """Groups of a policy without a fate."""
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
        if event.task_idx < 0:
            if event.task_id not in self.books.pushed_waiting:
                self._problem(
                    f"group {event.group_id}: pushed task {event.task_id} is drawn twice, or unasked"
                )
            self.books.pushed_waiting.discard(event.task_id)
        drawn: Iterable[str] = (*event.admitted, *event.unadmitted)
        if event.group_id in self.groups or event.group_id < self.books.drawn_below:
            self._problem(f"{', '.join(drawn)}: group {event.group_id} is drawn twice")
            return
        for policy in drawn:
            self._books(policy)
        self.groups[event.group_id] = GroupBooks(drawn=list(drawn))

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
                f"{event.policy}: group {event.group_id} is trained in step {event.step}, whose batch does "
                "not hold it"
            )

    def _take(self, event: BatchTaken, record: Record) -> None:
        books = self._books(event.policy)
        if event.step in books.batches or event.step < books.num_committed:
            self._problem(f"{event.policy}: step {event.step} gets a second batch")
            return
        books.batches[event.step] = TakenBatch(event, record.seq)
        self._use(event, record)

    def _drop(self, event: BatchDropped, _: Record) -> None:
        """The batches leave the books: their steps get others. None of their groups was, or will be, trained
        on; a replayed one keeps the fate of its first step."""
        name, books = event.policy, self._books(event.policy)
        open_steps = tuple(sorted(step for step in books.batches if step >= books.num_committed))
        if event.steps != open_steps or not open_steps:
            self._problem(
                f"{name}: the batches of steps {list(event.steps)} are dropped; those of {list(open_steps)} "
                "are not committed"
            )
        for step in open_steps:
            taken = books.batches.pop(step)
            for idx in taken.event.group_ids:
                fate = self.group(idx).fates.get(name)
                if fate is None or fate.fate != "evicted":
                    said = fate.fate if fate else "undecided"
                    self._problem(f"{name}: group {idx} of the dropped batch of step {step} is {said}")
            for idx in taken.all_ids:
                self.group(idx).of(name).num_uses -= 1
        books.num_dropped += len(open_steps)

    def _use(self, event: BatchTaken, record: Record) -> None:
        """Books the uses of a batch's groups: a fresh one is in its first, a replayed one in one more."""
        name, at = event.policy, f"{event.policy}: batch of step {event.step}"
        for idx in event.group_ids:
            if (brought := self.group(idx).of(name)).num_uses:
                self._problem(
                    f"{name}: group {idx} is in the batches of {brought.first_step} and {event.step}"
                )
        if twice := len(event.replayed_ids) - len(set(event.replayed_ids)):
            self._problem(f"{at}: {twice} groups are replayed twice in it")
        for idx in event.replayed_ids:
            if not self.group(idx).of(name).num_uses:
                self._problem(f"{at}: group {idx} is replayed, but no earlier batch holds it")
        plan = self.plan_at(record.seq)
        most = plan.policies[name].max_uses if plan and name in plan.policies else 1
        for idx in (*event.group_ids, *event.replayed_ids):
            brought = self.group(idx).brought.setdefault(name, Brought())
            brought.num_uses += 1
            brought.first_step = event.step if brought.num_uses == 1 else brought.first_step
            if brought.num_uses > most:
                self._problem(
                    f"{name}: group {idx} is in {brought.num_uses} batches, at most {most} may hold it"
                )

    def _publish(self, event: VersionPublished, _: Record) -> None:
        books = self._books(event.policy)
        if event.version <= books.newest_version:
            self._problem(
                f"{event.policy}: version {event.version} is published after {books.newest_version}"
            )
        books.newest_version = max(books.newest_version, event.version)

    def _commit(self, event: StepCommitted, row: Record) -> None:
        record = event.record
        books = self._books(record.policy)
        if record.step != books.num_committed:
            self._problem(
                f"{record.policy}: step {record.step} is committed where {books.num_committed} is next"
            )
        if record.version > books.newest_version:
            self._problem(
                f"{record.policy}: step {record.step} is committed as version {record.version}, which was "
                "never published"
            )
        books.num_committed += 1
        books.committed[record.step] = record
        self.books.last_commit_s = row.at_s

    def _redo(self, event: StepRedone, _: Record) -> None:
        self._books(event.policy).num_redone += 1

    def _end(self, event: RunEnded, record: Record) -> None:
        if self.books.ended is not None:
            self._problem(f"record {record.seq}: the run ends a second time")
        self.books.ended = event

    def _resume(self, _: RunResumed, record: Record) -> None:
        """Steps that were not committed when the run failed get other batches."""
        if self.books.ended is None or not self.books.ended.is_failure:
            self._problem(f"record {record.seq}: a run is resumed that had not failed")
        self.books.ended = None
        for books in self.policies.values():
            for step in [step for step in books.batches if step >= books.num_committed]:
                del books.batches[step]

    def _pass_over(self, _: ServiceSetAside | ServiceRestored, __: Record) -> None:
        """Nothing is counted of it."""

    def _count_failed(self, event: AttemptFailed, _: Record) -> None:
        self.books.num_failed_attempts += 1

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
        brought_by = episodes.brought if isinstance(episodes, GroupBooks) else dict[str, Brought]()
        for meta in facts.trajectories:
            brought = brought_by.setdefault(meta.policy, Brought())
            if meta.num_trained_tokens == 0:
                continue
            oldest = (meta.oldest_version, brought.oldest_version)
            brought.oldest_version = min(oldest) if brought.num_samples else meta.oldest_version
            brought.num_samples += 1
            brought.num_trained_tokens += meta.num_trained_tokens
            brought.payloads.append(meta.payload)


def _group_of(lease_id: str) -> int:
    """Number of the group or round of a lease."""
    return int(lease_id.partition(".")[0].lstrip("e"))

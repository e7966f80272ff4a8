"""Turns the records of the journal into rows of the index.

`Booker.book` takes the records in order, and `flush` writes the rows that wait to the tables. A row of
`episodes` is one trajectory of a result, or a result without trajectories (from an evaluation or a failed
attempt). Its fate arrives later, in another record. Rows that are still in memory get it there; rows that are
already flushed get it by an update.
"""

import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from astraflow.addons.view.advantages import Advantages
from astraflow.addons.view.groups import LeaseId, OpenGroup, OpenGroups, lease_of
from astraflow.addons.view.log_tail import LogEntry, Position
from astraflow.addons.view.names import Names
from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.dataflow.core.commands import (
    AddWorker,
    AttemptFailed,
    BatchDropped,
    BatchTaken,
    Command,
    DropWorker,
    EpisodeFacts,
    EvalFinished,
    Event,
    FateDecided,
    GroupDrawn,
    LeaseIssued,
    PublishFrozen,
    PublishVersion,
    RecordResult,
    ResultDropped,
    RunEnded,
    RunResumed,
    ScheduleChanged,
    ServiceRestored,
    ServiceSetAside,
    StepCommitted,
    StepRedone,
    TrajectoryMeta,
)
from astraflow.dataflow.journal.records import Record, decode_commands, decode_events, decode_records
from astraflow.types import Failure, Manifest

__all__ = ["Booker", "EpisodeRow"]

_MAX_LEASES = 200_000
"""Maximum number of leases whose service is remembered, in case they fail without a report from it."""


class EpisodeRow(msgspec.Struct, gc=False):
    """A row of `episodes`, in column order. Names are stored as ids from the table `names`."""

    id: int
    kind: int
    group_id: int
    episode_idx: int
    attempt: int
    part: int
    """Position of the trajectory in its episode; 0 if there is none."""
    at_s: float
    duration_s: float | None = None
    task: int | None = None
    policy: int | None = None
    role: int | None = None
    worker: int | None = None
    reward: float | None = None
    score: float | None = None
    advantage: float | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    turns: int | None = None
    oldest: int | None = None
    newest: int | None = None
    finish: int | None = None
    error: int | None = None
    fate: int | None = None
    step: int | None = None
    staleness: int | None = None
    segment: int | None = None
    offset: int | None = None
    length: int | None = None
    log_segment: int = 0
    log_offset: int = 0
    sample: int | None = None


_INSERT = f"INSERT INTO episodes VALUES ({', '.join('?' * len(EpisodeRow.__struct_fields__))})"
_UPDATE = "UPDATE episodes SET fate = ?, step = ?, staleness = ?, advantage = ? WHERE id = ?"


class Booker:
    """Turns log entries into rows.

    Example: `booker.book(entry)` for each entry of the log, then `booker.flush()`.
    """

    def __init__(
        self,
        database: sqlite3.Connection,
        names: Names,
        advantages: dict[str, Advantages],
        groups: OpenGroups,
    ) -> None:
        self._database = database
        self._names = names
        self._advantages = advantages
        self._groups = groups
        newest = database.execute("SELECT max(id) FROM episodes").fetchone()[0]
        self._next_id = (newest or 0) + 1
        self._rows: dict[int, EpisodeRow] = {}
        query = "SELECT who FROM happenings WHERE kind = 'join'"
        self._joined = {str(row[0]) for row in database.execute(query)}
        """Names of the services that have joined."""
        self._sizes: dict[str, int] = {}
        """Policy -> bytes of a full version."""
        self._workers: dict[str, str] = {}
        """Lease -> the service that holds it."""
        self._place: Position = (0, 0)
        self._at_s = 0.0
        self.last_seq = 0
        """Number of the newest record that was booked."""
        self._of_event: dict[type[Any], Callable[[Any], None]] = {
            GroupDrawn: self._draw,
            LeaseIssued: self._lease,
            FateDecided: self._decide,
            **dict.fromkeys((BatchTaken, BatchDropped, StepCommitted, StepRedone, EvalFinished), self._note),
            **dict.fromkeys((ServiceSetAside, ServiceRestored), self._note_change),
            **dict.fromkeys((RunEnded, RunResumed, ScheduleChanged), self._note_change),
        }

    @property
    def num_waiting(self) -> int:
        """Number of rows that are not in the tables yet."""
        return len(self._rows)

    def book(self, entry: LogEntry) -> None:
        """Processes the records of one entry, within the caller's transaction.

        Raises: JournalError if they cannot be decoded; sqlite3.Error.
        """
        self._place = entry.begin
        for record in decode_records(entry.data):
            if record.seq > self.last_seq:
                self.last_seq = record.seq
                self._book_record(record)

    def _book_record(self, record: Record) -> None:
        self._at_s = record.at_s
        for command, events in zip(decode_commands(record), decode_events(record), strict=True):
            if type(command) is RecordResult:
                self._result(command, events)
            else:
                self._command(command)
            for event in events:
                if (book := self._of_event.get(type(event))) is not None:
                    book(event)
                elif type(event) is AttemptFailed:
                    self._failed(event, command)

    # --- results ---

    def _result(self, command: RecordResult, events: Sequence[Event]) -> None:
        self._workers.pop(command.lease_id, None)
        facts = command.outcome
        if isinstance(facts, Failure) or any(type(event) is ResultDropped for event in events):
            return
        lease = lease_of(command.lease_id)
        if lease is None:
            return
        group = self._groups.get(lease.kind, lease.group_id)
        if lease.episode_idx in group.good:
            return  # the result was sent twice
        group.good.add(lease.episode_idx)
        if lease.kind == EVAL:
            row = self._row(lease, group, command.worker_id)
            row.score = row.reward = facts.score
            row.duration_s = facts.duration_s
            return
        group.facts[lease.episode_idx] = facts
        for part, meta in enumerate(facts.trajectories):
            self._trajectory(self._row(lease, group, command.worker_id), facts, part, meta)
        if not facts.trajectories:
            row = self._row(lease, group, command.worker_id)
            row.score = row.reward = facts.score
            row.duration_s = facts.duration_s

    def _row(self, lease: LeaseId, group: OpenGroup, worker_id: str) -> EpisodeRow:
        """Makes a row from what the lease contains."""
        row = EpisodeRow(
            id=self._next_id,
            kind=lease.kind,
            group_id=lease.group_id,
            episode_idx=lease.episode_idx,
            attempt=lease.attempt,
            part=0,
            at_s=self._at_s,
            task=group.task,
            worker=self._names.id_of(worker_id, "worker") if worker_id else None,
            log_segment=self._place[0],
            log_offset=self._place[1],
        )
        self._next_id += 1
        self._rows[row.id] = row
        return row

    def _trajectory(self, row: EpisodeRow, facts: EpisodeFacts, part: int, meta: TrajectoryMeta) -> None:
        id_of = self._names.id_of
        row.part = part
        row.duration_s = facts.duration_s
        row.score = facts.score
        row.policy = id_of(meta.policy, "policy")
        row.role = id_of(meta.role, "role")
        row.reward = meta.reward
        row.tokens = meta.num_tokens
        row.trained_tokens = meta.num_trained_tokens
        row.turns = len(meta.turn_spans)
        row.oldest = meta.oldest_version
        row.newest = meta.newest_version
        row.finish = id_of(meta.finish_reason)
        row.segment = meta.payload.segment
        row.offset = meta.payload.offset
        row.length = meta.payload.length
        group = self._groups.get(TRAIN, row.group_id)
        group.rows.setdefault(meta.policy, []).append((row.id, row.episode_idx, part))
        if (fate := group.fates.get(meta.policy)) is not None:
            row.fate, row.step, row.staleness = fate

    def _failed(self, event: AttemptFailed, command: Command) -> None:
        lease = lease_of(event.lease_id)
        worker_id = self._workers.pop(event.lease_id, "")
        if lease is None:
            return
        message = ""
        if isinstance(command, RecordResult) and isinstance(command.outcome, Failure):
            message = command.outcome.message
            worker_id = command.worker_id
        row = self._row(lease, self._groups.get(lease.kind, lease.group_id), worker_id)
        row.error = self._names.id_of(event.error_class, "error")
        if message:
            self._database.execute("INSERT INTO texts VALUES (?, ?)", (row.id, message))

    # --- groups ---

    def _draw(self, event: GroupDrawn) -> None:
        task = self._names.task_id_of(event.task_id)
        values = (event.group_id, task, self._at_s)
        self._database.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?)", values)
        self._groups.begin(event.group_id, task, {*event.admitted})

    def _lease(self, event: LeaseIssued) -> None:
        if len(self._workers) >= _MAX_LEASES:
            self._workers.clear()
        self._workers[event.lease_id] = event.worker_id

    def _decide(self, event: FateDecided) -> None:
        """Sets the fate of a group's rows of one policy, and the advantages, as the group is now complete."""
        group = self._groups.get(TRAIN, event.group_id)
        step = event.step + 1 if event.step >= 0 else None  # counted from 1
        fate = (self._names.id_of(event.fate), step, event.staleness)
        group.fates[event.policy] = fate
        means: dict[tuple[int, int], float] = {}
        if event.fate in {"trained", "stale", "evicted"} and event.policy in self._advantages:
            means = self._advantages[event.policy].means(event.group_id, group.facts)
        for row_id, episode_idx, part in group.rows.get(event.policy, ()):
            advantage = means.get((episode_idx, part))
            if (row := self._rows.get(row_id)) is not None:
                row.fate, row.step, row.staleness = fate
                row.advantage = advantage
            else:
                self._database.execute(_UPDATE, (*fate, advantage, row_id))
        self._groups.decided(event.group_id, event.policy)

    # --- everything else ---

    def _command(self, command: Command) -> None:
        match command:
            case AddWorker():
                # A service that joins again under its name was restarted.
                kind = "restart" if command.name in self._joined else "join"
                self._joined.add(command.name)
                self._happen(kind, command.name, text=f"hosts {', '.join(command.hosts)}")
            case DropWorker():
                self._happen("leave", _name_of(command.worker_id), text=command.reason)
            case PublishVersion():
                self._publish(command.manifest, command.step)
            case PublishFrozen():
                self._publish(command.manifest, 0)
            case _:
                pass

    def _publish(self, manifest: Manifest, step: int) -> None:
        full = sum(tensor.num_bytes for tensor in manifest.tensors) or self._full_bytes(manifest)
        self._sizes[manifest.policy] = full
        shortcut = sum(chunk.num_bytes for chunk in manifest.shortcut.chunks) if manifest.shortcut else 0
        row = (manifest.policy, manifest.version, step, self._at_s, manifest.kind, manifest.base)
        values = (*row, manifest.num_bytes, full, shortcut, len(manifest.chunks))
        self._database.execute(f"INSERT OR REPLACE INTO versions VALUES ({', '.join('?' * 10)})", values)
        self._happen("publish", manifest.policy, step=step, version=manifest.version)

    def _full_bytes(self, manifest: Manifest) -> int:
        """Returns the size in bytes of all tensors of a version whose record has no table of tensors.

        The record of the policy's first version has the table, so its size is reused.
        """
        policy = manifest.policy
        if manifest.kind == "full":
            return sum(chunk.num_bytes for chunk in manifest.chunks)
        if policy not in self._sizes:
            query = "SELECT max(full_bytes) FROM versions WHERE policy = ?"
            self._sizes[policy] = self._database.execute(query, (policy,)).fetchone()[0] or 0
        return self._sizes[policy]

    def _note(self, event: Event) -> None:
        """Stores an event about the steps of a policy."""
        match event:
            case BatchTaken():
                text = f"{len(event.group_ids)} groups, staleness up to {max(event.staleness, default=0)}"
                self._happen(
                    "take", event.policy, step=event.step + 1, version=event.trainer_version, text=text
                )
            case StepCommitted(record=record):
                self._happen("commit", record.policy, step=record.step + 1, version=record.version)
            case StepRedone():
                self._happen("redo", event.policy, step=event.step + 1, version=event.version)
            case EvalFinished(record=record):
                score = "no score" if record.score_mean is None else f"{record.score_mean:.4g}"
                text = f"{record.eval_set}: {score}"
                self._happen("eval", record.policy, step=record.step, version=record.version, text=text)
            case BatchDropped():
                self._happen("drop", event.policy, step=min(event.steps, default=0) + 1, text=event.reason)
            case _:
                pass

    def _note_change(self, event: Event) -> None:
        """Stores an event about a service or the run."""
        match event:
            case ServiceSetAside():
                self._happen("set aside", _name_of(event.worker_id), text=event.last_failure)
            case ServiceRestored():
                self._happen("restored", _name_of(event.worker_id))
            case RunEnded():
                self._happen("end", "run", text=event.reason)
            case RunResumed():
                self._happen("resume", "run")
            case ScheduleChanged():
                self._happen("schedule", "run", text=f"steps {event.schedule.steps}")
            case _:
                pass

    def _happen(
        self, kind: str, who: str, *, step: int | None = None, version: int | None = None, text: str = ""
    ) -> None:
        query = "INSERT INTO happenings (at_s, kind, who, step, version, text) VALUES (?, ?, ?, ?, ?, ?)"
        self._database.execute(query, (self._at_s, kind, who, step, version, text))

    # --- the tables ---

    def flush(self) -> None:
        """Writes the rows that wait to the tables, within the caller's transaction. Raises: sqlite3.Error."""
        self._database.executemany(_INSERT, map(msgspec.structs.astuple, self._rows.values()))
        self._rows.clear()


def _name_of(worker_id: str) -> str:
    """Returns the name of a service, which it keeps when it is restarted."""
    return worker_id.rpartition(".")[0] or worker_id

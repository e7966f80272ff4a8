"""Writes a snapshot and then removes what is no longer needed from the journal, in pieces, during the run.

After a snapshot, a restart needs no older records, but the audit still needs their content. Compaction
therefore applies them to the audit state, as the audit does (`ledger`). What is *closed* is checked, and
becomes part of the fate rows and of a sum over them. The rest, which is open, is stored as the new audit
state. Steps, evaluations and plans go into their tables. From then on, nobody reads these records any more.
Segments of which nothing may be requested are deleted.

A step is closed when it is committed; a group when it has a fate for all policies, is in no open batch, and
is not kept for replay; an evaluation round when it is over.

Compaction stops at the first record that violates a rule, and the audit shows it.

Each piece takes a few milliseconds in the tables' thread, with at most one transaction, so that other rows
can be written in between. A crash between any two pieces is harmless. Pieces before the switch (one row of
`meta`) write data that nobody reads yet, and the next compaction writes it again. Pieces after the switch
delete data that nobody reads any more.
"""

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from astraflow.dataflow.core.commands import EvalFinished, PayloadRef, StepCommitted
from astraflow.dataflow.journal.journal_db import (
    Compacted,
    FateRow,
    SqlRow,
    make_insert,
    row_sum,
    transaction,
)
from astraflow.dataflow.journal.ledger import AuditedGroup, AuditState, Ledger, ReplayedGroups
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import events_of
from astraflow.dataflow.journal.rules import batch_problems, commit_problems
from astraflow.dataflow.journal.segments import SegmentStore
from astraflow.errors import Error, JournalError
from astraflow.types import EvalRecord, StepRecord

__all__ = ["Compaction", "CompactionInput", "load_audit_state", "load_ledger"]

_CHUNK = 128
"""Records, rows or groups in one piece: a few milliseconds of work."""
_DIGEST_BYTES = 16
_STATES = msgspec.msgpack.Decoder(AuditState)
_GROUPS = msgspec.msgpack.Decoder(dict[int, AuditedGroup])
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CompactionInput:
    """What to compact, as known at the snapshot of record `seq`."""

    seq: int
    snapshot: Iterator[bytes]
    """The parts of the snapshot. Empty if the journal already has it."""
    open_rounds: frozenset[int]
    """Evaluation rounds that are not over."""
    replayable: frozenset[int]
    """Groups that later batches may replay. No other group can be in a second batch."""
    segment: int
    """The segment that is written at that moment. Later records refer to no older payload."""
    retained_steps: int
    """Number of committed steps of each policy whose payloads are kept after their release."""


def load_ledger(reader: JournalReader) -> Ledger:
    """Loads the ledger as the last compaction left it; empty if there was none. Raises: JournalError."""
    state = load_audit_state(reader)
    if state is None:
        return Ledger(reader.plans())
    groups: dict[int, AuditedGroup] = {}
    for part in reader.audit_state_parts()[1:]:
        groups |= _unseal(_GROUPS, part)
    return Ledger(reader.plans(), state, groups)


def load_audit_state(reader: JournalReader) -> AuditState | None:
    """Loads the audit state of the last compaction, without the open groups. Raises: JournalError."""
    if not reader.compacted.seq:
        return None
    parts = reader.audit_state_parts()
    if not parts:
        raise JournalError(f"the audit state of record {reader.compacted.seq} is missing from the journal")
    return _unseal(_STATES, parts[0])


class Compaction:
    """One compaction. Call `step` in the tables' thread until `is_done`, then `close`; or `close` earlier."""

    def __init__(
        self, folder: Path, database: sqlite3.Connection, segments: SegmentStore, what: CompactionInput
    ) -> None:
        self._folder = folder
        self._db = database
        self._segments = segments
        self._input = what
        self._rows: list[tuple[str, SqlRow]] = []
        """The steps, evaluations and plans that are being compacted: (SQL, parameters)."""
        self._newest_s = 0.0
        """Time of the newest record that is being compacted."""
        self._pieces = self._run()
        self.is_done = False

    def step(self) -> None:
        """Does one piece. Raises: JournalError if it fails; the journal is then still intact."""
        try:
            self.is_done = next(self._pieces, True) is True
        except (OSError, sqlite3.Error, Error, msgspec.DecodeError) as err:
            raise JournalError(str(err)) from err

    def close(self) -> None:
        """Ends the compaction, whether it is done or not."""
        self._pieces.close()

    def _run(self) -> Generator[None]:
        """Runs all pieces in order. Each `yield` ends one."""
        yield from self._write_snapshot()
        with JournalReader(self._folder) as reader:
            ledger = load_ledger(reader)
            # False if a crash came between the switch and the deletions of the last compaction.
            is_new = self._input.seq > ledger.state.seq
            yield
            yield from self._apply_records(reader, ledger)
        if is_new:
            closed: list[tuple[int, AuditedGroup]] = []
            yield from self._close_finished(ledger, closed)
            yield from self._write_rows(ledger, closed)
            self._forget_segments(ledger)
            yield from self._write_audit_state(ledger)
            self._switch(ledger)
            yield
        with transaction(self._db):
            self._db.execute("DELETE FROM audit_state WHERE at_seq <> ?", (ledger.state.seq,))
        yield
        yield from self._drop_segments(self._first_needed(ledger))

    def _write_snapshot(self) -> Iterator[None]:
        """Encodes the snapshot part by part, then replaces the previous one."""
        parts: list[bytes] = []
        for part in self._input.snapshot:
            parts.append(part)
            yield
        if parts:
            with transaction(self._db):
                row = (self._input.seq, b"".join(parts))
                self._db.execute(*make_insert("snapshots", row, replaces=True))
                self._db.execute("DELETE FROM snapshots WHERE seq < ?", (self._input.seq,))

    def _apply_records(self, reader: JournalReader, ledger: Ledger) -> Iterator[None]:
        records = reader.records(ledger.state.seq)
        while ledger.state.seq < self._input.seq:
            chunk = list(islice(records, min(_CHUNK, self._input.seq - ledger.state.seq)))
            if not chunk:
                _raise_first([f"record {ledger.state.seq + 1} is missing"])
            for record in chunk:
                ledger.apply(record)
                for step in events_of(record, StepCommitted):
                    self._add_row("steps", record.seq, step.record)
                for round_ in events_of(record, EvalFinished):
                    self._add_row("evals", record.seq, round_.record)
                self._newest_s = record.at_s
            _raise_first(ledger.problems)
            yield
        self._rows += (
            make_insert("plans", (plan.seq, plan.at_s, plan.plan)) for plan in reader.logged_plans()
        )

    def _add_row(self, table: str, seq: int, record: StepRecord | EvalRecord) -> None:
        self._rows.append(make_insert(table, (seq, msgspec.msgpack.encode(record))))

    def _close_finished(self, ledger: Ledger, closed: list[tuple[int, AuditedGroup]]) -> Iterator[None]:
        """Checks what is closed and removes it from the ledger. Closed groups are added to `closed`."""
        for name, policy in ledger.policies.items():
            for step, record in sorted(policy.committed.items()):
                _raise_first(commit_problems(name, record, ledger))
                _raise_first(batch_problems(name, step, ledger))
                _close_step(name, step, ledger)
                yield
        # What has a fate for all policies, is in no open batch, and will be in none.
        closing = {idx for idx, group in ledger.groups.items() if group.is_decided} - self._input.replayable
        for batch in [batch for policy in ledger.policies.values() for batch in policy.batches.values()]:
            closing.difference_update(batch.all_ids)
        yield
        closed += [(group, ledger.groups.pop(group)) for group in sorted(closing)]
        rounds = ledger.state.rounds
        ledger.state.rounds = {idx: rounds[idx] for idx in rounds.keys() & self._input.open_rounds}

    def _write_rows(self, ledger: Ledger, closed: list[tuple[int, AuditedGroup]]) -> Iterator[None]:
        """Stores the fates of closed groups, and where their trained trajectories are."""
        for chunk in _chunks(closed):
            with transaction(self._db):
                for idx, group in chunk:
                    for policy in group.drawn:
                        row = group.fate_row(policy, idx)
                        self._write_fate(row, group.contribution(policy).payloads)
                        ledger.policies[policy].closed.add(row)
            yield

    def _write_fate(self, row: FateRow, refs: Sequence[PayloadRef]) -> None:
        # Rows of a compaction that was ended before its switch are replaced.
        self._db.execute(*make_insert("fates", astuple(row), replaces=True))
        if row.fate == "trained" and refs:
            first = min(ref.segment for ref in refs)
            values = (row.policy, row.group_id, first, msgspec.msgpack.encode(refs))
            self._db.execute(*make_insert("payloads", values, replaces=True))

    def _write_audit_state(self, ledger: Ledger) -> Iterator[None]:
        """Writes the audit state of the snapshot's record next to the one in force."""
        ledger.state.drawn_below = max([ledger.state.drawn_below, *(idx + 1 for idx in ledger.groups)])
        with transaction(self._db):
            self._db.execute("DELETE FROM audit_state WHERE at_seq = ?", (ledger.state.seq,))
        parts = (
            msgspec.msgpack.encode(part)
            for part in (ledger.state, *(dict(chunk) for chunk in _chunks(list(ledger.groups.items()))))
        )
        for number, part in enumerate(parts):
            with transaction(self._db):
                self._db.execute(*make_insert("audit_state", (ledger.state.seq, number, _seal(part))))
            yield

    def _switch(self, ledger: Ledger) -> None:
        """Puts the new audit state in force: from here on, nobody reads the compacted records."""
        state = ledger.state
        compacted = Compacted(
            seq=state.seq, at_s=self._newest_s, chain=state.chain, segment=self._input.segment
        )
        with transaction(self._db):
            for sql, values in self._rows:
                self._db.execute(sql, values)
            self._set_meta("compacted", msgspec.json.encode(compacted).decode())

    def _forget_segments(self, ledger: Ledger) -> None:
        """Forgets the segments of closed steps whose payloads may no longer be requested."""
        for policy in ledger.policies.values():
            first = min(policy.released, policy.num_committed - self._input.retained_steps)
            policy.first_segments = {
                step: segment for step, segment in policy.first_segments.items() if step >= first
            }

    def _first_needed(self, ledger: Ledger) -> int:
        """The first segment with a payload that may still be requested."""
        needed = [self._input.segment]
        for group in ledger.groups.values():
            for contribution in group.contributions.values():
                needed += (ref.segment for ref in contribution.payloads)
        for policy in ledger.policies.values():
            needed += policy.first_segments.values()
        return min(needed)

    def _drop_segments(self, first: int) -> Iterator[None]:
        """Copies messages from the segments before `first` into their table, then deletes these segments."""
        columns = "kind, group_id, task_id, policy, version, score, segment, offset, length"
        query = f"SELECT rowid, {columns} FROM samples WHERE segment < ? AND data IS NULL"
        for chunk in _chunks(self._db.execute(query, (first,)).fetchall()):
            messages = self._segments.read_all([PayloadRef(*row[-3:]) for row in chunk])
            with transaction(self._db):
                rows = [
                    (bytes(data), row_sum("samples", (*row[1:], bytes(data))), row[0])
                    for row, data in zip(chunk, messages, strict=True)
                ]
                self._db.executemany("UPDATE samples SET data = ?, sum = ? WHERE rowid = ?", rows)
            yield
        # Synced, unlike other rows: after a power loss, the database must not refer to deleted files.
        self._db.execute("PRAGMA synchronous=FULL")
        try:
            with transaction(self._db):
                self._db.execute("DELETE FROM payloads WHERE segment < ?", (first,))
                self._set_meta("first_segment", str(first))
        finally:
            self._db.execute("PRAGMA synchronous=NORMAL")
        yield
        self._segments.drop(first)

    def _set_meta(self, key: str, value: str) -> None:
        self._db.execute(*make_insert("meta", (key, value), replaces=True))


def _close_step(name: str, step: int, ledger: Ledger) -> None:
    """Removes a step's batch from the audit state, except for what later checks of its record need."""
    policy = ledger.policies[name]
    batch = policy.batches.pop(step)
    del policy.committed[step]
    policy.num_closed_steps += 1
    contributions = [ledger.group(group).contribution(name) for group in batch.all_ids]
    policy.first_segments[step] = min(ref.segment for each in contributions for ref in each.payloads)
    replayed = contributions[len(batch.event.group_ids) :]
    if replayed:
        policy.replayed[step] = ReplayedGroups(
            staleness=batch.event.replayed_staleness,
            num_samples=sum(each.num_samples for each in replayed),
            num_trained_tokens=sum(each.num_trained_tokens for each in replayed),
        )


def _raise_first(problems: Sequence[str]) -> None:
    """Raises JournalError with the first problem, if there is one."""
    if problems:
        raise JournalError(f"the journal is not compacted, because a check failed: {problems[0]}")


def _chunks(items: Sequence[_T]) -> Iterable[Sequence[_T]]:
    return (items[first : first + _CHUNK] for first in range(0, len(items), _CHUNK))


def _seal(part: bytes) -> bytes:
    """Puts a part of the audit state behind its hash."""
    return xxhash.xxh3_128_digest(part) + part


def _unseal(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """Decodes a sealed part of the audit state. Raises: JournalError."""
    part = data[_DIGEST_BYTES:]
    if _seal(part) != data:
        raise JournalError("the journal's audit state was changed; restore the folder from a copy")
    try:
        return decoder.decode(part)
    except msgspec.DecodeError as err:
        raise JournalError(f"the journal's audit state cannot be read: {err}") from err

"""Writes a snapshot, and then removes what nobody needs from the journal: in pieces, while the run continues.

After a snapshot a restart needs no older record, but the audit needs what those records say. So they are
booked as the audit books them (`ledger`). What is *closed* is checked, and becomes part of its fate rows
and of a sum over them; the rest, which is open, is kept as the new books. Then the records are deleted, and
so are segments that hold nothing which may still be asked for.

A step is closed when it is committed; a group when it is decided for all policies, in no open batch, and not
kept for replay; an evaluation round when it is over.

Records that do not hold are not deleted: at the first problem compaction stops, and the audit shows it.

Each piece takes a few milliseconds in the tables' thread, with at most one transaction, so that rows are
written in between. A crash between any two pieces is harmless. Those before the switch (one row of `meta`)
write what nobody reads yet, and the next compaction writes it again; those after it delete what nobody
reads any more.
"""

import sqlite3
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.journal.journal_db import FateRow, row_sum, summed
from astraflow.dataflow.journal.ledger import Books, GroupBooks, Ledger, ReplayedGroups
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.rules import batch_problems, commit_problems
from astraflow.dataflow.journal.segments import SegmentStore
from astraflow.errors import Error, JournalError

__all__ = ["Compaction", "CompactionPlan", "carried_books", "carried_ledger"]

_CHUNK = 128
"""Records, rows or groups in one piece: a few milliseconds of work."""
_DIGEST_BYTES = 16
_BOOKS = msgspec.msgpack.Decoder(Books)
_GROUPS = msgspec.msgpack.Decoder(dict[int, GroupBooks])
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CompactionPlan:
    """What to compact: all of it is known when the snapshot of record `seq` is made."""

    seq: int
    snapshot: Iterator[bytes]
    """The parts of the snapshot; none if the journal has it already."""
    open_rounds: frozenset[int]
    """Evaluation rounds that are not over."""
    replayable: frozenset[int]
    """Groups that later batches may hold again; no other group that was in a batch can be in one."""
    segment: int
    """The one that is written to at that moment; later records refer to no older payload."""
    retained_steps: int
    """Committed steps of each policy whose payloads are kept besides those that are not released."""


def carried_ledger(reader: JournalReader) -> Ledger:
    """The books as the last compaction left them; empty ones if there was none. Raises: JournalError."""
    books = carried_books(reader)
    if books is None:
        return Ledger(reader.plans())
    groups: dict[int, GroupBooks] = {}
    for part in reader.books()[1:]:
        groups |= _decoded(_GROUPS, part)
    return Ledger(reader.plans(), books, groups)


def carried_books(reader: JournalReader) -> Books | None:
    """The same without the open groups; None if there was no compaction yet. Raises: JournalError."""
    if not reader.compacted:
        return None
    parts = reader.books()
    if not parts:
        raise JournalError(f"the books up to record {reader.compacted} are missing from the journal")
    return _decoded(_BOOKS, parts[0])


class Compaction:
    """One pass. Call `step` in the tables' thread until `is_done`, and `close` at the end or earlier."""

    def __init__(
        self, folder: Path, database: sqlite3.Connection, segments: SegmentStore, plan: CompactionPlan
    ) -> None:
        self._folder = folder
        self._db = database
        self._segments = segments
        self._plan = plan
        self._pieces = self._run()
        self.is_done = False

    def step(self) -> None:
        """Does one piece. Raises: JournalError if it fails; the journal is then as good as before."""
        try:
            self.is_done = next(self._pieces, True) is True
        except (OSError, sqlite3.Error, Error, msgspec.DecodeError) as err:
            raise JournalError(str(err)) from err

    def close(self) -> None:
        """Leaves the rest undone."""
        self._pieces.close()

    def _run(self) -> Generator[None]:
        """All pieces, in order: each `yield` ends one."""
        yield from self._write_snapshot()
        with JournalReader(self._folder) as reader:
            ledger = carried_ledger(reader)
            # Not new: a crash came between the switch and the deletions of the last compaction.
            is_new = self._plan.seq > ledger.books.seq
            yield
            yield from self._book(reader, ledger)
        if is_new:
            closed: list[tuple[int, GroupBooks]] = []
            yield from self._close_what_is_over(ledger, closed)
            yield from self._write_rows(ledger, closed)
            yield from self._write_books(ledger)
            # The switch: from here on the new books are in force.
            with self._transaction():
                self._set_meta("compacted", ledger.books.seq)
            yield
        yield from self._delete_records(ledger.books.seq)
        yield from self._drop_segments(self._first_needed(ledger))

    def _write_snapshot(self) -> Iterator[None]:
        """Encodes the snapshot part by part, then replaces the former one."""
        parts: list[bytes] = []
        for part in self._plan.snapshot:
            parts.append(part)
            yield
        if parts:
            with self._transaction():
                row = (self._plan.seq, b"".join(parts))
                self._db.execute(*summed("snapshots", row, replaces=True))
                self._db.execute("DELETE FROM snapshots WHERE seq < ?", (self._plan.seq,))

    # --- booking ---

    def _book(self, reader: JournalReader, ledger: Ledger) -> Iterator[None]:
        """Books the records up to the snapshot's."""
        records = reader.records(ledger.books.seq)
        while ledger.books.seq < self._plan.seq:
            chunk = list(islice(records, min(_CHUNK, self._plan.seq - ledger.books.seq)))
            if not chunk:
                _refuse([f"record {ledger.books.seq + 1} is missing"])
            for record in chunk:
                ledger.book(record)
            _refuse(ledger.problems)
            yield

    def _close_what_is_over(self, ledger: Ledger, closed: list[tuple[int, GroupBooks]]) -> Iterator[None]:
        """Checks what is closed, and moves it out of the ledger; the groups go to `closed`."""
        for name, books in ledger.policies.items():
            for step, record in sorted(books.committed.items()):
                _refuse(commit_problems(name, record, ledger))
                _refuse(batch_problems(name, step, ledger))
                _close_step(name, step, ledger)
                yield
        closing = _closing(ledger, self._plan.replayable)
        yield
        closed += [(group, ledger.groups.pop(group)) for group in sorted(closing)]
        rounds = ledger.books.rounds
        ledger.books.rounds = {idx: rounds[idx] for idx in rounds.keys() & self._plan.open_rounds}

    # --- writing ---

    def _write_rows(self, ledger: Ledger, closed: list[tuple[int, GroupBooks]]) -> Iterator[None]:
        """Completes the fates of closed groups, and notes where their trained trajectories lie."""
        for chunk in _chunks(closed):
            ended = [
                (group.fate_row(policy, idx), group.contribution(policy).payloads)
                for idx, group in chunk
                for policy in group.drawn
            ]
            rows = [row for row, _ in ended]
            kept = [
                (row.policy, row.group_id, min(ref.segment for ref in refs), msgspec.msgpack.encode(refs))
                for row, refs in ended
                if row.fate == "trained" and refs
            ]
            with self._transaction():
                done = self._db.executemany(
                    "UPDATE fates SET samples = ?, trained_tokens = ?, sum = ? "
                    "WHERE policy = ? AND group_id = ?",
                    [_completed(row) for row in rows],
                )
                for refs_row in kept:
                    self._db.execute(*summed("payloads", refs_row, replaces=True))
            _refuse([] if done.rowcount == len(rows) else ["fates are missing from their table"])
            for row in rows:
                ledger.policies[row.policy].closed.add(row)
            yield

    def _write_books(self, ledger: Ledger) -> Iterator[None]:
        """Writes the books of the snapshot's record beside those in force."""
        ledger.books.drawn_below = max([ledger.books.drawn_below, *(idx + 1 for idx in ledger.groups)])
        self._first_needed(ledger)
        with self._transaction():
            self._db.execute("DELETE FROM books WHERE at_seq = ?", (ledger.books.seq,))
        parts = (
            msgspec.msgpack.encode(part)
            for part in (ledger.books, *(dict(chunk) for chunk in _chunks(list(ledger.groups.items()))))
        )
        for number, part in enumerate(parts):
            with self._transaction():
                self._db.execute(*summed("books", (ledger.books.seq, number, _sealed(part))))
            yield

    def _delete_records(self, seq: int) -> Iterator[None]:
        """Deletes the former books, and all but the last of the records that the new books replace."""
        with self._transaction():
            self._db.execute("DELETE FROM books WHERE at_seq <> ?", (seq,))
        query = "DELETE FROM records WHERE seq IN (SELECT seq FROM records WHERE seq < ? LIMIT ?)"
        while True:
            yield
            with self._transaction():
                if not self._db.execute(query, (seq, _CHUNK)).rowcount:
                    return

    # --- segments ---

    def _first_needed(self, ledger: Ledger) -> int:
        """The first segment with a payload that may still be asked for.

        Removes the closed steps whose payloads may not from the books.
        """
        needed = [self._plan.segment]
        for group in ledger.groups.values():
            for contribution in group.contributions.values():
                needed += (ref.segment for ref in contribution.payloads)
        for books in ledger.policies.values():
            first_step = min(books.released, books.num_committed - self._plan.retained_steps)
            for step in [step for step in books.first_segments if step < first_step]:
                del books.first_segments[step]
            needed += books.first_segments.values()
        return min(needed)

    def _drop_segments(self, first: int) -> Iterator[None]:
        """Copies the messages in the segments before `first` into their table, then deletes these
        segments."""
        columns = "kind, group_id, task_id, policy, version, score, segment, offset, length"
        query = f"SELECT rowid, {columns} FROM samples WHERE segment < ? AND data IS NULL"
        for chunk in _chunks(self._db.execute(query, (first,)).fetchall()):
            messages = self._segments.read_all([PayloadRef(*row[-3:]) for row in chunk])
            with self._transaction():
                rows = [
                    (bytes(data), row_sum("samples", (*row[1:], bytes(data))), row[0])
                    for row, data in zip(chunk, messages, strict=True)
                ]
                self._db.executemany("UPDATE samples SET data = ?, sum = ? WHERE rowid = ?", rows)
            yield
        # Synced, as other rows are not: a power loss must not bring back a database that refers to deleted
        # files.
        self._db.execute("PRAGMA synchronous=FULL")
        try:
            with self._transaction():
                self._db.execute("DELETE FROM payloads WHERE segment < ?", (first,))
                self._set_meta("first_segment", first)
        finally:
            self._db.execute("PRAGMA synchronous=NORMAL")
        yield
        self._segments.drop(first)

    def _set_meta(self, key: str, value: int) -> None:
        self._db.execute(*summed("meta", (key, str(value)), replaces=True))

    @contextmanager
    def _transaction(self) -> Generator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")


def _close_step(name: str, step: int, ledger: Ledger) -> None:
    """Takes the step's batch out of the books. What later checks of its record need, besides fates, stays."""
    books = ledger.policies[name]
    taken = books.batches.pop(step)
    del books.committed[step]
    books.num_closed_steps += 1
    contributions = [ledger.group(group).contribution(name) for group in taken.all_ids]
    books.first_segments[step] = min(ref.segment for each in contributions for ref in each.payloads)
    replayed = contributions[len(taken.event.group_ids) :]
    if replayed:
        books.replayed[step] = ReplayedGroups(
            staleness=taken.event.replayed_staleness,
            num_samples=sum(each.num_samples for each in replayed),
            num_trained_tokens=sum(each.num_trained_tokens for each in replayed),
        )


def _completed(row: FateRow) -> tuple[object, ...]:
    """Parameters of the statement that completes the row of a closed group's fate."""
    values = (row.policy, row.group_id, row.fate, row.step, row.staleness, row.tokens)
    completed = (*values, row.samples, row.trained_tokens)
    return row.samples, row.trained_tokens, row_sum("fates", completed), row.policy, row.group_id


def _closing(ledger: Ledger, replayable: frozenset[int]) -> set[int]:
    """Groups that are decided for all policies, are in no open batch, and will be in none."""
    closing = {idx for idx, group in ledger.groups.items() if group.is_decided} - replayable
    for books in ledger.policies.values():
        for taken in books.batches.values():
            closing.difference_update(taken.all_ids)
    return closing


def _refuse(problems: Sequence[str]) -> None:
    """Raises JournalError if there are problems."""
    if problems:
        raise JournalError(f"the journal is not compacted, for it does not hold: {problems[0]}")


def _chunks(items: Sequence[_T]) -> Iterable[Sequence[_T]]:
    return (items[first : first + _CHUNK] for first in range(0, len(items), _CHUNK))


def _sealed(part: bytes) -> bytes:
    """A part of the books behind its hash."""
    return xxhash.xxh3_128_digest(part) + part


def _decoded(decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
    """A sealed part of the books. Raises: JournalError."""
    part = data[_DIGEST_BYTES:]
    if _sealed(part) != data:
        raise JournalError("the journal's books were changed; restore the journal folder from a copy")
    try:
        return decoder.decode(part)
    except msgspec.DecodeError as err:
        raise JournalError(f"the journal's books cannot be read: {err}") from err

"""Reads a journal folder, live or finished, without changing it. A reader shows one consistent moment.

What is compacted comes from the tables, all later records from the log. If the database is missing or empty,
because its own log was lost, nothing counts as compacted.
"""

import dataclasses
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from astraflow.dataflow.core.commands import EvalFinished, PayloadRef, StepCommitted
from astraflow.dataflow.journal.journal_db import (
    DATABASE,
    JOURNAL_SCHEMA,
    UNREADABLE,
    Compacted,
    FateRow,
    TelemetryRow,
    TranscriptRow,
    make_tables,
)
from astraflow.dataflow.journal.records import (
    PlanEntry,
    Record,
    RecordedPlan,
    decode_plan,
    decode_records,
    events_of,
)
from astraflow.dataflow.journal.segments import PLAN, RECORDS, LogReader, SegmentReader, segment_numbers
from astraflow.errors import JournalError
from astraflow.types import BusySpan, EvalRecord, Message, StepRecord

__all__ = ["JournalReader", "JournalTables"]

_PLANS = msgspec.msgpack.Decoder(RecordedPlan)
_STEPS = msgspec.msgpack.Decoder(StepRecord)
_EVALS = msgspec.msgpack.Decoder(EvalRecord)
_REFS = msgspec.msgpack.Decoder(list[PayloadRef])
_MESSAGES = msgspec.msgpack.Decoder(tuple[Message, ...])
_T = TypeVar("_T")


class JournalTables:
    """Read-only view of a journal's tables alone, whatever the log is like. `close` it, or use `with`.

    Its methods raise JournalError if something cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        """Raises: JournalError if the folder holds no readable journal."""
        self.path = folder / DATABASE
        self._segments = SegmentReader(folder / "segments")
        try:
            self.database = _open_read_only(folder)
        except UNREADABLE as err:
            raise JournalError(f"{self.path} cannot be read: {err}") from err
        try:
            schema = self.meta("schema")
            if schema != str(JOURNAL_SCHEMA):
                raise JournalError(
                    f"{self.path} has schema {schema or 'none'}; this version reads {JOURNAL_SCHEMA}. Use "
                    "the version that made it"
                )
        except BaseException:
            self.database.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes everything that is open."""
        self._segments.close()
        self.database.close()

    def _rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        try:
            # `yield from` would close the cursor, possibly in another thread that drops this generator.
            cursor = self.database.execute(query, values)
            while (row := cursor.fetchone()) is not None:
                yield row
        except UNREADABLE as err:
            raise JournalError(f"{self.path} cannot be read: {err}") from err

    def meta(self, key: str) -> str:
        """A value of the table `meta`; "" if there is none."""
        row = next(self._rows("SELECT value FROM meta WHERE key = ?", key), None)
        return str(row[0]) if row else ""

    def telemetry(self, *, after: int = 0, limit: int = -1) -> list[TelemetryRow]:
        """Busy spans, by default all. `after`: only rows with larger ids."""
        # SQLite stores NaN as NULL. Such a span is meaningless.
        query = (
            "SELECT rowid, source, kind, start_s, end_s FROM telemetry WHERE rowid > ? "
            "AND start_s IS NOT NULL AND end_s IS NOT NULL ORDER BY rowid LIMIT ?"
        )
        return [
            TelemetryRow(source, BusySpan(kind, start, end), row_id)
            for row_id, source, kind, start, end in self._rows(query, after, limit)
        ]

    def transcripts(self, where: str, *values: object, limit: int = -1) -> list[TranscriptRow]:
        """Episodes whose messages are kept, in order of arrival. `where`: a condition on rows of `samples`.

        Example: `transcripts("kind = ?", "eval")`.
        """
        query = f"SELECT rowid, * FROM samples WHERE {where} ORDER BY rowid LIMIT ?"
        return [
            TranscriptRow(
                id=row[0],
                kind=row[1],
                group_id=row[2],
                task_id=row[3],
                policy=row[4],
                version=row[5],
                score=row[6],
                ref=PayloadRef(*row[7:10]),
                data=row[10],
            )
            for row in self._rows(query, *values, limit)
        ]

    def messages(self, row: TranscriptRow) -> tuple[Message, ...]:
        """The messages of an episode."""
        data = self._segments.read(row.ref) if row.data is None else row.data
        try:
            return _MESSAGES.decode(data)
        except msgspec.DecodeError as err:
            raise JournalError(f"the messages of an episode cannot be read: {err}") from err


class JournalReader(JournalTables):
    """Read-only view of a journal folder."""

    def __init__(self, folder: Path) -> None:
        """Raises: JournalError if the folder holds no readable journal."""
        super().__init__(folder)
        with ExitStack() as on_failure:
            on_failure.callback(self.database.close)
            # The log is opened before the moment of the tables. What is compacted meanwhile is in them.
            self._log = on_failure.enter_context(closing(self._open_log(folder / "segments")))
            # All queries see the moment of the first one.
            self.database.execute("BEGIN")
            self.compacted = self._read_compacted()
            on_failure.pop_all()

    def _open_log(self, segments: Path) -> LogReader:
        while True:
            first = self._read_compacted().segment
            try:
                return LogReader(segments, first)
            except JournalError:
                if self._read_compacted().segment == first:
                    raise
                # A compaction has dropped segments meanwhile.

    def close(self) -> None:
        """Closes the tables and the log."""
        self._log.close()
        super().close()

    def _decode(self, table: str, decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
        try:
            return decoder.decode(data)
        except msgspec.DecodeError as err:
            raise JournalError(f"{self.path}: a row of {table} cannot be read: {err}") from err

    @property
    def date(self) -> str:
        """The day in UTC on which the run began, as `YYYY-MM-DD`; today if it hasn't begun."""
        first = min((plan.at_s for plan in self.plan_entries()), default=None)
        return time.strftime("%Y-%m-%d", time.gmtime(first))

    @property
    def run_id(self) -> str:
        """The id of the run. A database that was lost and made again has another one."""
        entry = next(self._log.entries(PLAN), None)
        return decode_plan(entry).run_id if entry is not None else self.meta("run_id")

    def _read_compacted(self) -> Compacted:
        """Up to where the log is compacted. Records up to there are dropped, or about to be."""
        try:
            return msgspec.json.decode(self.meta("compacted"), type=Compacted)
        except msgspec.DecodeError as err:
            raise JournalError(f"{self.path}: meta value compacted cannot be read: {err}") from err

    @property
    def first_segment(self) -> int:
        """Number of the first segment that is kept."""
        value = self.meta("first_segment")
        if not value.isdecimal():
            raise JournalError(f"{self.path}: meta value first_segment is {value!r}; expected a number")
        return int(value)

    @property
    def written(self) -> tuple[int, int]:
        """Segment and offset that the segments have reached for sure."""
        segment, _, offset = self.meta("written").partition(" ")
        if not (segment.isdecimal() and offset.isdecimal()):
            raise JournalError(
                f"{self.path}: meta value written is {self.meta('written')!r}; expected two numbers"
            )
        return int(segment), int(offset)

    def records(self, after: int = 0) -> Iterator[Record]:
        """All records newer than `after` that are not compacted, in order."""
        newest = max(after, self.compacted.seq)
        for entry in self.log():
            for record in decode_records(entry):
                if record.seq > newest:  # what a crash left behind the log may repeat records
                    newest = record.seq
                    yield record

    def log(self) -> Iterator[bytes]:
        """The log's entries of records, some of which may be compacted."""
        return self._log.entries(RECORDS)

    @property
    def newest(self) -> Compacted:
        """The newest record, and the segment in which later ones begin at the earliest."""
        last = None
        for last in self.records():  # noqa: B007 (only the last one is needed)
            pass
        if last is None:
            return self.compacted
        return msgspec.structs.replace(self.compacted, seq=last.seq, at_s=last.at_s, chain=last.chain)

    def _compacted_plans(self) -> list[PlanEntry]:
        rows = self._rows("SELECT seq, at_s, plan FROM plans ORDER BY rowid")
        return [PlanEntry(self.meta("run_id"), *row) for row in rows]

    def logged_plans(self) -> list[PlanEntry]:
        """The plans that are only in the log, encoded, oldest first."""
        known = {(entry.seq, entry.at_s, entry.plan) for entry in self._compacted_plans()}
        logged = map(decode_plan, self._log.entries(PLAN))
        return [entry for entry in logged if (entry.seq, entry.at_s, entry.plan) not in known]

    def plan_entries(self) -> list[PlanEntry]:
        """All plans, encoded, oldest first."""
        return self._compacted_plans() + self.logged_plans()

    def plans(self) -> list[tuple[int, RecordedPlan]]:
        """(number of the record after which it is in force, plan), oldest first."""
        return [(entry.seq, self._decode("plans", _PLANS, entry.plan)) for entry in self.plan_entries()]

    def audit_state_parts(self) -> list[bytes]:
        """The parts of the audit state, as encoded by `compaction`. Empty before the first compaction."""
        query = "SELECT data FROM audit_state WHERE at_seq = ? ORDER BY part"
        return [data for (data,) in self._rows(query, self.compacted.seq)]

    def payloads(self) -> Iterator[tuple[str, int, list[PayloadRef]]]:
        """(policy, closed group, its trained trajectories) of all groups whose trajectories are kept."""
        query = "SELECT policy, group_id, refs FROM payloads ORDER BY policy, group_id"
        rows = self._rows(query) if self.compacted.seq else ()
        return ((policy, group, self._decode("payloads", _REFS, refs)) for policy, group, refs in rows)

    def fates(self) -> Iterator[FateRow]:
        """The fates of closed groups, and of some that a compaction was about to close when it was ended."""
        columns = ", ".join(column.name for column in dataclasses.fields(FateRow))
        rows = self._rows(f"SELECT {columns} FROM fates ORDER BY policy, group_id")
        return (FateRow(*row) for row in rows)

    def steps(self) -> list[StepRecord]:
        """Committed steps of all policies, in order of commit."""
        rows = self._rows("SELECT record FROM steps ORDER BY seq")
        compacted = [self._decode("steps", _STEPS, blob) for (blob,) in rows]
        events = (event for record in self.records() for event in events_of(record, StepCommitted))
        return compacted + [event.record for event in events]

    def evals(self) -> list[EvalRecord]:
        """Finished evaluation rounds, in order."""
        rows = self._rows("SELECT record FROM evals ORDER BY rowid")
        compacted = [self._decode("evals", _EVALS, blob) for (blob,) in rows]
        events = (event for record in self.records() for event in events_of(record, EvalFinished))
        return compacted + [event.record for event in events]


def _open_read_only(folder: Path) -> sqlite3.Connection:
    """Opens the database of a folder. If it has no tables, but there are segments, it has empty ones.

    Raises: JournalError, sqlite3.Error.
    """
    path = folder / DATABASE
    if path.is_file():
        uri = f"{path.resolve().as_uri()}?mode=ro"
        # One thread at a time uses a reader, but any of a pool's threads may.
        database = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        if not segment_numbers(folder / "segments") or _has_tables(database):
            return database
        database.close()
    elif not segment_numbers(folder / "segments"):
        raise JournalError(f"{folder} holds no journal: {DATABASE} is missing")
    database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    make_tables(database)
    return database


def _has_tables(database: sqlite3.Connection) -> bool:
    """Whether it has tables. Those of an unreadable database count as damaged."""
    try:
        return bool(database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    except UNREADABLE:
        return True

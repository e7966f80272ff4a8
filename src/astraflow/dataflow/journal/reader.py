"""Reads a journal folder, live or finished, without changing it. A reader shows one consistent moment.

`JournalReader` reads the tables. If the database is missing or empty, `open_reader` rebuilds the tables in
memory from the segments, as opening the folder would rebuild them on disk.
"""

import contextlib
import dataclasses
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.journal.journal_db import (
    DATABASE,
    JOURNAL_SCHEMA,
    UNREADABLE,
    FateRow,
    TelemetryRow,
    TranscriptRow,
    catch_up,
    make_tables,
    newest_record,
)
from astraflow.dataflow.journal.records import Record, RecordedPlan
from astraflow.dataflow.journal.segments import verify_segments
from astraflow.errors import JournalError
from astraflow.types import BusySpan, EvalRecord, Message, StepRecord

__all__ = ["JournalReader", "open_reader"]

_PLANS = msgspec.msgpack.Decoder(RecordedPlan)
_STEPS = msgspec.msgpack.Decoder(StepRecord)
_EVALS = msgspec.msgpack.Decoder(EvalRecord)
_REFS = msgspec.msgpack.Decoder(list[PayloadRef])
_MESSAGES = msgspec.msgpack.Decoder(tuple[Message, ...])
_T = TypeVar("_T")


class JournalReader:
    """Read-only view of the tables of a journal folder. `close` it, or use `with`.

    Its methods raise JournalError if something cannot be read.
    """

    def __init__(self, folder: Path, database: sqlite3.Connection | None = None) -> None:
        """`database`: read instead of the folder's, and closed with the reader. Raises: JournalError."""
        self.path = folder / DATABASE
        try:
            self.database = database or _open_read_only(self.path)
            # All queries see the moment of the first one.
            self.database.execute("BEGIN")
            schema = self.meta("schema")
        except UNREADABLE as err:
            raise JournalError(f"{self.path} cannot be read: {err}") from err
        if schema != str(JOURNAL_SCHEMA):
            self.close()
            raise JournalError(
                f"{self.path} has schema {schema or 'none'}; this version reads {JOURNAL_SCHEMA}"
            )

    def __enter__(self) -> "JournalReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the database."""
        self.database.close()

    def _rows(self, query: str, *values: object) -> Iterator[tuple[Any, ...]]:
        try:
            # `yield from` would close the cursor, possibly in another thread that drops this generator.
            cursor = self.database.execute(query, values)
            while (row := cursor.fetchone()) is not None:
                yield row
        except UNREADABLE as err:
            raise JournalError(f"{self.path} cannot be read: {err}") from err

    def _decode(self, table: str, decoder: msgspec.msgpack.Decoder[_T], data: bytes) -> _T:
        try:
            return decoder.decode(data)
        except msgspec.DecodeError as err:
            raise JournalError(f"{self.path}: a row of {table} cannot be read: {err}") from err

    def meta(self, key: str) -> str:
        """A value of the table `meta`; "" if there is none."""
        row = next(self._rows("SELECT value FROM meta WHERE key = ?", key), None)
        return str(row[0]) if row else ""

    @property
    def date(self) -> str:
        """The day in UTC on which the run began, as `YYYY-MM-DD`; today if it hasn't begun."""
        row = next(self._rows("SELECT min(at_s) FROM plans"), None)
        return time.strftime("%Y-%m-%d", time.gmtime(row[0] if row else None))

    @property
    def compacted(self) -> int:
        """Number of the newest compacted record. Records up to it are deleted, or about to be."""
        return self._number("compacted")

    @property
    def first_segment(self) -> int:
        """Number of the first segment that is kept."""
        return self._number("first_segment")

    @property
    def written(self) -> tuple[int, int]:
        """Segment and offset up to which the tables contain the segments."""
        segment, _, offset = self.meta("written").partition(" ")
        if not (segment.isdecimal() and offset.isdecimal()):
            raise JournalError(
                f"{self.path}: meta value written is {self.meta('written')!r}; expected two numbers"
            )
        return int(segment), int(offset)

    def _number(self, key: str) -> int:
        value = self.meta(key) or "0"
        if not value.isdecimal():
            raise JournalError(f"{self.path}: meta value {key} is {value!r}; expected a number")
        return int(value)

    def records(self, after: int = 0) -> Iterator[Record]:
        """All records newer than `after`, in order."""
        query = "SELECT seq, at_s, commands, events, chain FROM records WHERE seq > ? ORDER BY seq"
        return (Record(*row) for row in self._rows(query, max(after, self.compacted)))

    @property
    def newest(self) -> tuple[int, bytes]:
        """Number and chain of the newest record; (0, b"") if there is none."""
        try:
            return newest_record(self.database)
        except UNREADABLE as err:
            raise JournalError(f"{self.path} cannot be read: {err}") from err

    def plans(self) -> list[tuple[int, RecordedPlan]]:
        """(number of the record after which it is in force, plan), oldest first."""
        rows = self._rows("SELECT seq, plan FROM plans ORDER BY rowid")
        return [(seq, self._decode("plans", _PLANS, blob)) for seq, blob in rows]

    def audit_state_parts(self) -> list[bytes]:
        """The parts of the audit state, as encoded by `compaction`. Empty before the first compaction."""
        if not self.compacted:
            return []
        query = "SELECT data FROM audit_state WHERE at_seq = ? ORDER BY part"
        return [data for (data,) in self._rows(query, self.compacted)]

    def payloads(self) -> Iterator[tuple[str, int, list[PayloadRef]]]:
        """(policy, closed group, its trained trajectories) of all groups whose trajectories are kept."""
        query = "SELECT policy, group_id, refs FROM payloads ORDER BY policy, group_id"
        rows = self._rows(query) if self.compacted else ()
        return ((policy, group, self._decode("payloads", _REFS, refs)) for policy, group, refs in rows)

    def fates(self) -> Iterator[FateRow]:
        """All fates."""
        columns = ", ".join(column.name for column in dataclasses.fields(FateRow))
        rows = self._rows(f"SELECT {columns} FROM fates ORDER BY policy, group_id")
        return (FateRow(*row) for row in rows)

    def steps(self) -> list[StepRecord]:
        """Committed steps of all policies, in order of commit."""
        rows = self._rows("SELECT record FROM steps ORDER BY seq")
        return [self._decode("steps", _STEPS, blob) for (blob,) in rows]

    def evals(self) -> list[EvalRecord]:
        """Finished evaluation rounds, in order."""
        rows = self._rows("SELECT record FROM evals ORDER BY rowid")
        return [self._decode("evals", _EVALS, blob) for (blob,) in rows]

    def telemetry(self) -> list[TelemetryRow]:
        """All busy spans."""
        # SQLite stores NaN as NULL. Such a span is meaningless.
        query = (
            "SELECT source, kind, start_s, end_s FROM telemetry "
            "WHERE start_s IS NOT NULL AND end_s IS NOT NULL"
        )
        return [
            TelemetryRow(source, BusySpan(kind, start, end)) for source, kind, start, end in self._rows(query)
        ]

    def transcripts(self, kind: str) -> list[TranscriptRow]:
        """Episodes of one kind (`train` or `eval`) whose messages are kept, in order of arrival."""
        query = "SELECT * FROM samples WHERE kind = ? ORDER BY rowid"
        return [
            TranscriptRow(
                kind=row[0],
                group_id=row[1],
                task_id=row[2],
                policy=row[3],
                version=row[4],
                score=row[5],
                ref=PayloadRef(*row[6:9]),
                data=row[9] or b"",
            )
            for row in self._rows(query, kind)
        ]

    @staticmethod
    def messages(payload: bytes) -> tuple[Message, ...]:
        """The messages in a transcript's payload. Raises: JournalError."""
        try:
            return _MESSAGES.decode(payload)
        except msgspec.DecodeError as err:
            raise JournalError(f"the messages of an episode cannot be read: {err}") from err


def open_reader(folder: Path) -> JournalReader:
    """Opens a folder for reading, with all records that the dataflow would find there.

    If the database is missing, or empty because its log was lost, its tables are rebuilt in memory from the
    segments. Raises: JournalError.
    """
    segments = folder / "segments"
    if _has_tables(folder / DATABASE) or not any(segments.glob("*.seg")):
        return JournalReader(folder)
    # An empty name is a temporary database, which SQLite keeps in memory while it is small.
    database = sqlite3.connect("", isolation_level=None)
    try:
        make_tables(database)
        catch_up(database, segments, (0, 0), verify_segments(segments, 0))
    except BaseException:
        database.close()
        raise
    return JournalReader(folder, database)


def _has_tables(path: Path) -> bool:
    """False if a database is missing or empty. An unreadable one counts as having (damaged) tables."""
    if not path.is_file():
        return False
    try:
        with contextlib.closing(_open_read_only(path)) as database:
            return bool(database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    except UNREADABLE:
        return True


def _open_read_only(path: Path) -> sqlite3.Connection:
    """Opens an existing database read-only. Raises: JournalError, sqlite3.Error."""
    if not path.is_file():
        raise JournalError(f"{path.parent} holds no journal: {DATABASE} is missing")
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, isolation_level=None)

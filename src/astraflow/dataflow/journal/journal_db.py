"""The journal's database: its tables, and how rows get into them.

`records` holds every accepted command with the events that it led to, in order. `fates` has one row for
each policy and group, forever. `plans` holds what the run was told at each start. The other tables are
derived (`steps`, `evals`), for reading (`samples`: transcripts; `telemetry`: busy spans), or for restart
(`snapshots`, `meta`).

Compaction takes old records away. What the audit needs of them stays in `books` (all that was open then,
and counts), in `fates` (whose columns `samples` and `trained_tokens` it fills in) and in `payloads` (where
the kept trajectories of closed groups lie). `meta` has the record up to which that is done, and the first
segment that is kept.

SQLite does not notice a flipped bit in a row. So every row carries a checksum in its last column: a record
its chain, every other row a `sum`.
"""

import itertools
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import msgspec
import xxhash

from astraflow.dataflow.core.commands import EvalFinished, Event, FateDecided, PayloadRef, StepCommitted
from astraflow.dataflow.journal.records import Record, decode_events, decode_plan, records_following
from astraflow.dataflow.journal.segments import plans_within, records_within
from astraflow.errors import JournalError
from astraflow.types import BusySpan, Item

__all__ = [
    "DATABASE",
    "JOURNAL_SCHEMA",
    "SCHEMA_SQL",
    "SUMMED_TABLES",
    "UNREADABLE",
    "FateRow",
    "SqlRow",
    "TableRows",
    "TelemetryRow",
    "TranscriptRow",
    "catch_up",
    "derived_rows",
    "insert_rows",
    "make_tables",
    "newest_record",
    "open_database",
    "row_sum",
    "summed",
]

DATABASE = "journal.sqlite"
JOURNAL_SCHEMA = 4
"""Version of the tables below and of the encoding of their rows."""
SUMMED_TABLES = (
    "meta",
    "snapshots",
    "fates",
    "books",
    "payloads",
    "plans",
    "steps",
    "evals",
    "telemetry",
    "samples",
)
"""Tables whose rows end in a sum: all but `records`."""

SCHEMA_SQL = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, sum BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS records (
    seq INTEGER PRIMARY KEY, at_s REAL NOT NULL, commands BLOB NOT NULL, events BLOB NOT NULL,
    chain BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS snapshots (seq INTEGER PRIMARY KEY, state BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS fates (
    policy TEXT NOT NULL, group_id INTEGER NOT NULL, fate TEXT NOT NULL, step INTEGER NOT NULL,
    staleness INTEGER NOT NULL, tokens INTEGER NOT NULL, samples INTEGER NOT NULL,
    trained_tokens INTEGER NOT NULL, sum BLOB NOT NULL, PRIMARY KEY (policy, group_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS books (at_seq INTEGER NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL,
    sum BLOB NOT NULL, PRIMARY KEY (at_seq, part)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS payloads (
    policy TEXT NOT NULL, group_id INTEGER NOT NULL, segment INTEGER NOT NULL, refs BLOB NOT NULL,
    sum BLOB NOT NULL, PRIMARY KEY (policy, group_id)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS plans (
    seq INTEGER NOT NULL, at_s REAL NOT NULL, plan BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS steps (seq INTEGER PRIMARY KEY, record BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS evals (seq INTEGER NOT NULL, record BLOB NOT NULL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS telemetry (
    source TEXT NOT NULL, kind TEXT NOT NULL, start_s REAL, end_s REAL, sum BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    kind TEXT NOT NULL, group_id INTEGER NOT NULL, task_id TEXT NOT NULL, policy TEXT NOT NULL,
    version INTEGER NOT NULL, score REAL NOT NULL, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
    length INTEGER NOT NULL, data BLOB, sum BLOB NOT NULL);
"""

UNREADABLE = (sqlite3.Error, UnicodeDecodeError)
"""What SQLite raises for a damaged database: its own message may hold the damaged bytes."""

_CHECKPOINT_PAGES = 1000
"""Pages (4 KiB each) of SQLite's log before it is folded into the database. That takes two syncs, so it
should be rare: a flush of the segments never waits long for them."""
_BUSY_TIMEOUT_S = 5.0
"""How long a transaction waits for another process that holds the database."""

_ENCODER = msgspec.msgpack.Encoder()

SqlRow = tuple[object, ...]
"""Parameters of one statement."""


# --- rows -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FateRow:
    """How one group ended for one policy."""

    policy: str
    group_id: int
    fate: str
    step: int
    staleness: int
    tokens: int
    samples: int = 0
    """Trained samples; filled in when the group is closed, as is the next field."""
    trained_tokens: int = 0


class TranscriptRow(Item, frozen=True, kw_only=True):
    """An episode whose messages are kept for reading: a row of the table `samples`."""

    kind: str
    """`train` or `eval`."""
    group_id: int
    task_id: str
    policy: str
    version: int
    """Evaluated version, or the oldest that sampled trained tokens of the episode."""
    score: float
    ref: PayloadRef
    data: bytes = b""
    """The messages themselves, once their segment is dropped."""


@dataclass(frozen=True, slots=True)
class TelemetryRow:
    """A busy span and who reported it."""

    source: str
    span: BusySpan


def row_sum(table: str, values: SqlRow) -> bytes:
    """What the last column of a row holds: xxh3-64 over its table's name and its other values."""
    return xxhash.xxh3_64_digest(_ENCODER.encode((table, *values)))


def summed(table: str, values: SqlRow, *, replaces: bool = False) -> tuple[str, SqlRow]:
    """(SQL, parameters) that insert a row into one of the `SUMMED_TABLES`."""
    verb = "INSERT OR REPLACE" if replaces else "INSERT"
    places = ", ".join("?" * (len(values) + 1))
    return f"{verb} INTO {table} VALUES ({places})", (*values, row_sum(table, values))


def derived_rows(seq: int, events: Sequence[Sequence[Event]]) -> list[tuple[str, SqlRow]]:
    """(SQL, parameters) of the rows of other tables that a record's events lead to."""
    rows: list[tuple[str, SqlRow]] = []
    for event in itertools.chain.from_iterable(events):
        match event:
            case FateDecided():
                figures = (event.step, event.staleness, event.num_tokens, 0, 0)
                rows.append(summed("fates", (event.policy, event.group_id, event.fate, *figures)))
            case StepCommitted():
                rows.append(summed("steps", (seq, _ENCODER.encode(event.record))))
            case EvalFinished():
                rows.append(summed("evals", (seq, _ENCODER.encode(event.record))))
            case _:
                pass
    return rows


@dataclass(slots=True)
class TableRows:
    """What one transaction writes."""

    records: list[Record] = field(default_factory=list["Record"])
    rows: list[tuple[str, SqlRow]] = field(default_factory=list[tuple[str, "SqlRow"]])
    """(SQL, parameters) of the other tables."""
    end: tuple[int, int] | None = None
    """Segment and offset up to which the segments are written with it; None if that did not move."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.records or self.rows)

    @property
    def newest(self) -> int:
        """Number of the last record, or 0."""
        return self.records[-1].seq if self.records else 0

    def absorb(self, later: "TableRows") -> None:
        """Puts later rows behind these."""
        self.records += later.records
        self.rows += later.rows
        self.end = later.end or self.end


def insert_rows(database: sqlite3.Connection, rows: TableRows) -> None:
    """Inserts rows within a transaction. Raises: sqlite3.Error."""
    if rows.records:
        database.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", rows.records)
    for sql, values in rows.rows:
        database.execute(sql, values)
    if rows.end is not None:
        segment, offset = rows.end
        database.execute(*summed("meta", ("written", f"{segment} {offset}"), replaces=True))


def newest_record(database: sqlite3.Connection) -> tuple[int, bytes]:
    """Number and chain of the newest record in the tables; (0, b"") if there is none."""
    row = database.execute("SELECT seq, chain FROM records ORDER BY seq DESC LIMIT 1").fetchone()
    return (int(row[0]), bytes(row[1])) if row else (0, b"")


def catch_up(
    database: sqlite3.Connection, segments: Path, written: tuple[int, int], end: tuple[int, int]
) -> None:
    """Puts the rows of the log's entries from `written` to `end` into the tables: a crash kept them out.

    Raises: JournalError, sqlite3.Error; nothing is changed then.
    """
    database.execute("BEGIN IMMEDIATE")
    try:
        is_new = newest_record(database)[0] == 0
        for plan in map(decode_plan, plans_within(segments, written, end)):
            if is_new:
                # A database that is made again keeps the run's id.
                database.execute(*summed("meta", ("run_id", plan.run_id), replaces=True))
            database.execute(*summed("plans", (plan.seq, plan.at_s, plan.plan)))
        logged = records_within(segments, written, end)
        for record in records_following(newest_record(database), logged):
            insert_rows(database, TableRows([record], derived_rows(record.seq, decode_events(record))))
        insert_rows(database, TableRows(end=end))
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


# --- definitions ----------------------------------------------------------------------------------


def open_database(path: Path) -> sqlite3.Connection:
    """The database with its tables, which are created if it is new.

    One thread uses it at a time: first the one that opens it, then that of the tables' writer.
    Raises: JournalError if it has another schema, or is no database of a journal; sqlite3.Error.
    """
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_S)
    try:
        is_new = _is_new(database, path)
        database.execute("PRAGMA journal_mode=WAL")
        # New tables are synced; rows are not, for the segments have them.
        database.execute("PRAGMA synchronous=FULL")
        if is_new:
            make_tables(database)
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    except BaseException:
        database.close()
        raise
    return database


def _is_new(database: sqlite3.Connection, path: Path) -> bool:
    """Whether the database is empty. Raises: JournalError if it has tables of another schema."""
    if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return True
    row = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    if row is None or row[0] != str(JOURNAL_SCHEMA):
        raise JournalError(
            f"{path} has schema {row[0] if row else 'none'}; this version of AstraFlow writes "
            f"{JOURNAL_SCHEMA}. Use the version that made it, or start a new run folder"
        )
    return False


def make_tables(database: sqlite3.Connection) -> None:
    """Creates all tables in one transaction. Raises: sqlite3.Error."""
    database.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA_SQL.split(";"):  # `executescript` would end the transaction
        database.execute(statement)
    first = {"run_id": uuid4().hex, "written": "0 0", "compacted": "0", "first_segment": "0"}
    for key, value in (*first.items(), ("schema", str(JOURNAL_SCHEMA))):
        database.execute(*summed("meta", (key, value)))
    database.execute("COMMIT")

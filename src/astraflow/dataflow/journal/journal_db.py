"""The journal's database: its tables, and how rows get into them.

`records` holds every accepted command with its events, in order. `fates` has one permanent row for each
policy and group. `plans` holds the run's plan as of each start. The other tables are derived (`steps`,
`evals`), for people (`samples`: transcripts; `telemetry`: busy spans), or for restarts (`snapshots`, `meta`).

Compaction removes old records. What the audit needs of them stays in `audit_state` (everything open, and
counts), `fates` (whose columns `samples` and `trained_tokens` it fills in), and `payloads` (the positions of
kept trajectories of closed groups). `meta` has the newest compacted record and the first kept segment.

SQLite does not notice a flipped bit in a row. Every row therefore has a checksum in its last column: records
their chain, all other rows a `sum`.

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
from astraflow.dataflow.journal.segments import read_plans, read_records
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
    "derive_rows",
    "insert_rows",
    "make_insert",
    "make_tables",
    "newest_record",
    "open_database",
    "row_sum",
]

DATABASE = "journal.sqlite"
JOURNAL_SCHEMA = 5
"""Version of the tables and of the encoding of their rows."""
SUMMED_TABLES = (
    "meta",
    "snapshots",
    "fates",
    "audit_state",
    "payloads",
    "plans",
    "steps",
    "evals",
    "telemetry",
    "samples",
)
"""Tables whose rows end in a sum: all except `records`."""

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
CREATE TABLE IF NOT EXISTS audit_state (at_seq INTEGER NOT NULL, part INTEGER NOT NULL, data BLOB NOT NULL,
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
"""Errors of a damaged database. UnicodeDecodeError: SQLite's message may contain damaged bytes."""

_CHECKPOINT_PAGES = 1000
"""Pages (4 KiB each) of SQLite's log that trigger a checkpoint. A checkpoint takes two syncs, which delay a
flush of the segments, so it should be rare."""
_BUSY_TIMEOUT_S = 5.0
"""How long a transaction waits for another process that holds the database."""

_ENCODER = msgspec.msgpack.Encoder()

SqlRow = tuple[object, ...]
"""Parameters of one statement."""


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
    """Trained samples. Filled in, like the next field, when the group is closed."""
    trained_tokens: int = 0


class TranscriptRow(Item, frozen=True, kw_only=True):
    """An episode whose messages are kept for reading: a row of the table `samples`."""

    kind: str
    """`train` or `eval`."""
    group_id: int
    task_id: str
    policy: str
    version: int
    """Evaluated version, or the oldest version of the episode's trained tokens."""
    score: float
    ref: PayloadRef
    data: bytes = b""
    """The messages themselves, after their segment was dropped."""


@dataclass(frozen=True, slots=True)
class TelemetryRow:
    """A busy span and its source."""

    source: str
    span: BusySpan


def row_sum(table: str, values: SqlRow) -> bytes:
    """The last column of a row: xxh3-64 over the table's name and the other values."""
    return xxhash.xxh3_64_digest(_ENCODER.encode((table, *values)))


def make_insert(table: str, values: SqlRow, *, replaces: bool = False) -> tuple[str, SqlRow]:
    """Makes (SQL, parameters) that insert a row with its sum into one of the `SUMMED_TABLES`."""
    verb = "INSERT OR REPLACE" if replaces else "INSERT"
    places = ", ".join("?" * (len(values) + 1))
    return f"{verb} INTO {table} VALUES ({places})", (*values, row_sum(table, values))


def derive_rows(seq: int, events: Sequence[Sequence[Event]]) -> list[tuple[str, SqlRow]]:
    """Makes (SQL, parameters) for the rows of other tables that follow from a record's events."""
    rows: list[tuple[str, SqlRow]] = []
    for event in itertools.chain.from_iterable(events):
        match event:
            case FateDecided():
                figures = (event.step, event.staleness, event.num_tokens, 0, 0)
                rows.append(make_insert("fates", (event.policy, event.group_id, event.fate, *figures)))
            case StepCommitted():
                rows.append(make_insert("steps", (seq, _ENCODER.encode(event.record))))
            case EvalFinished():
                rows.append(make_insert("evals", (seq, _ENCODER.encode(event.record))))
            case _:
                pass
    return rows


@dataclass(slots=True)
class TableRows:
    """The rows of one transaction."""

    records: list[Record] = field(default_factory=list["Record"])
    rows: list[tuple[str, SqlRow]] = field(default_factory=list[tuple[str, "SqlRow"]])
    """(SQL, parameters) of the other tables."""
    end: tuple[int, int] | None = None
    """Segment and offset up to which the tables then contain the segments; None if unchanged."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (self.records or self.rows)

    @property
    def newest(self) -> int:
        """Number of the newest record, or 0."""
        return self.records[-1].seq if self.records else 0

    def absorb(self, later: "TableRows") -> None:
        """Appends later rows."""
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
        database.execute(*make_insert("meta", ("written", f"{segment} {offset}"), replaces=True))


def newest_record(database: sqlite3.Connection) -> tuple[int, bytes]:
    """Number and chain of the newest record in the tables; (0, b"") if there is none."""
    row = database.execute("SELECT seq, chain FROM records ORDER BY seq DESC LIMIT 1").fetchone()
    return (int(row[0]), bytes(row[1])) if row else (0, b"")


def catch_up(
    database: sqlite3.Connection, segments: Path, written: tuple[int, int], end: tuple[int, int]
) -> None:
    """Adds the log's entries from `written` to `end` to the tables, which a crash had prevented.

    Raises: JournalError, sqlite3.Error; nothing is changed then.
    """
    database.execute("BEGIN IMMEDIATE")
    try:
        is_new = newest_record(database)[0] == 0
        for plan in map(decode_plan, read_plans(segments, written, end)):
            if is_new:
                # A rebuilt database keeps the run's id.
                database.execute(*make_insert("meta", ("run_id", plan.run_id), replaces=True))
            database.execute(*make_insert("plans", (plan.seq, plan.at_s, plan.plan)))
        logged = read_records(segments, written, end)
        for record in records_following(newest_record(database), logged):
            insert_rows(database, TableRows([record], derive_rows(record.seq, decode_events(record))))
        insert_rows(database, TableRows(end=end))
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


def open_database(path: Path) -> sqlite3.Connection:
    """The database with its tables, which are created if it is new.

    One thread uses it at a time: first the one that opens it, then that of the tables' writer.
    Raises: JournalError if it has another schema, or is not the database of a journal; sqlite3.Error.
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
        database.execute(*make_insert("meta", (key, value)))
    database.execute("COMMIT")

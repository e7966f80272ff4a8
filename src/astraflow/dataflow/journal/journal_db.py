"""The journal's database: what is in no segment, or whose segment compaction may drop.

Compaction removes the beginning of the log. What is needed of it stays here: `audit_state` (everything that
was open, and counts), `fates` (one row for each policy and closed group), `payloads` (the positions of kept
trajectories of closed groups), `steps`, `evals`, and `plans`. `meta` has the newest compacted record and the
first kept segment. `snapshots` is for restarts. `samples` (transcripts) and `telemetry` (busy spans) are for
people, and in no segment.

SQLite does not notice a flipped bit in a row. Every row therefore has a checksum in its last column.
"""

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import msgspec
import xxhash

from astraflow.dataflow.core.commands import PayloadRef
from astraflow.errors import JournalError
from astraflow.types import BusySpan, Item

__all__ = [
    "DATABASE",
    "JOURNAL_SCHEMA",
    "SCHEMA_SQL",
    "TABLES",
    "UNREADABLE",
    "Compacted",
    "FateRow",
    "SqlRow",
    "TableRows",
    "TelemetryRow",
    "TranscriptRow",
    "insert_rows",
    "make_insert",
    "make_tables",
    "open_database",
    "row_sum",
    "transaction",
]

DATABASE = "journal.sqlite"
JOURNAL_SCHEMA = 6
"""Version of the tables and of the encoding of their rows."""
TABLES = (
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
"""All tables. Their rows end in a sum."""

SCHEMA_SQL = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL, sum BLOB NOT NULL) WITHOUT ROWID;
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


class Compacted(Item, frozen=True, kw_only=True):
    """Up to where the log is compacted: the value of `compacted` in the table `meta`, as JSON."""

    seq: int = 0
    """The newest compacted record; 0 if none is."""
    at_s: float = 0.0
    """Its time."""
    chain: bytes = b""
    """Its chain."""
    segment: int = 0
    """The first segment with a later record."""


@dataclass(frozen=True, slots=True)
class FateRow:
    """How one closed group ended for one policy."""

    policy: str
    group_id: int
    fate: str
    step: int
    staleness: int
    tokens: int
    samples: int
    """Trained samples."""
    trained_tokens: int


class TranscriptRow(Item, frozen=True, kw_only=True):
    """An episode whose messages are kept for reading: a row of the table `samples`."""

    id: int = 0
    """Number of the row, counted from 1; 0 if it isn't stored yet."""
    kind: str
    """`train` or `eval`."""
    group_id: int
    task_id: str
    policy: str
    version: int
    """Evaluated version, or the oldest version of the episode's trained tokens."""
    score: float
    ref: PayloadRef
    data: bytes | None = None
    """The messages themselves, after their segment was dropped."""


@dataclass(frozen=True, slots=True)
class TelemetryRow:
    """A busy span and its source."""

    source: str
    span: BusySpan
    id: int
    """Number of the row, counted from 1."""


def row_sum(table: str, values: SqlRow) -> bytes:
    """The last column of a row: xxh3-64 over the table's name and the other values."""
    return xxhash.xxh3_64_digest(_ENCODER.encode((table, *values)))


def make_insert(table: str, values: SqlRow, *, replaces: bool = False) -> tuple[str, SqlRow]:
    """Makes (SQL, parameters) that insert a row with its sum into one of the `TABLES`."""
    verb = "INSERT OR REPLACE" if replaces else "INSERT"
    places = ", ".join("?" * (len(values) + 1))
    return f"{verb} INTO {table} VALUES ({places})", (*values, row_sum(table, values))


@dataclass(slots=True)
class TableRows:
    """The rows of one transaction."""

    rows: list[tuple[str, SqlRow]] = field(default_factory=list[tuple[str, "SqlRow"]])
    """(SQL, parameters)."""
    end: tuple[int, int] | None = None
    """Segment and offset that the segments have reached, by which a lost end is noticed; None if unknown."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self.rows and self.end is None

    def absorb(self, later: "TableRows") -> None:
        """Appends later rows."""
        self.rows += later.rows
        self.end = later.end or self.end


def insert_rows(database: sqlite3.Connection, rows: TableRows) -> None:
    """Inserts rows within a transaction. Raises: sqlite3.Error."""
    for sql, values in rows.rows:
        database.execute(sql, values)
    if rows.end is not None:
        segment, offset = rows.end
        database.execute(*make_insert("meta", ("written", f"{segment} {offset}"), replaces=True))


def open_database(path: Path) -> sqlite3.Connection:
    """The database with its tables, which are created if it is new.

    One thread uses it at a time: first the one that opens it, then that of the tables' writer.
    Raises: JournalError if it has another schema; sqlite3.Error, also if it isn't the database of a journal.
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


@contextmanager
def transaction(database: sqlite3.Connection) -> Generator[None]:
    """Runs the block in a transaction. If it raises, nothing is written."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


def make_tables(database: sqlite3.Connection) -> None:
    """Creates all tables in one transaction. Raises: sqlite3.Error."""
    compacted = msgspec.json.encode(Compacted()).decode()
    first = {"run_id": uuid4().hex, "written": "0 0", "compacted": compacted, "first_segment": "0"}
    with transaction(database):
        for statement in SCHEMA_SQL.split(";"):  # `executescript` would end the transaction
            database.execute(statement)
        for key, value in (*first.items(), ("schema", str(JOURNAL_SCHEMA))):
            database.execute(*make_insert("meta", (key, value)))

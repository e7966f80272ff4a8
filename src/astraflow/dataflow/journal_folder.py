"""A journal folder: its lock, its database and its tables, and how rows get into them."""

import fcntl
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from astraflow.dataflow.records import (
    JOURNAL_SCHEMA,
    SCHEMA_SQL,
    UPGRADES,
    Record,
    SqlRow,
    chain_of,
    decode_events,
    decode_records,
    derived_rows,
)
from astraflow.errors import JournalError

__all__ = ["caught_up", "insert_records", "locked", "opened"]

_CHECKPOINT_PAGES = 1000
"""Pages (of 4 KiB) of SQLite's log before it is folded into the database, which takes two syncs: few,
so that a flush of the segments never waits long for them."""


def locked(folder: Path) -> int:
    """The open lock file of a folder. Raises: JournalError if another process holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as err:
        raise JournalError(f"journal {folder} cannot be opened: {err}") from err
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as err:
        holder = os.read(file, 32).decode("ascii", "replace").strip() or "unknown"
        os.close(file)
        raise JournalError(
            f"journal {folder} is in use by process {holder}: the run is active already; stop it first, or "
            "choose another run folder"
        ) from err
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def opened(path: Path) -> sqlite3.Connection:
    """The database, with its tables. Used by the opening thread, then by the journal's thread only."""
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("PRAGMA synchronous=FULL")
    has_tables = database.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone()
    row = has_tables and database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    schema = int(row[0]) if row else 0
    if schema and not min(UPGRADES) <= schema <= JOURNAL_SCHEMA:
        database.close()
        raise JournalError(
            f"{path} has schema {schema}; this version of AstraFlow writes {JOURNAL_SCHEMA} and upgrades "
            f"from {min(UPGRADES)}. Use the version that made it, or start a new run folder"
        )
    if schema != JOURNAL_SCHEMA:
        _make_tables(database, schema)
    database.execute("PRAGMA synchronous=NORMAL")
    database.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    return database


def _make_tables(database: sqlite3.Connection, schema: int) -> None:
    """All tables, or those that an older schema (not 0) lacks, in one transaction."""
    steps = [UPGRADES[number] for number in range(schema, JOURNAL_SCHEMA)] if schema else []
    first = {"run_id": uuid4().hex, "written": "0 0", "compacted": "0", "first_segment": "0"}
    database.execute("BEGIN IMMEDIATE")
    for statement in ";".join([*steps, SCHEMA_SQL]).split(";"):
        database.execute(statement)
    database.executemany("INSERT OR IGNORE INTO meta VALUES (?, ?)", list(first.items()))
    database.execute("INSERT OR REPLACE INTO meta VALUES ('schema', ?)", (str(JOURNAL_SCHEMA),))
    database.execute("COMMIT")


def insert_records(
    database: sqlite3.Connection,
    records: Sequence[Record],
    rows: Iterable[tuple[str, SqlRow]],
    end: tuple[int, int] | None,
) -> None:
    """Within a transaction: records, rows of other tables, and how far the segments are written, if that
    moved. Raises: sqlite3.Error."""
    if records:
        database.executemany("INSERT INTO records VALUES (?, ?, ?, ?, ?)", records)
    for sql, row in rows:
        database.execute(sql, row)
    if end is not None:
        database.execute("UPDATE meta SET value = ? WHERE key = 'written'", (f"{end[0]} {end[1]}",))


def caught_up(
    database: sqlite3.Connection, logged: Iterable[bytes], end: tuple[int, int]
) -> tuple[int, bytes]:
    """Number and chain of the newest record, after rows that a crash kept from the database are put there.

    `logged` are the segments' records from where the database last knew them to `end`. Raises: JournalError.
    """
    row = database.execute("SELECT seq, chain FROM records ORDER BY seq DESC LIMIT 1").fetchone()
    seq, chain = (int(row[0]), bytes(row[1])) if row else (0, b"")
    missing = [record for data in logged for record in decode_records(data) if record.seq > seq]
    rows: list[tuple[str, SqlRow]] = []
    for record in missing:
        if record.seq != seq + 1 or chain_of(chain, record) != record.chain:
            raise JournalError(
                f"journal record {record.seq} in the segments does not follow record {seq}; restore the "
                "journal folder from a copy"
            )
        seq, chain = record.seq, record.chain
        rows += derived_rows(seq, decode_events(record))
    if missing:
        database.execute("BEGIN IMMEDIATE")
        insert_records(database, missing, rows, end)
        database.execute("COMMIT")
    return seq, chain

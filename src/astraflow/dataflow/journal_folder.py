"""A journal folder: its lock, its database and its tables, and how rows get into them."""

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from astraflow.dataflow.journal_check import following
from astraflow.dataflow.records import (
    DATABASE,
    JOURNAL_SCHEMA,
    SCHEMA_SQL,
    SUMMED_TABLES,
    UNREADABLE,
    UPGRADES,
    JournalReader,
    Record,
    SqlRow,
    decode_events,
    decode_plan,
    derived_rows,
    opened_to_read,
    summed,
)
from astraflow.dataflow.segments import checked_end, plans_within, records_within
from astraflow.errors import JournalError

__all__ = ["catch_up", "insert_records", "locked", "newest_record", "opened", "reader_of_all"]

_CHECKPOINT_PAGES = 1000
"""Pages (of 4 KiB) of SQLite's log before it is folded into the database, which takes two syncs: few,
so that a flush of the segments never waits long for them."""
_FIRST_SUMMED = 4
"""The first schema whose rows have sums."""
_WITHOUT_ROWID = {"meta", "fates", "books", "payloads"}


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
    """The database, with its tables. Used by the opening thread, then by the journal's thread only.

    Raises: JournalError if it is of another schema, or no database of a journal; sqlite3.Error.
    """
    database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    try:
        schema = _schema_of(database, path)
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("PRAGMA synchronous=FULL")
        if schema != JOURNAL_SCHEMA:
            _make_tables(database, schema)
        database.execute("PRAGMA synchronous=NORMAL")
        database.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    except BaseException:
        database.close()
        raise
    return database


def _schema_of(database: sqlite3.Connection, path: Path) -> int:
    """0 of an empty database."""
    if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return 0
    row = database.execute("SELECT value FROM meta WHERE key = 'schema'").fetchone()
    known = {str(number): number for number in (*UPGRADES, JOURNAL_SCHEMA)}
    if row is None or row[0] not in known:
        raise JournalError(
            f"{path} has schema {row[0] if row else 'none'}; this version of AstraFlow writes "
            f"{JOURNAL_SCHEMA} and upgrades from {min(UPGRADES)}. Use the version that made it, or start a "
            "new run folder"
        )
    has_sums = "sum" in {column[1] for column in database.execute("PRAGMA table_info(meta)")}
    if has_sums != (known[row[0]] >= _FIRST_SUMMED):
        raise JournalError(f"{path} is damaged: it is not of schema {row[0]}; restore it from a copy")
    return known[row[0]]


def _make_tables(database: sqlite3.Connection, schema: int) -> None:
    """All tables, or what an older schema (not 0) lacks, in one transaction."""
    database.execute("BEGIN IMMEDIATE")
    if schema:
        for number in range(schema, JOURNAL_SCHEMA):
            _execute_all(database, UPGRADES[number])
        _add_sums(database)
    else:
        _execute_all(database, SCHEMA_SQL)
    known = {key for (key,) in database.execute("SELECT key FROM meta")}
    first = {"run_id": uuid4().hex, "written": "0 0", "compacted": "0", "first_segment": "0"}
    for key, value in first.items():
        if key not in known:
            database.execute(*summed("meta", (key, value)))
    database.execute(*summed("meta", ("schema", str(JOURNAL_SCHEMA)), replaces=True))
    database.execute("COMMIT")


def _add_sums(database: sqlite3.Connection) -> None:
    """Makes all tables anew, as this version defines them, with what they hold."""
    query = "SELECT name FROM sqlite_master WHERE type = 'table'"
    known = {*SUMMED_TABLES, "records"}
    older = [name for (name,) in database.execute(query).fetchall() if name in known]
    for table in older:
        database.execute(f"ALTER TABLE {table} RENAME TO older_{table}")
    _execute_all(database, SCHEMA_SQL)
    older.remove("records")
    database.execute("INSERT INTO records SELECT * FROM older_records")
    database.execute("DROP TABLE older_records")
    for table in older:
        columns = len(database.execute(f"PRAGMA table_info({table})").fetchall()) - 1
        order = "" if table in _WITHOUT_ROWID else " ORDER BY rowid"
        for row in database.execute(f"SELECT * FROM older_{table}{order}"):
            database.execute(*summed(table, (*row, *(None,) * (columns - len(row)))))
        database.execute(f"DROP TABLE older_{table}")


def _execute_all(database: sqlite3.Connection, statements: str) -> None:
    """Within a transaction, which `executescript` would end."""
    for statement in statements.split(";"):
        database.execute(statement)


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
        database.execute(*summed("meta", ("written", f"{end[0]} {end[1]}"), replaces=True))


def newest_record(database: sqlite3.Connection) -> tuple[int, bytes]:
    """Number and chain of the newest record in the tables."""
    row = database.execute("SELECT seq, chain FROM records ORDER BY seq DESC LIMIT 1").fetchone()
    return (int(row[0]), bytes(row[1])) if row else (0, b"")


def catch_up(
    database: sqlite3.Connection,
    records: Iterable[bytes],
    plans: Iterable[bytes],
    end: tuple[int, int],
) -> None:
    """Puts rows into the tables that a crash kept from them.

    `records` and `plans` are those of the segments from where the database last knew them to `end`.
    Raises: JournalError, sqlite3.Error; nothing is changed then.
    """
    database.execute("BEGIN IMMEDIATE")
    try:
        is_new = newest_record(database)[0] == 0
        for plan in map(decode_plan, plans):
            if is_new:
                database.execute(*summed("meta", ("run_id", plan.run_id), replaces=True))
            database.execute(*summed("plans", (plan.seq, plan.at_s, plan.plan)))
        for record in following(newest_record(database), records):
            insert_records(database, (record,), derived_rows(record.seq, decode_events(record)), None)
        insert_records(database, (), (), end)
        database.execute("COMMIT")
    finally:
        if database.in_transaction:
            database.execute("ROLLBACK")


def reader_of_all(folder: Path) -> JournalReader:
    """Reads what opening the folder would have: also where the database is gone, or lost with its log, and
    would be made again from the segments. Changes nothing. Raises: JournalError."""
    segments = folder / "segments"
    if _has_tables(folder / DATABASE) or not any(segments.glob("*.seg")):
        return JournalReader(folder)
    database = sqlite3.connect("", isolation_level=None)
    try:
        _make_tables(database, 0)
        end = checked_end(segments, 0)
        catch_up(database, records_within(segments, (0, 0), end), plans_within(segments, (0, 0), end), end)
    except BaseException:
        database.close()
        raise
    return JournalReader(folder, database)


def _has_tables(path: Path) -> bool:
    """False if a database is missing or empty; what cannot be read has some that are damaged."""
    if not path.is_file():
        return False
    try:
        with contextlib.closing(opened_to_read(path)) as database:
            return bool(database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    except UNREADABLE:
        return True

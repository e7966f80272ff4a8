"""Checks whether a journal folder is damaged. Opening a folder and auditing it use the same checks.

SQLite has no checksums, so it does not notice a flipped bit in a value. Every row therefore carries a
checksum (`journal_db.row_sum`). These are compared here, together with SQLite's own check of the file's
structure and the definitions of the tables. Only data that nobody reads is not covered: free pages. The
entries of the segments have checksums, and their records a chain.

Nothing is changed here. A torn end of the newest segment, which a crash may leave behind, is not damage.
"""

import os
import sqlite3
from pathlib import Path

from astraflow.dataflow.journal.compaction import load_audit_state
from astraflow.dataflow.journal.journal_db import (
    DATABASE,
    SCHEMA_SQL,
    TABLES,
    UNREADABLE,
    row_sum,
)
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import records_following
from astraflow.dataflow.journal.segments import verify_segments
from astraflow.errors import JournalError

__all__ = ["check_database", "check_header", "check_segments"]

_REMEDY = (
    f"restore the journal folder from a copy, or move {DATABASE}* away and resume the run, which suffices "
    "if the segments still hold all records"
)
_HEADER_BYTES = 100
_MODES_AT = 18
"""Position in SQLite's header of the modes for writing and reading."""
_WAL_MODE = bytes((2, 2))
"""The write-ahead log. With other values, the file would be read-only, or its log ignored."""


def check_database(reader: JournalReader) -> None:
    """Raises JournalError if the database of a folder is damaged, as a file or in any row of any table."""
    database = reader.database
    path = reader.path
    try:
        check_header(path)
        (verdict,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise JournalError(f"{path} is damaged: {verdict}; {_REMEDY}")
        _check_definitions(database, path)
        for table in TABLES:
            _check_sums(database, table, path)
        _check_chain(reader)
        if reader.run_id != reader.meta("run_id") and reader.written != (0, 0):
            raise JournalError(f"{path} is the database of another run than the segments; {_REMEDY}")
    except UNREADABLE as err:
        raise JournalError(f"{path} is damaged: {err}; {_REMEDY}") from err


def check_header(path: Path) -> None:
    """Raises JournalError if SQLite would open the file in another mode than the one it was written in.

    A missing or empty file passes, since it is not a database yet.
    """
    if not os.path.lexists(path):
        return
    if not path.is_file():
        raise JournalError(f"{path} is not a file; {_REMEDY}")
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except OSError as err:
        raise JournalError(f"{path} cannot be read: {err}") from err
    if len(head) == _HEADER_BYTES and head[_MODES_AT : _MODES_AT + 2] != _WAL_MODE:
        raise JournalError(f"{path} is damaged: its header is wrong; {_REMEDY}")


def _check_definitions(database: sqlite3.Connection, path: Path) -> None:
    """Raises JournalError unless the definitions of the tables equal those of this version."""
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
    fresh = sqlite3.connect(":memory:")
    fresh.executescript(SCHEMA_SQL)
    expected = fresh.execute(query).fetchall()
    fresh.close()
    rows = database.execute(query).fetchall()
    if rows != expected:
        odd = sorted({str(row[1]) for row in {*rows} ^ {*expected}})
        raise JournalError(f"{path} is damaged: the definitions of {', '.join(odd)} are wrong; {_REMEDY}")


def _check_sums(database: sqlite3.Connection, table: str, path: Path) -> None:
    """Raises JournalError if a row of the table was changed."""
    for number, row in enumerate(database.execute(f"SELECT * FROM {table}"), start=1):
        if row[-1] != row_sum(table, row[:-1]):
            raise JournalError(f"{path} is damaged: row {number} of table {table} was changed; {_REMEDY}")


def _check_chain(reader: JournalReader) -> None:
    """Raises JournalError unless each record follows the one before, and the first the audit state."""
    compacted = reader.compacted
    state = load_audit_state(reader)
    if state is not None and (state.seq, state.chain) != (compacted.seq, compacted.chain):
        raise JournalError(f"{reader.path} is damaged: its audit state is not that of record {compacted.seq}")
    for _ in records_following((compacted.seq, compacted.chain), reader.log()):
        pass


def check_segments(folder: Path, reader: JournalReader) -> None:
    """Reads all kept segments.

    Raises: JournalError if one is damaged, or if they end before a position that they had reached.
    """
    segments = folder / "segments"
    end = verify_segments(segments, reader.first_segment)
    written = reader.written
    if end < written:
        raise JournalError(
            f"{segments}: payloads that the journal refers to are missing: segment {written[0]} should reach "
            f"{written[1]} and ends at {end[1]}; restore the file from a copy"
        )

"""Decides whether a journal folder is whole: one judgement, for opening the folder and for the audit.

SQLite has no checksums of its own: a flipped bit in a row's value is read as it is. So every row carries one
(`tables.row_sum`, or a record's chain). Each is compared here, beside SQLite's own check of the file's
structure and a comparison of the tables' definitions. Only what nobody reads is not covered: free pages, and
the row of the record that was compacted last.

Nothing is changed here. What a crash may leave is no damage: a torn end of the newest segment, and rows that
are in the segments but not in the tables yet.
"""

import sqlite3
from pathlib import Path

from astraflow.dataflow.journal.compaction import carried_books
from astraflow.dataflow.journal.journal_db import (
    DATABASE,
    SCHEMA_SQL,
    SUMMED_TABLES,
    UNREADABLE,
    row_sum,
)
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.records import chain_of, records_following
from astraflow.dataflow.journal.segments import checked_end, records_within
from astraflow.errors import JournalError

__all__ = ["check_database", "check_header", "check_segments", "segments_end"]

_REMEDY = (
    f"restore the journal folder from a copy, or move {DATABASE}* away and resume the run: if the "
    "segments still hold all records, the tables are made again from them"
)
_HEADER_BYTES = 100
_MODES_AT = 18
"""Where SQLite's header says how the file may be written and read."""
_WAL_MODE = bytes((2, 2))
"""Its write-ahead log. Another value would make the file read-only, or its log unseen."""


def check_database(reader: JournalReader) -> None:
    """Raises JournalError if the database of a folder is damaged: as a file, or in any row of any table."""
    database = reader.database
    path = reader.path
    try:
        check_header(path)
        (verdict,) = database.execute("PRAGMA integrity_check(1)").fetchone()
        if verdict != "ok":
            raise JournalError(f"{path} is damaged: {verdict}; {_REMEDY}")
        _check_definitions(database, path)
        for table in SUMMED_TABLES:
            _check_sums(database, table, path)
        _check_chain(reader)
    except UNREADABLE as err:
        raise JournalError(f"{path} is damaged: {err}; {_REMEDY}") from err


def check_header(path: Path) -> None:
    """Raises JournalError if SQLite would open the file in another mode than it was written in.

    A file that is missing or empty is no database yet, and passes.
    """
    if not path.exists():
        return
    try:
        with path.open("rb") as file:
            head = file.read(_HEADER_BYTES)
    except OSError as err:
        raise JournalError(f"{path} cannot be read: {err}") from err
    if len(head) == _HEADER_BYTES and head[_MODES_AT : _MODES_AT + 2] != _WAL_MODE:
        raise JournalError(f"{path} is damaged: its header is wrong; {_REMEDY}")


def _check_definitions(database: sqlite3.Connection, path: Path) -> None:
    """Raises JournalError unless the tables are those that this version makes, to the letter."""
    query = "SELECT type, name, tbl_name, sql FROM sqlite_master ORDER BY name"
    fresh = sqlite3.connect(":memory:")
    fresh.executescript(SCHEMA_SQL)
    expected = fresh.execute(query).fetchall()
    fresh.close()
    found = database.execute(query).fetchall()
    if found != expected:
        odd = sorted({str(row[1]) for row in {*found} ^ {*expected}})
        raise JournalError(f"{path} is damaged: the definitions of {', '.join(odd)} are wrong; {_REMEDY}")


def _check_sums(database: sqlite3.Connection, table: str, path: Path) -> None:
    """Raises JournalError if a row of the table was changed."""
    for number, row in enumerate(database.execute(f"SELECT * FROM {table}"), start=1):
        if row[-1] != row_sum(table, row[:-1]):
            raise JournalError(f"{path} is damaged: row {number} of table {table} was changed; {_REMEDY}")


def _check_chain(reader: JournalReader) -> None:
    """Raises JournalError unless each record follows the one before, and the first follows the books."""
    seq = 0
    chain = b""
    if (books := carried_books(reader)) is not None:
        seq = books.seq
        chain = books.chain
    if seq != reader.compacted or _chain_at(reader, seq) not in {chain, None}:
        raise JournalError(f"{reader.path} is damaged: record {seq} is not the one that was compacted last")
    for record in reader.records(seq):
        if record.seq != seq + 1:
            raise JournalError(f"{reader.path} is damaged: record {seq + 1} is missing")
        if chain_of(chain, record) != record.chain:
            raise JournalError(
                f"{reader.path} is damaged: record {record.seq} was changed, or a record before it is "
                f"missing; {_REMEDY}"
            )
        seq = record.seq
        chain = record.chain


def _chain_at(reader: JournalReader, seq: int) -> bytes | None:
    row = reader.database.execute("SELECT chain FROM records WHERE seq = ?", (seq,)).fetchone()
    return bytes(row[0]) if row else None


def check_segments(folder: Path, reader: JournalReader) -> None:
    """Raises JournalError if the kept segments do not agree with the tables.

    That is: `segments_end` raises, or they go on with records that do not follow those of the tables.
    """
    end = segments_end(folder, reader)
    for _ in records_following(reader.newest, records_within(folder / "segments", reader.written, end)):
        pass


def segments_end(folder: Path, reader: JournalReader) -> tuple[int, int]:
    """Segment and offset at which the kept segments end. Reads all of them.

    Raises: JournalError if one is damaged, or if they end before what the tables know of them.
    """
    segments = folder / "segments"
    end = checked_end(segments, reader.first_segment)
    written = reader.written
    if end < written:
        raise JournalError(
            f"{segments}: payloads that the journal refers to are missing: segment {written[0]} should reach "
            f"{written[1]} and ends at {end[1]}; restore the file from a copy"
        )
    return end

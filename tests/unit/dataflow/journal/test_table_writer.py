"""Rows reach the tables in the order in which they were added, once, or the writer says why not."""

import asyncio
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.dataflow.journal.journal_db import DATABASE, TableRows, insert_rows, make_insert, open_database
from astraflow.dataflow.journal.table_writer import TableWriter


def rows(*seqs: int) -> TableRows:
    return TableRows([make_insert("steps", (seq, b"")) for seq in seqs])


def written(folder: Path) -> list[int]:
    database = sqlite3.connect(folder / DATABASE)
    seqs = [seq for (seq,) in database.execute("SELECT seq FROM steps ORDER BY seq")]
    database.close()
    return seqs


class Faulty:
    """Inserts rows, but raises in their midst while there is an `error`."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def insert(self, database: sqlite3.Connection, rows: TableRows) -> None:
        insert_rows(database, rows)
        if self.error is not None:
            raise self.error


@pytest.fixture
def database(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    database = open_database(tmp_path / DATABASE)
    yield database
    database.close()


async def test_rows_that_come_while_others_are_written_are_written_after_them(
    tmp_path: Path, database: sqlite3.Connection
) -> None:
    writer = TableWriter(database, on_broken=pytest.fail)
    for seq in range(1, 6):
        writer.add(rows(seq))
        await asyncio.sleep(0)
    await writer.settle()
    assert written(tmp_path) == [1, 2, 3, 4, 5]
    writer.close()


async def test_nothing_of_a_failed_transaction_is_there_until_it_is_tried_again(
    tmp_path: Path, database: sqlite3.Connection
) -> None:
    faulty = Faulty()
    writer = TableWriter(database, insert=faulty.insert, on_broken=pytest.fail)
    faulty.error = sqlite3.OperationalError("database or disk is full")
    writer.add(rows(1, 2))
    await writer.settle()
    writer.add(rows(3))
    await writer.settle()
    assert (written(tmp_path), writer.failure) == ([], faulty.error)
    faulty.error = None
    writer.start()
    await writer.settle()
    assert (written(tmp_path), writer.failure) == ([1, 2, 3], None)
    writer.close()


async def test_after_a_fault_of_the_program_nothing_more_is_written(
    tmp_path: Path, database: sqlite3.Connection
) -> None:
    faulty, calls = Faulty(), list[str]()
    writer = TableWriter(database, insert=faulty.insert, on_broken=lambda: calls.append("broken"))
    faulty.error = ZeroDivisionError()
    writer.add(rows(1))
    async with asyncio.timeout(10):
        await writer.settle()
    faulty.error = None
    writer.add(rows(2))
    writer.start()
    await writer.settle()
    assert (written(tmp_path), writer.is_broken, calls) == ([], True, ["broken"])
    writer.close()

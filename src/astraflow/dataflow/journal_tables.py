"""Puts what is durable in the segments into the tables of the database, behind the flushes.

Nobody who sends waits for this: the segments are the log, and rows that a crash keeps from the database are
made from them again when the journal is opened. So transactions may be few: the first row after a quiet time
begins one at once, later ones wait until `_PAUSE_S` after the last, or until somebody asks (`settle`).
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from astraflow.dataflow.journal_folder import insert_records
from astraflow.dataflow.journal_thread import Job, JobFailedError, JournalThread
from astraflow.dataflow.records import Record, SqlRow

__all__ = ["RETRY_S", "TableRows", "TableWriter"]

_log = logging.getLogger(__name__)
RETRY_S = 1.0
"""Shortest time between two tries to write after a failure."""

_PAUSE_S = 0.02
"""Shortest time between two transactions: how old the tables of a busy journal are."""


@dataclass(slots=True)
class TableRows:
    """What one transaction writes."""

    records: list[Record] = field(default_factory=list["Record"])
    rows: list[tuple[str, SqlRow]] = field(default_factory=list[tuple[str, "SqlRow"]])
    """(SQL, parameters) of the other tables."""
    end: tuple[int, int] | None = None
    """How far the segments are written with it, if that moved."""

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

    def write(self, database: sqlite3.Connection) -> Exception | None:
        """In the tables' thread: one transaction; its error, after which nothing of it is there."""
        try:
            database.execute("BEGIN IMMEDIATE")
            insert_records(database, self.records, self.rows, self.end)
            database.execute("COMMIT")
        except sqlite3.Error as err:
            if database.in_transaction:
                database.execute("ROLLBACK")
            return err
        return None


class TableWriter:
    """The database's one writer, with a thread of its own, from construction to `close`.

    `failure` is why the newest transaction failed: its rows are kept, and `start` tries them again.
    """

    def __init__(self, database: sqlite3.Connection, *, on_broken: Callable[[], None]) -> None:
        """`on_broken` is called when a fault of the program ended the thread."""
        self._db = database
        self._on_broken = on_broken
        self._thread = JournalThread("journal tables")
        self._pending = TableRows()
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self.failure: Exception | None = None
        self._failed_at = 0.0

    def add(self, rows: TableRows) -> None:
        """Rows to write after all earlier ones."""
        self._pending.absorb(rows)
        if self.failure is None:
            self.start()

    def start(self) -> None:
        """Begins to write what is pending, if that is not going on."""
        if self._task is None and not self._pending.is_empty:
            self._task = asyncio.get_running_loop().create_task(self._write(), name="journal tables")

    def retry_if_due(self) -> None:
        """Tries again after a failure, at most once a second."""
        if self.failure is not None and time.monotonic() - self._failed_at >= RETRY_S:
            self.start()

    async def run(self, job: Job) -> Exception | None:
        """What a job returns that needs the database, between two transactions."""
        return await self._thread.run(job)

    async def settle(self) -> None:
        """Returns once all that was added is in the tables, or `failure` says why not."""
        self._hurry.set()
        while (task := self._task) is not None:
            await asyncio.wait({task})
        self._hurry.clear()

    def close(self) -> None:
        """Ends the thread; what is pending stays out."""
        self._thread.close()

    async def _write(self) -> None:
        """Transactions until nothing is pending, or one fails. Woken by `start`."""
        while not self._pending.is_empty:
            taken, self._pending = self._pending, TableRows()
            error = await self._thread.run(partial(taken.write, self._db))
            if error is not None:
                taken.absorb(self._pending)
                self._pending = taken
                self._failed_at = time.monotonic()
                _log.error("the journal's tables cannot be written: %s", error)
            self.failure = error
            if isinstance(error, JobFailedError):
                self._on_broken()
            if error is not None:
                break
            await _pause(self._hurry)
        self._task = None


async def _pause(hurry: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(_PAUSE_S):
            await hurry.wait()
    except TimeoutError:
        return

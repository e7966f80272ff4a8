"""Writes rows into the journal's tables, after the flushes of the segments.

No sender waits for this, and no decision depends on rows that a crash keeps out of the database.
Transactions can therefore be rare. The first row after a quiet time
starts one at once; later rows wait until `_PAUSE_S` after the previous transaction, or for a call of
`settle`.

The database has its own thread, because a long transaction must not delay a flush: a checkpoint of SQLite's
log takes 30 to 40 ms, once every thousand records or so.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar, TypeVarTuple

from astraflow.dataflow.journal.journal_db import TableRows, insert_rows, transaction

__all__ = ["RETRY_S", "InsertRows", "TableWriter"]

_log = logging.getLogger(__name__)
RETRY_S = 1.0
"""Shortest time between two attempts to write after a failure."""

_PAUSE_S = 0.02
"""Shortest time between two transactions, and thus the delay of a busy journal's tables."""
_AnswerT = TypeVar("_AnswerT")
_Args = TypeVarTuple("_Args")


InsertRows = Callable[[sqlite3.Connection, TableRows], None]
"""Inserts rows within a transaction: `journal_db.insert_rows`, or a failing one of a test. If it raises
sqlite3.Error, the same rows are tried again."""


class TableWriter:
    """The only writer of the database, with its own thread from construction to `close`.

    `failure` is the error of the newest transaction, if it failed. Its rows are kept, and `start` tries them
    again. If `is_broken`, a bug has ended the writer, and only a new process can continue.
    """

    def __init__(
        self,
        database: sqlite3.Connection,
        *,
        on_broken: Callable[[], None],
        insert: InsertRows = insert_rows,
    ) -> None:
        """`on_broken` is called when `is_broken` becomes true."""
        self._db = database
        self._insert = insert
        self._on_broken = on_broken
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal tables")
        self._pending = TableRows()
        self._task: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self.failure: BaseException | None = None
        self.is_broken = False
        self._failed_at = 0.0

    def add(self, rows: TableRows) -> None:
        """Adds rows, to be written after all earlier ones."""
        self._pending.absorb(rows)
        if self.failure is None:
            self.start()

    def start(self) -> None:
        """Starts to write what is pending, unless it is being written already."""
        if self._task is None and not self._pending.is_empty and not self.is_broken:
            self._task = asyncio.get_running_loop().create_task(self._write(), name="journal tables")
            self._task.add_done_callback(self._on_write_end)

    def retry_if_due(self) -> None:
        """Tries again after a failure, at most once per second."""
        if self.failure is not None and time.monotonic() - self._failed_at >= RETRY_S:
            self.start()

    async def run(self, job: Callable[[*_Args], _AnswerT], *args: *_Args) -> _AnswerT:
        """Runs a job that needs the database between two transactions. Raises: whatever the job raises."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, job, *args)

    async def settle(self) -> None:
        """Returns once all added rows are in the tables, or `failure` is set."""
        self._hurry.set()
        while self._task is not None:
            await asyncio.wait({self._task})
        self._hurry.clear()

    def close(self) -> None:
        """Ends the thread. Pending rows are not written."""
        self._thread.shutdown()

    async def _write(self) -> None:
        """Writes transactions until nothing is pending, or one fails. Woken by `start`."""
        while not self._pending.is_empty:
            rows = self._pending
            self._pending = TableRows()
            try:
                await self.run(self._transact, rows)
            except sqlite3.Error as err:
                rows.absorb(self._pending)
                self._pending = rows
                self.failure = err
                self._failed_at = time.monotonic()
                _log.error("the journal's tables cannot be written: %s", err)
                break
            self.failure = None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PAUSE_S):
                    await self._hurry.wait()
        # Not in a callback at the task's end: rows that are added in between must start a new task.
        self._task = None

    def _on_write_end(self, task: asyncio.Task[None]) -> None:
        """If the task raised or was cancelled, its rows are lost to this process, so nothing may be written
        after them."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        self._task = None
        _log.critical("the writer of the journal's tables failed", exc_info=error)
        self.failure = error
        self.is_broken = True
        self._on_broken()

    def _transact(self, rows: TableRows) -> None:
        """Inserts the rows, in the thread. Raises: whatever `insert` raises."""
        with transaction(self._db):
            self._insert(self._db, rows)

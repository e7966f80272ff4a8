"""Copies what only `journal.sqlite` has: which episodes' messages were kept, and busy spans."""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from astraflow.addons.view.names import Names
from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.dataflow.journal.journal_db import DATABASE, TelemetryRow, TranscriptRow
from astraflow.dataflow.journal.reader import JournalTables
from astraflow.errors import JournalError

__all__ = ["TablesCopy"]

_CHUNK = 2000
_RowT = TypeVar("_RowT", TranscriptRow, TelemetryRow)


class TablesCopy:
    """Copies new rows into the index. Example: `notes = TablesCopy(index, names, journal_folder).take()`."""

    def __init__(self, database: sqlite3.Connection, names: Names, journal: Path) -> None:
        self._database = database
        self._names = names
        self._journal = journal

    def take(self) -> list[str]:
        """Copies what is new and returns notes about what went wrong, for people."""
        if not (self._journal / DATABASE).is_file():
            return [f"{DATABASE} is missing: messages and busy spans are unknown"]
        try:
            with JournalTables(self._journal) as tables:
                while rows := tables.transcripts("rowid > ?", self._at("samples"), limit=_CHUNK):
                    self._add("samples", rows, self._add_transcript)
                while spans := tables.telemetry(after=self._at("telemetry"), limit=_CHUNK):
                    self._add("telemetry", spans, self._add_span)
        except (JournalError, OSError) as err:
            return [f"{DATABASE} cannot be read, so some messages and busy spans are unknown: {err}"]
        return []

    def _add(self, table: str, rows: Sequence[_RowT], write: Callable[[_RowT], None]) -> None:
        """Writes rows, and notes how far they go, in one transaction."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            for row in rows:
                write(row)
            values = (f"{table}_rowid", str(rows[-1].id))
            self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", values)
            self._database.execute("COMMIT")
        finally:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def _add_transcript(self, row: TranscriptRow) -> None:
        """Assigns kept messages to their episode.

        They are kept in the order of the results, so they belong to the first episode of the group that has
        this score and no messages yet.
        """
        query = (
            "SELECT id, episode_idx FROM episodes WHERE group_id = ? AND kind = ? AND sample IS NULL "
            "AND error IS NULL AND score = ? ORDER BY id LIMIT 1"
        )
        kind = EVAL if row.kind == "eval" else TRAIN
        episode = self._database.execute(query, (row.group_id, kind, row.score)).fetchone()
        if episode is None:
            return
        episode_id, episode_idx = episode
        if kind == EVAL:
            # The results of evaluations name neither the task nor the policy, so they are filled in here.
            values = (self._names.task_id_of(row.task_id), self._names.id_of(row.policy, "policy"))
            update = (
                "UPDATE episodes SET sample = ?, task = ?, policy = ?, oldest = ?, newest = ? WHERE id = ?"
            )
            self._database.execute(update, (row.id, *values, row.version, row.version, episode_id))
        else:
            update = "UPDATE episodes SET sample = ? WHERE group_id = ? AND kind = ? AND episode_idx = ?"
            self._database.execute(update, (row.id, row.group_id, TRAIN, episode_idx))

    def _add_span(self, row: TelemetryRow) -> None:
        query = "INSERT INTO spans (source, kind, start_s, end_s) VALUES (?, ?, ?, ?)"
        self._database.execute(query, (row.source, row.span.kind, row.span.start_s, row.span.end_s))

    def _at(self, table: str) -> int:
        query = "SELECT value FROM meta WHERE key = ?"
        row = self._database.execute(query, (f"{table}_rowid",)).fetchone()
        return int(row[0]) if row else 0

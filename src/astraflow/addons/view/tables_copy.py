"""Copies what only `journal.sqlite` has: which episodes' messages were kept, and busy spans."""

import contextlib
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from astraflow.addons.view.names import Names
from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.dataflow.journal.journal_db import DATABASE, TelemetryRow, TranscriptRow
from astraflow.dataflow.journal.reader import JournalTables
from astraflow.errors import JournalError

__all__ = ["TablesCopy"]

_CHUNK = 2000
_MAX_TEXT = 20_000
"""Maximum number of characters of an episode that can be searched."""


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
                    self._add("samples", rows[-1].id, partial(self._add_transcripts, rows, tables))
                while spans := tables.telemetry(after=self._at("telemetry"), limit=_CHUNK):
                    self._add("telemetry", spans[-1].id, partial(self._add_spans, spans))
        except (JournalError, OSError) as err:
            return [f"{DATABASE} cannot be read, so some messages and busy spans are unknown: {err}"]
        return []

    def _add(self, table: str, last_id: int, write: Callable[[], None]) -> None:
        """Writes rows, and notes how far they go, in one transaction."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            write()
            self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"{table}_rowid", last_id))
            self._database.execute("COMMIT")
        finally:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")

    def _add_transcripts(self, rows: Sequence[TranscriptRow], tables: JournalTables) -> None:
        for row in rows:
            self._add_transcript(row, tables)

    def _add_transcript(self, row: TranscriptRow, tables: JournalTables) -> None:
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
        with contextlib.suppress(JournalError):
            text = "\n".join(message.content for message in tables.messages(row))
            body = text[:_MAX_TEXT].encode("utf-8", "replace").decode()
            self._database.execute("INSERT OR REPLACE INTO texts VALUES (?, ?)", (episode_id, body))

    def _add_spans(self, rows: Sequence[TelemetryRow]) -> None:
        query = "INSERT INTO spans (source, kind, start_s, end_s) VALUES (?, ?, ?, ?)"
        spans = [(row.source, row.span.kind, row.span.start_s, row.span.end_s) for row in rows]
        self._database.executemany(query, spans)

    def _at(self, table: str) -> int:
        query = "SELECT value FROM meta WHERE key = ?"
        row = self._database.execute(query, (f"{table}_rowid",)).fetchone()
        return int(row[0]) if row else 0

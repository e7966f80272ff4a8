"""Copies what only `journal.sqlite` has: which episodes' messages were kept, and busy spans."""

import contextlib
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from astraflow.addons.view.names import Names
from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.journal.journal_db import DATABASE, UNREADABLE
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.segments import SegmentReader
from astraflow.errors import JournalError
from astraflow.types import Message

__all__ = ["TablesCopy", "messages_of"]

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
        path = self._journal / DATABASE
        if not path.is_file():
            return [f"{DATABASE} is missing: messages and busy spans are unknown"]
        try:
            source = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
            with contextlib.closing(source), contextlib.closing(self._segments()) as segments:
                while self._take_samples(source, segments):
                    pass
                while self._take_spans(source):
                    pass
        except (*UNREADABLE, OSError) as err:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            return [f"{DATABASE} cannot be read, so some messages and busy spans are unknown: {err}"]
        return []

    def _segments(self) -> SegmentReader:
        return SegmentReader(self._journal / "segments")

    def _take_samples(self, source: sqlite3.Connection, segments: SegmentReader) -> bool:
        """Assigns kept messages to up to `_CHUNK` episodes; returns whether there were any."""
        query = (
            "SELECT rowid, kind, group_id, task_id, policy, version, score, segment, offset, length, data "
            "FROM samples WHERE rowid > ? ORDER BY rowid LIMIT ?"
        )
        rows = source.execute(query, (self._at("samples"), _CHUNK)).fetchall()
        if not rows:
            return False
        self._database.execute("BEGIN IMMEDIATE")
        for row in rows:
            self._take_sample(row, segments)
        self._names.flush()
        self._move("samples", rows[-1][0])
        self._database.execute("COMMIT")
        return True

    def _take_sample(self, row: Sequence[Any], segments: SegmentReader) -> None:
        rowid, kind, group_id, task_id, policy, version, score, *place = row
        is_eval = kind == "eval"
        # Messages are kept in the order of the results, so they belong to the first episode of the group that
        # has this score and no messages yet.
        query = (
            "SELECT id, episode_idx FROM episodes WHERE group_id = ? AND kind = ? AND sample IS NULL "
            "AND error IS NULL AND score = ? ORDER BY id LIMIT 1"
        )
        found = self._database.execute(query, (group_id, EVAL if is_eval else TRAIN, score)).fetchone()
        if found is None:
            return
        if is_eval:
            # The results of evaluations name neither the task nor the policy, so they are filled in here.
            values = (rowid, self._names.task_id_of(str(task_id)), self._names.id_of(str(policy), "policy"))
            update = (
                "UPDATE episodes SET sample = ?, task = ?, policy = ?, oldest = ?, newest = ? WHERE id = ?"
            )
            self._database.execute(update, (*values, version, version, found[0]))
        else:
            update = "UPDATE episodes SET sample = ? WHERE group_id = ? AND kind = ? AND episode_idx = ?"
            self._database.execute(update, (rowid, group_id, TRAIN, found[1]))
        with contextlib.suppress(JournalError):
            data = place[3] if place[3] is not None else segments.read(PayloadRef(*place[:3]))
            text = "\n".join(message.content for message in JournalReader.messages(bytes(data)))
            body = text[:_MAX_TEXT].encode("utf-8", "replace").decode()
            self._database.execute("INSERT OR REPLACE INTO texts VALUES (?, ?)", (found[0], body))

    def _take_spans(self, source: sqlite3.Connection) -> bool:
        """Copies up to `_CHUNK` busy spans; returns whether there were any."""
        query = (
            "SELECT rowid, source, kind, start_s, end_s FROM telemetry WHERE rowid > ? ORDER BY rowid LIMIT ?"
        )
        rows = source.execute(query, (self._at("telemetry"), _CHUNK)).fetchall()
        if not rows:
            return False
        self._database.execute("BEGIN IMMEDIATE")
        # SQLite stores NaN as NULL. A span with such a time carries no information.
        whole: Iterable[Sequence[Any]] = (row[1:] for row in rows if None not in row)
        self._database.executemany(
            "INSERT INTO spans (source, kind, start_s, end_s) VALUES (?, ?, ?, ?)", whole
        )
        self._move("telemetry", rows[-1][0])
        self._database.execute("COMMIT")
        return True

    def _at(self, table: str) -> int:
        query = "SELECT value FROM meta WHERE key = ?"
        row = self._database.execute(query, (f"{table}_rowid",)).fetchone()
        return int(row[0]) if row else 0

    def _move(self, table: str, rowid: int) -> None:
        self._database.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"{table}_rowid", str(rowid)))


def messages_of(journal: Path, sample: int) -> tuple[Message, ...]:
    """Returns the kept messages of an episode by its row in the table `samples`. Raises: JournalError."""
    path = journal / DATABASE
    try:
        source = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
        with contextlib.closing(source):
            query = "SELECT segment, offset, length, data FROM samples WHERE rowid = ?"
            row = source.execute(query, (sample,)).fetchone()
    except UNREADABLE as err:
        raise JournalError(f"{path} cannot be read: {err}") from err
    if row is None:
        raise JournalError(f"{path} no longer holds the messages")
    if row[3] is not None:
        return JournalReader.messages(bytes(row[3]))
    segments = SegmentReader(journal / "segments")
    try:
        return JournalReader.messages(segments.read(PayloadRef(*row[:3])))
    finally:
        segments.close()

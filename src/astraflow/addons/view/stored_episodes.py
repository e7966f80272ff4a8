"""What the journal has of the episodes in the index: tokens, kept messages, and results.

The index knows where they are. Compaction drops them one day, and any of them may be damaged.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from astraflow import wire
from astraflow.addons.view.groups import results_in
from astraflow.addons.view.log_tail import entry_at
from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.journal.reader import JournalTables
from astraflow.dataflow.journal.segments import SegmentReader
from astraflow.errors import JournalError
from astraflow.types import Failure, Message, Trajectory

__all__ = ["StoredEpisodes"]


class StoredEpisodes:
    """Reads episodes by their row in the index. `close` it, or use `with`.

    Example: `with StoredEpisodes(index.reader(), folder.journal) as stored: stored.tokens(7)`.
    """

    def __init__(self, database: sqlite3.Connection, journal: Path) -> None:
        self._database = database
        self._journal = journal
        self._segments = SegmentReader(journal / "segments")
        self._tables: JournalTables | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the journal's files. The index stays open."""
        self._segments.close()
        if self._tables is not None:
            self._tables.close()

    def tokens(self, episode_id: int) -> Trajectory | None:
        """Reads the trajectory of a row; None if it has none. Raises: JournalError, WireError."""
        segment, offset, length = self._columns("segment, offset, length", episode_id)
        if length is None:
            return None
        return wire.decode(self._segments.read(PayloadRef(segment, offset, length)), Trajectory)

    def messages(self, episode_id: int) -> tuple[Message, ...]:
        """Reads the kept messages of a row; empty if none were kept. Raises: JournalError."""
        (sample,) = self._columns("sample", episode_id)
        if sample is None:
            return ()
        if self._tables is None:
            self._tables = JournalTables(self._journal)
        for row in self._tables.transcripts("rowid = ?", sample):
            return self._tables.messages(row)
        raise JournalError(f"{self._tables.path} no longer holds the messages")

    def result(self, row: dict[str, Any]) -> tuple[dict[str, float], str]:
        """Returns the (metrics, failure message) of a row; both are empty if the log no longer has them."""
        segment, offset = self._columns("log_segment, log_offset", row["id"])
        own = (EVAL if row["kind"] == "eval" else TRAIN, row["group"], row["episode"], row["attempt"])
        for lease, outcome in results_in(entry_at(self._journal / "segments", (segment, offset))):
            if tuple(lease) == own:
                if isinstance(outcome, Failure):
                    return {}, outcome.message
                return {item.name: item.value for item in outcome.metrics}, ""
        return {}, ""

    def _columns(self, names: str, episode_id: int) -> Sequence[Any]:
        return self._database.execute(f"SELECT {names} FROM episodes WHERE id = ?", (episode_id,)).fetchone()

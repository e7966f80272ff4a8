"""Episodes of an evaluation as rows of a table, for trackers that can show tables."""

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.journal.journal_db import DATABASE, UNREADABLE
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.segments import SegmentReader
from astraflow.errors import JournalError
from astraflow.report.terminal_text import speaker_of

__all__ = ["sample_rows"]

_MOST_ROWS = 16
_MOST_TEXT = 4000
"""Largest number of characters of an episode that a table shows."""


def sample_rows(journal: Path, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns up to 16 episodes of an evaluation, with the keys `task`, `score`, `version`, and `text`.

    `row`: the evaluation's line of `metrics.jsonl`. The journal's tables are written after that line, so the
    result is empty at first.
    """
    uri = f"{(journal / DATABASE).resolve().as_uri()}?mode=ro"
    query = (
        "SELECT task_id, score, version, segment, offset, length, data FROM samples "
        "WHERE kind = 'eval' AND policy = ? AND version = ? ORDER BY rowid DESC LIMIT ?"
    )
    values = (row.get("policy"), row.get("version"), 64 * _MOST_ROWS)
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as database:
            found = database.execute(query, values).fetchall()
    except UNREADABLE:
        return []
    own = [each for each in found if str(each[0]).startswith(f"{row.get('eval_set')}/")]
    segments = SegmentReader(journal / "segments")
    try:
        newest = (own or found)[:_MOST_ROWS]
        return [_make_row(segments, *each) for each in reversed(newest)]
    finally:
        segments.close()


def _make_row(segments: SegmentReader, task: str, score: float, version: int, *place: Any) -> dict[str, Any]:
    text = "its messages were deleted"
    with contextlib.suppress(JournalError):
        data = place[3] if place[3] is not None else segments.read(PayloadRef(*place[:3]))
        messages = JournalReader.messages(bytes(data))
        text = "\n".join(f"{speaker_of(message)}: {message.content}" for message in messages)
    text = text[:_MOST_TEXT].encode("utf-8", "replace").decode()
    return {"task": task, "score": score, "version": version, "text": text}

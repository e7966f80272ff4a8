"""Episodes of an evaluation as rows of a table, for trackers that can show tables."""

import contextlib
from pathlib import Path
from typing import Any

from astraflow.dataflow.journal.journal_db import TranscriptRow
from astraflow.dataflow.journal.reader import JournalTables
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
    where = (
        "rowid IN (SELECT rowid FROM samples WHERE kind = 'eval' AND policy = ? AND version = ? "
        "ORDER BY rowid DESC LIMIT ?)"
    )
    try:
        with JournalTables(journal) as tables:
            kept = tables.transcripts(where, row.get("policy"), row.get("version"), 64 * _MOST_ROWS)
            own = [each for each in kept if each.task_id.startswith(f"{row.get('eval_set')}/")]
            return [_make_row(tables, each) for each in (own or kept)[-_MOST_ROWS:]]
    except JournalError:
        return []


def _make_row(tables: JournalTables, row: TranscriptRow) -> dict[str, Any]:
    text = "its messages were deleted"
    with contextlib.suppress(JournalError):
        text = "\n".join(f"{speaker_of(message)}: {message.content}" for message in tables.messages(row))
    text = text[:_MOST_TEXT].encode("utf-8", "replace").decode()
    return {"task": row.task_id, "score": row.score, "version": row.version, "text": text}

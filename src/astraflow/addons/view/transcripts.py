"""Reads the transcripts of episodes that a dataflow keeps in its journal."""

from pathlib import Path

from astraflow.dataflow.journal.journal_db import TranscriptRow
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.dataflow.journal.segments import SegmentReader
from astraflow.types import LeaseKind, Message

__all__ = ["load_transcripts"]


def load_transcripts(folder: Path, kind: LeaseKind) -> list[tuple[TranscriptRow, tuple[Message, ...]]]:
    """Reads the transcripts in a journal folder: rows with their messages, in order of arrival.

    Raises: JournalError.
    """
    with JournalReader(folder) as reader:
        rows = reader.transcripts(kind)
    segments = SegmentReader(folder / "segments")
    try:
        return [(row, JournalReader.messages(row.data or segments.read(row.ref))) for row in rows]
    finally:
        segments.close()

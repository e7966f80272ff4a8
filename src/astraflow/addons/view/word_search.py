"""Looks for words in everything that was said in an episode: its tokens' text, kept messages, or a failure.

The index has only texts that no tokens have: messages of evaluations, and failures. The text of tokens is
decoded when somebody looks for it, which costs the run nothing, and takes no space in the index.
"""

import contextlib
import sqlite3
from collections.abc import Generator, Iterator
from contextlib import contextmanager

from astraflow import wire
from astraflow.addons.view.conversation import without_markers
from astraflow.addons.view.token_text import TokenText
from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.journal.segments import SegmentReader
from astraflow.errors import Error
from astraflow.recipe.run_folder import RunFolder
from astraflow.types import Trajectory

__all__ = ["WordSearch", "word_search"]

_MORE = "\u2026"
_AROUND = 60
"""Characters on each side of the words in the line that shows them."""


class WordSearch:
    """What was said in the episodes of an index. Example: `words.line(7, "carry")` is `"so I carry one"`."""

    def __init__(self, database: sqlite3.Connection, segments: SegmentReader, texts: TokenText) -> None:
        self._database = database
        self._segments = segments
        self._texts = texts

    def line(self, episode_id: int, words: str) -> str:
        """Returns the words with what is around them, as one line; empty if the episode doesn't have them.

        Upper and lower case are the same. An episode whose data is damaged or gone has no words.
        """
        needle = words.lower()
        for text in self._texts_of(episode_id):
            at = text.lower().find(needle)
            if at >= 0:
                begin = max(0, at - _AROUND)
                end = at + len(words) + _AROUND
                excerpt = without_markers(text[begin:end])
                excerpt = excerpt if needle in excerpt.lower() else text[begin:end]
                line = " ".join(excerpt.split()).encode("utf-8", "replace").decode()
                return _MORE * (begin > 0) + line + _MORE * (end < len(text))
        return ""

    def _texts_of(self, episode_id: int) -> Iterator[str]:
        query = "SELECT segment, offset, length FROM episodes WHERE id = ?"
        segment, offset, length = self._database.execute(query, (episode_id,)).fetchone()
        if length is not None:
            with contextlib.suppress(Error, OSError):
                data = self._segments.read(PayloadRef(segment, offset, length))
                trajectory = wire.decode(data, Trajectory)
                yield self._texts.text(trajectory.policy, wire.array(trajectory.token_ids, "int32").tolist())
        row = self._database.execute("SELECT body FROM texts WHERE id = ?", (episode_id,)).fetchone()
        if row is not None:
            yield str(row[0])


@contextmanager
def word_search(database: sqlite3.Connection, folder: RunFolder, texts: TokenText) -> Generator[WordSearch]:
    """Opens what was said in a run's episodes. Example: `with word_search(index, folder, texts) as words: ...`."""
    with contextlib.closing(SegmentReader(folder.journal / "segments")) as segments:
        yield WordSearch(database, segments, texts)

"""Looks for words in everything that was said in an episode: its tokens' text, kept messages, or a failure.

The index has only what failures say. The rest is read when somebody looks for it, which costs the run
nothing, and takes no space in the index.
"""

import contextlib
import sqlite3
from collections.abc import Iterator

from astraflow import wire
from astraflow.addons.view.conversation import without_markers
from astraflow.addons.view.stored_episodes import StoredEpisodes
from astraflow.addons.view.token_text import TokenText
from astraflow.errors import Error

__all__ = ["WordSearch"]

_MORE = "\u2026"
_AROUND = 60
"""Characters on each side of the words in the line that shows them."""


class WordSearch:
    """Example: `WordSearch(index, stored, texts).line(7, "carry")` is `"so I carry one"`."""

    def __init__(self, database: sqlite3.Connection, stored: StoredEpisodes, texts: TokenText) -> None:
        self._database = database
        self._stored = stored
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
        with contextlib.suppress(Error):
            if (trajectory := self._stored.tokens(episode_id)) is not None:
                yield self._texts.text(trajectory.policy, wire.array(trajectory.token_ids, "int32").tolist())
        with contextlib.suppress(Error):
            yield "\n".join(message.content for message in self._stored.messages(episode_id))
        row = self._database.execute("SELECT body FROM texts WHERE id = ?", (episode_id,)).fetchone()
        if row is not None:
            yield str(row[0])

"""The first and last words of episodes, for a list: from their tokens, or the messages that are kept."""

import contextlib
import sqlite3
from collections.abc import Sequence

from astraflow import wire
from astraflow.addons.view.conversation import newest_message, without_ends
from astraflow.addons.view.search import rows_of
from astraflow.addons.view.stored_episodes import StoredEpisodes
from astraflow.addons.view.token_text import TokenText
from astraflow.errors import Error
from astraflow.recipe.run_folder import RunFolder
from astraflow.types import Item, Message, Trajectory

__all__ = ["Snippet", "snippets"]

_NUM_CHARS = 160
_NUM_TOKENS = 64
"""Tokens that are decoded at each end."""


class Snippet(Item, frozen=True, kw_only=True):
    """The message that the first answer replies to, and the last answer."""

    asked: str = ""
    answered: str = ""


def snippets(
    database: sqlite3.Connection, folder: RunFolder, texts: TokenText, ids: Sequence[int]
) -> dict[int, Snippet]:
    """Maps episodes to their words. Those whose data is gone or damaged are left out.

    Raises: sqlite3.Error.
    """
    by_id: dict[int, Snippet] = {}
    with StoredEpisodes(database, folder.journal) as stored:
        for row in rows_of(database, ids):
            with contextlib.suppress(Error):
                trajectory = stored.tokens(row["id"])
                if trajectory is not None:
                    by_id[row["id"]] = _of_tokens(trajectory, texts)
                else:
                    by_id[row["id"]] = _of_messages(stored.messages(row["id"]))
    return by_id


def _of_tokens(trajectory: Trajectory, texts: TokenText) -> Snippet:
    ids = wire.array(trajectory.token_ids, "int32")
    mask = wire.array(trajectory.mask, "uint8")
    is_sampled = mask == 1
    first = int(is_sampled.argmax()) if is_sampled.any() else len(ids)
    given = ids[:first][-_NUM_TOKENS:].tolist()
    last = max([turn.start for turn in trajectory.turns], default=0)
    sampled = ids[last:][is_sampled[last:]][-_NUM_TOKENS:].tolist()
    policy = trajectory.policy
    return Snippet(
        asked=_short(newest_message(texts.text(policy, given)), is_end=True),
        answered=_short(without_ends(texts.text(policy, sampled)), is_end=True),
    )


def _of_messages(messages: Sequence[Message]) -> Snippet:
    asked = next((m.content for m in messages if m.role == "user"), messages[0].content if messages else "")
    return Snippet(
        asked=_short(asked), answered=_short(messages[-1].content if messages else "", is_end=True)
    )


def _short(text: str, *, is_end: bool = False) -> str:
    """One line of the begin of a text, or of its end."""
    line = " ".join(text.split()).encode("utf-8", "replace").decode()
    if len(line) <= _NUM_CHARS:
        return line
    return f"\u2026{line[-_NUM_CHARS:]}" if is_end else f"{line[:_NUM_CHARS]}\u2026"

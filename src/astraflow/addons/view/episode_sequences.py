"""The sequences of one episode as conversations, in the order in which they began, and its neighbors."""

import sqlite3
from collections.abc import Mapping, Sequence
from functools import partial

from astraflow.addons.view.conversation import (
    MessageBlock,
    MessagePart,
    blocks_of_messages,
    blocks_of_trajectory,
    speaker_of,
)
from astraflow.addons.view.schema import EVAL, TRAIN
from astraflow.addons.view.search import EpisodeDict
from astraflow.addons.view.stored_episodes import StoredEpisodes
from astraflow.addons.view.token_text import TokenText
from astraflow.addons.view.trajectory_tree import Branch, Origin, branches_of
from astraflow.errors import Error
from astraflow.types import Item, Message, Trajectory

__all__ = [
    "NO_PLACE",
    "Place",
    "SequenceView",
    "Sibling",
    "place_of",
    "sequence_of_messages",
    "sequences_of",
]

_MAX_CHARS = 2_000_000
"""Maximum number of characters of all sequences together."""
_MAX_SEQUENCES = 512
_MAX_SIBLINGS = 64


class SequenceView(Item, frozen=True, kw_only=True):
    """One sequence of an episode: a conversation of one policy, or what was kept of all of them."""

    id: int
    """Its row of the index."""
    speaker: str
    reward: float | None = None
    num_tokens: int | None = None
    num_turns: int | None = None
    finish: str = ""
    origin: Origin = Origin()
    num_shared: int = 0
    """Number of messages at its beginning that the sequence it follows from has too."""
    blocks: tuple[MessageBlock, ...] = ()
    is_left_out: bool = False
    """Whether its messages are missing because the others are too long, or because they can't be read."""


class Sibling(Item, frozen=True, kw_only=True):
    """Another episode of the same group."""

    id: int
    name: str
    reward: float | None
    has_error: bool = False


class Place(Item, frozen=True, kw_only=True):
    """Where an episode is among the others."""

    older: int | None = None
    """Row of the episode before it."""
    newer: int | None = None
    siblings: tuple[Sibling, ...] = ()
    """The episodes of its group, itself included. Of a large group, those around it."""
    num_siblings: int = 0


NO_PLACE = Place()


def sequences_of(
    database: sqlite3.Connection,
    stored: StoredEpisodes,
    texts: TokenText,
    own: tuple[EpisodeDict, Trajectory],
    messages: Sequence[Message],
) -> tuple[SequenceView, ...]:
    """Reads all sequences of the episode to which a row and its trajectory belong.

    `messages`: what the run keeps of the episode; it names roles that a chat template doesn't.
    Raises: sqlite3.Error.
    """
    row, trajectory = own
    rows = _rows(database, row)
    # The sequence that was asked for comes first, because the room may end.
    room = _MAX_CHARS
    by_id: dict[int, Branch] = {}
    # Kept messages have roles also where the template has no marker for them.
    roles = {message.content.strip(): message.role for message in messages if message.role != "assistant"}
    for episode_id in sorted(rows, key=lambda each: each != row["id"]):
        try:
            read = trajectory if episode_id == row["id"] else stored.tokens(episode_id)
        except Error:
            continue
        if read is None:
            continue
        decode = partial(texts.text, read.policy)
        blocks = blocks_of_trajectory(read, decode) if room > 0 else ()
        room -= sum(len(block.text) for block in blocks)
        if roles:
            blocks = tuple([_with_role(block, roles) for block in blocks])
        by_id[episode_id] = Branch(read, blocks)
    ids = [episode_id for episode_id in rows if episode_id in by_id]
    branches = [by_id[episode_id] for episode_id in ids]
    origins = branches_of(branches)
    return tuple(
        [
            _view(episode_id, branch, origin, branches)
            for episode_id, branch, origin in zip(ids, branches, origins, strict=True)
        ]
    )


def sequence_of_messages(row: EpisodeDict, messages: Sequence[Message]) -> SequenceView:
    """Converts the kept messages of an episode whose tokens aren't stored."""
    return SequenceView(
        id=row["id"],
        speaker=speaker_of(row["policy"] or "", row["role"] or ""),
        reward=row["reward"],
        finish=row["finish"] or "",
        blocks=blocks_of_messages(messages),
    )


def place_of(database: sqlite3.Connection, row: EpisodeDict) -> Place:
    """Finds the episodes before, after, and beside one. Raises: sqlite3.Error."""
    # The rows of an episode follow each other, and the first one has part 0.
    older = "SELECT id FROM episodes WHERE id < ? AND part = 0 ORDER BY id DESC LIMIT 1"
    newer = "SELECT id FROM episodes WHERE id > ? AND part = 0 ORDER BY id LIMIT 1"
    query = (
        "SELECT id, episode_idx, attempt, coalesce(score, reward), error IS NOT NULL FROM episodes "
        "WHERE group_id = ? AND kind = ? AND part = 0 ORDER BY episode_idx, attempt"
    )
    rows = database.execute(query, (row["group"], _kind(row))).fetchall()
    own = (row["episode"], row["attempt"])
    at = next((idx for idx, each in enumerate(rows) if (each[1], each[2]) == own), 0)
    first = max(0, min(at - _MAX_SIBLINGS // 2, len(rows) - _MAX_SIBLINGS))
    siblings = tuple(
        [
            Sibling(id=each[0], name=f"{each[1]}.{each[2]}", reward=each[3], has_error=bool(each[4]))
            for each in rows[first : first + _MAX_SIBLINGS]
        ]
    )
    return Place(
        older=_first(database, older, row["id"] - row["part"]),
        newer=_first(database, newer, row["id"]),
        siblings=siblings,
        num_siblings=len(rows),
    )


def _first(database: sqlite3.Connection, query: str, episode_id: int) -> int | None:
    row = database.execute(query, (episode_id,)).fetchone()
    return row[0] if row else None


def _kind(row: EpisodeDict) -> int:
    return EVAL if row["kind"] == "eval" else TRAIN


def _rows(database: sqlite3.Connection, row: EpisodeDict) -> list[int]:
    """Returns the rows of an episode's sequences, in their order."""
    query = (
        "SELECT id FROM episodes WHERE group_id = ? AND kind = ? "
        "AND episode_idx = ? AND attempt = ? AND length IS NOT NULL ORDER BY part LIMIT ?"
    )
    values = (row["group"], _kind(row), row["episode"], row["attempt"], _MAX_SEQUENCES)
    return [each[0] for each in database.execute(query, values)]


def _with_role(block: MessageBlock, roles: Mapping[str, str]) -> MessageBlock:
    role = roles.get(block.text.strip(), block.role) if block.turn == 0 else block.role
    if role == block.role:
        return block
    parts = block.parts
    if role == "tool":
        parts = tuple(
            [
                MessagePart(kind="result", pieces=part.pieces) if part.kind == "text" else part
                for part in parts
            ]
        )
    return MessageBlock(role=role, parts=parts, start=block.start)


def _view(episode_id: int, branch: Branch, origin: Origin, branches: Sequence[Branch]) -> SequenceView:
    trajectory = branch.trajectory
    shared = 0
    if origin.num_shared:
        for own, other in zip(branch.blocks, branches[origin.parent].blocks, strict=False):
            if own.turn or own.text != other.text:
                break
            shared += 1
    return SequenceView(
        id=episode_id,
        speaker=speaker_of(trajectory.policy, trajectory.role),
        reward=trajectory.reward,
        num_tokens=len(trajectory.mask),
        num_turns=len(trajectory.turns),
        finish=trajectory.finish_reason,
        origin=origin,
        num_shared=shared,
        blocks=tuple(branch.blocks),
        is_left_out=not branch.blocks and bool(trajectory.turns),
    )

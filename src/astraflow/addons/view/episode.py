"""One episode in full: its conversation, metrics, and tokens with logprobs, advantages, versions, and turns.

Everything is read from the run folder on request. Data that is damaged or gone (compaction drops payloads) is
left out, and `problems` says so.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np

from astraflow import wire
from astraflow.addons.view.advantages import Advantages, Spans
from astraflow.addons.view.conversation import versions_of
from astraflow.addons.view.episode_sequences import (
    NO_PLACE,
    Place,
    SequenceView,
    place_of,
    sequence_of_messages,
    sequences_of,
)
from astraflow.addons.view.episode_words import reward_words, version_words
from astraflow.addons.view.groups import facts_in
from astraflow.addons.view.log_tail import entry_at
from astraflow.addons.view.schema import TRAIN
from astraflow.addons.view.search import EpisodeDict, row_of
from astraflow.addons.view.stored_episodes import StoredEpisodes
from astraflow.addons.view.token_text import TokenText
from astraflow.dataflow.core.commands import EpisodeFacts
from astraflow.errors import Error, JournalError
from astraflow.recipe.run_folder import RunFolder
from astraflow.types import Item, Message, Trajectory
from astraflow.types.model_text import CALL_OPENINGS

__all__ = ["MAX_TOKENS", "EpisodeView", "MessageView", "Tokens", "TurnView", "episode_view"]

MAX_TOKENS = 20_000
"""Maximum number of tokens shown of one trajectory."""
_MAX_MESSAGE = 200_000
"""Maximum number of characters shown of one message."""
_MAX_CALL = 300
_MAX_STREAMS = 8


class TurnView(Item, frozen=True, kw_only=True):
    """One completion."""

    start: int
    end: int
    reward: float


class Tokens(Item, frozen=True, kw_only=True):
    """The tokens of a trajectory: columns with one entry per token, and data about spans of tokens."""

    pieces: list[str]
    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    """Logprobs under the policy that sampled the tokens, in nats; 0 where the mask is 0."""
    advantages: list[float]
    """Empty if the advantages are unknown."""
    versions: list[int]
    """The version that sampled each token; -1 where the mask is 0."""
    streams: dict[str, list[float]]
    turns: tuple[TurnView, ...] = ()
    temperature: float = 1.0
    is_fork: bool = False
    num_left_out: int = 0
    """Number of tokens that are not shown."""


class MessageView(Item, frozen=True, kw_only=True):
    """A message in readable form."""

    role: str
    name: str
    content: str


class EpisodeView(Item, frozen=True, kw_only=True):
    """One episode, as the page and the terminal show it."""

    row: EpisodeDict
    tokens: Tokens | None = None
    messages: tuple[MessageView, ...] = ()
    metrics: dict[str, float]
    failure: str = ""
    problems: tuple[str, ...] = ()
    sequences: tuple[SequenceView, ...] = ()
    """The conversation: all sequences of the episode, or what was kept of its messages."""
    reward_said: str = ""
    """What the reward is and where it comes from, in a sentence."""
    versions_said: str = ""
    """Which versions sampled the tokens, in a sentence; empty if one did."""
    place: Place = NO_PLACE
    """Empty in a group, in which all episodes are shown."""


def episode_view(
    database: sqlite3.Connection,
    folder: RunFolder,
    texts: TokenText,
    episode_id: int,
    *,
    in_group: bool = False,
    max_tokens: int = MAX_TOKENS,
) -> EpisodeView | None:
    """Returns a row of the index with its data from the run folder; None if there is no such row.

    `in_group`: leaves out the conversation and the place, which only the page of one episode shows.
    """
    row = row_of(database, episode_id)
    if row is None:
        return None
    problems: list[str] = []
    messages: tuple[Message, ...] = ()
    trajectory: Trajectory | None = None
    sequences: tuple[SequenceView, ...] = ()
    with StoredEpisodes(database, folder.journal) as stored:
        metrics, failure = stored.result(row)
        try:
            messages = stored.messages(episode_id)
        except JournalError as err:
            problems.append(f"the messages cannot be read: {err}")
        try:
            trajectory = stored.tokens(episode_id)
        except Error as err:
            problems.append(f"the tokens cannot be read: {err}")
        if trajectory is not None and not in_group:
            sequences = sequences_of(database, stored, texts, (row, trajectory), messages)
        elif messages and not in_group:
            sequences = (sequence_of_messages(row, messages),)
    tokens = None
    if trajectory is not None:
        tokens = _tokens(trajectory, texts, _spans(database, folder, row), max_tokens)
    turn_rewards = [turn.reward for turn in trajectory.turns] if trajectory is not None else []
    return EpisodeView(
        row=row,
        tokens=tokens,
        messages=tuple([MessageView(role=m.role, name=m.name, content=_clean(m.content)) for m in messages]),
        metrics=metrics,
        failure=_clean(failure),
        problems=(*problems, *_unread_words(metrics, messages)),
        sequences=sequences,
        reward_said=reward_words(row, turn_rewards, metrics),
        versions_said=version_words(trajectory) if trajectory is not None else "",
        place=NO_PLACE if in_group else place_of(database, row),
    )


def _unread_words(metrics: Mapping[str, float], messages: Sequence[Message]) -> list[str]:
    """Says how many calls were not read, with the text of the first that has tags; empty if all were."""
    num = metrics.get("unread_calls", 0.0)
    said = [message.content for message in messages if message.role == "assistant"]
    text = next((each for each in said if any(mark in each for mark in CALL_OPENINGS)), (said or [""])[-1])
    begin = min((text.find(mark) for mark in CALL_OPENINGS if mark in text), default=0)
    shown = _clean(text[begin : begin + _MAX_CALL])
    return [f"{num:g} answers look like a tool call that was not read: {shown}"] if num else []


def _tokens(
    trajectory: Trajectory, texts: TokenText, spans: Sequence[tuple[int, int, float]], max_tokens: int
) -> Tokens:
    ids = wire.array(trajectory.token_ids, "int32")
    num = min(len(ids), max_tokens)
    versions = versions_of(trajectory)
    advantages = np.zeros(len(ids) if spans else 0)
    for start, end, value in spans:
        advantages[start:end] = value
    first_ids: list[int] = ids[:num].tolist()
    return Tokens(
        pieces=[_clean(piece) for piece in texts.pieces(trajectory.policy, first_ids)],
        ids=first_ids,
        mask=wire.array(trajectory.mask, "uint8")[:num].tolist(),
        logprobs=wire.array(trajectory.behavior_logprobs, "float32")[:num].tolist(),
        advantages=advantages[:num].tolist(),
        versions=versions[:num].tolist(),
        streams={
            stream.name: wire.array(stream.data, stream.dtype)[:num].tolist()
            for stream in [stream for stream in trajectory.streams if stream.width == 1][:_MAX_STREAMS]
        },
        turns=tuple(TurnView(start=t.start, end=t.end, reward=t.reward) for t in trajectory.turns),
        temperature=trajectory.temperature,
        is_fork=trajectory.is_fork,
        num_left_out=len(ids) - num,
    )


def _spans(
    database: sqlite3.Connection, folder: RunFolder, row: EpisodeDict
) -> Sequence[tuple[int, int, float]]:
    """Computes the advantages of the trajectory from its whole group; empty if they are unknown."""
    if row["advantage"] is None:
        return ()
    query = "SELECT DISTINCT log_segment, log_offset FROM episodes WHERE group_id = ? AND kind = ?"
    places = tuple((each[0], each[1]) for each in database.execute(query, (row["group"], TRAIN)))
    try:
        advantages = _advantages(folder.recipe, folder.recipe.stat().st_mtime_ns).get(row["policy"])
    except (Error, OSError):
        return ()
    if advantages is None:
        return ()
    spans = _group_spans(folder.journal / "segments", advantages, row["group"], places)
    # Compaction may have dropped the log's entry, but the index still has the mean.
    return spans.get((row["episode"], row["part"]), ((0, row["tokens"], row["advantage"]),))


@lru_cache(64)
def _group_spans(
    segments: Path, advantages: Advantages, group_id: int, places: tuple[tuple[int, int], ...]
) -> dict[tuple[int, int], Spans]:
    """Computes the advantages of a group from the log entries of its episodes.

    The result is cached because the page may show all episodes of a group together.
    """
    facts: dict[int, EpisodeFacts] = {}
    for place in places:
        facts |= facts_in(entry_at(segments, place), group_id)
    return advantages.of(group_id, facts)


@lru_cache(32)
def _advantages(recipe: Path, mtime_ns: int) -> dict[str, Advantages]:
    """Maps each policy in the recipe of a run folder to its advantages. Raises: Error, OSError."""
    del mtime_ns  # part of the cache key: a recipe may change when its run is resumed
    policies = RunFolder(recipe.parent).load_recipe().trained
    return {name: Advantages(name, policy.table) for name, policy in policies.items()}


def _clean(text: str) -> str:
    """Replaces lone surrogates, which JSON can't hold, and truncates very long text."""
    cut = text[:_MAX_MESSAGE]
    if len(text) > _MAX_MESSAGE:
        cut += f"\n... {len(text) - _MAX_MESSAGE} more characters"
    return cut.encode("utf-8", "replace").decode()

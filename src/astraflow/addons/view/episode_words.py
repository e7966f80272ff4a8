"""Says in sentences what an episode was rewarded for, and which versions sampled it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from astraflow.addons.view.conversation import versions_of
from astraflow.types import Trajectory

__all__ = ["reward_words", "version_words"]

_PART = "reward/"
"""Prefix of the metrics that hold the parts of a reward."""
_FULL = 0.999
"""A mean of 0/1 parts may miss 1 by rounding."""
_MAX_TURNS = 4
"""Maximum number of turns that a sentence lists."""


def reward_words(row: Mapping[str, Any], turn_rewards: Sequence[float], metrics: Mapping[str, float]) -> str:
    """Says what the reward is, and what it comes from as far as the run stored that.

    `row`: a row of the index. `turn_rewards`: rewards of its turns.

    Example: `"0.5: format passed, answer failed; the episode's score is 0."`.
    """
    if row["error"]:
        return f"No reward, because the attempt failed: {row['error']}."
    if row["reward"] is None:
        return "No reward is stored."
    why = [_parts_words(metrics), _turns_words(row["reward"], turn_rewards)]
    why.append(_score_words(row, is_explained=any(why)))
    if metrics.get("tool_errors"):
        why.append(f"failed tool calls: {metrics['tool_errors']:.3g}")
    if row["finish"] == "length":
        why.append("cut off at the token limit")
    reasons = "; ".join([words for words in why if words])
    return f"{row['reward']:.3g}: {reasons}." if reasons else f"{row['reward']:.3g}."


def _parts_words(metrics: Mapping[str, float]) -> str:
    """Names the parts of the reward, as `exact passed, brief failed, style 0.4`."""
    words: list[str] = []
    for name, value in metrics.items():
        if name.startswith(_PART) and (short := name.removeprefix(_PART)):
            end = "passed" if _FULL <= value <= 1 else "failed" if value == 0 else f"{value:.3g}"
            words.append(f"{short} {end}")
    return ", ".join(words)


def _turns_words(reward: float, turn_rewards: Sequence[float]) -> str:
    """Says how the reward is spread over several turns; empty if it is one for the whole conversation."""
    paid = [(turn, value) for turn, value in enumerate(turn_rewards, 1) if value]
    if len(turn_rewards) < 2 or not paid:
        return ""
    listed = ", ".join([f"{value:.3g} for turn {turn}" for turn, value in paid[:_MAX_TURNS]])
    more = f", and {len(paid) - _MAX_TURNS} more turns" if len(paid) > _MAX_TURNS else ""
    rest = reward - sum(turn_rewards)
    whole = f", {rest:.3g} for the whole" if abs(rest) > 1e-6 else ""
    return f"{listed}{more}{whole}"


def _score_words(row: Mapping[str, Any], *, is_explained: bool) -> str:
    score = row["score"]
    if score is None:
        return ""
    if abs(score - row["reward"]) < 1e-6:
        return "" if is_explained else "the task's score"
    own = "" if is_explained else "its own reward, while "
    return f"{own}the episode's score is {score:.3g}"


def version_words(trajectory: Trajectory) -> str:
    """Says which versions sampled a trajectory, if several did. Empty if one did, or none.

    Example: `"Turn 1 was sampled across two versions: 12 wrote its first 9 tokens, 13 the other 4."`.
    """
    if len({span.version for span in trajectory.versions}) < 2:
        return ""
    versions = versions_of(trajectory)
    mixed: list[str] = []
    for number, turn in enumerate(trajectory.turns, 1):
        own = versions[turn.start : turn.end]
        own = own[own >= 0]
        places = np.flatnonzero(np.diff(own)) + 1
        if len(places) == 1:
            first = int(places[0])
            mixed.append(
                f"Turn {number} was sampled across two versions: {own[0]} wrote its first {first} tokens, "
                f"{own[-1]} the other {len(own) - first}."
            )
        elif len(places):
            mixed.append(
                f"Turn {number} was sampled across {len(set(own.tolist()))} versions, {own.min()} to "
                f"{own.max()}, which changed {len(places)} times while it was written."
            )
    if len(trajectory.turns) == 1:
        mixed = [words.replace("Turn 1", "The answer") for words in mixed]
    if mixed:
        more = f" So were {len(mixed) - 2} other turns." if len(mixed) > 2 else ""
        return " ".join(mixed[:2]) + more
    return (
        f"Different turns were sampled by different versions, {versions[versions >= 0].min()} to "
        f"{versions.max()}; none changed within a turn."
    )

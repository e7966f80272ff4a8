"""Filters by limits on a group's lengths, truncation, repetition and rewards."""

from collections.abc import Sequence
from typing import Literal

from astraflow.protocols import GroupFacts

__all__ = ["length", "repetition", "reward_range", "truncated"]


def length(
    facts: GroupFacts, *, min_tokens: int = 1, max_tokens: int = 1_000_000, max_frac: float = 0.5
) -> bool:
    """Keeps a group unless more than `max_frac` of it has trained tokens outside [min_tokens, max_tokens]."""
    return _few([not min_tokens <= t.num_trained_tokens <= max_tokens for t in facts.trajectories], max_frac)


def truncated(facts: GroupFacts, *, action: Literal["drop", "mask"] = "drop", max_frac: float = 0.5) -> bool:
    """Keeps a group unless more than `max_frac` of it hit the token limit.

    `mask`: keeps it unless all did; the table then gives the truncated ones no advantage, and compares the
    others among themselves (overlong filtering, arXiv:2503.14476, section 3.4).
    """
    claims = [t.is_truncated for t in facts.trajectories]
    return not all(claims) if action == "mask" else _few(claims, max_frac)


def repetition(facts: GroupFacts, *, max_repeated: float = 0.5, max_frac: float = 0.5) -> bool:
    """Keeps a group unless more than `max_frac` of it repeats itself: a share above `max_repeated` of its
    8-grams of sampled tokens came before in the same trajectory."""
    return _few([t.repeated_frac > max_repeated for t in facts.trajectories], max_frac)


def reward_range(facts: GroupFacts, *, low: float = 0.1, high: float = 0.9) -> bool:
    """Keeps a group whose mean reward is within [low, high] (difficulty filtering, arXiv:2504.03380)."""
    return low <= sum(t.reward for t in facts.trajectories) / len(facts.trajectories) <= high


def _few(claims: Sequence[bool], max_frac: float) -> bool:
    return sum(claims) <= max_frac * len(claims)

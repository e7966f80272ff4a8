"""Filters by limits on a group's lengths, truncation, repetition and rewards."""

from collections.abc import Sequence
from typing import Literal

from astraflow.algorithms.relative import group_mean
from astraflow.facts import GroupFacts, episode_weights

__all__ = ["length", "repetition", "reward_range", "truncated"]

_ROUNDING = 1e-9
"""What sums of weights may miss a whole number by."""


def length(
    facts: GroupFacts, *, min_tokens: int = 1, max_tokens: int = 1_000_000, max_frac: float = 0.5
) -> bool:
    """Keeps a group unless more than `max_frac` of it has trained tokens outside [min_tokens, max_tokens]."""
    claims = [not min_tokens <= t.num_trained_tokens <= max_tokens for t in facts.trajectories]
    return _few(facts, claims, max_frac)


def truncated(facts: GroupFacts, *, action: Literal["drop", "mask"] = "drop", max_frac: float = 0.5) -> bool:
    """Keeps a group unless more than `max_frac` of it hit the token limit.

    `mask`: keeps it unless all did; the table then gives the truncated ones no advantage, and compares the
    others among themselves (overlong filtering, arXiv:2503.14476, section 3.4).
    """
    claims = [t.is_truncated for t in facts.trajectories]
    return not all(claims) if action == "mask" else _few(facts, claims, max_frac)


def repetition(facts: GroupFacts, *, max_repeated: float = 0.5, max_frac: float = 0.5) -> bool:
    """Keeps a group unless more than `max_frac` of it repeats itself: a share above `max_repeated` of its
    8-grams of sampled tokens came before in the same trajectory."""
    return _few(facts, [t.repeated_frac > max_repeated for t in facts.trajectories], max_frac)


def reward_range(facts: GroupFacts, *, low: float = 0.1, high: float = 0.9) -> bool:
    """Keeps a group whose mean reward is within [low, high] (difficulty filtering, arXiv:2504.03380)."""
    return low <= group_mean(facts) <= high


def _few(facts: GroupFacts, claims: Sequence[bool], max_frac: float) -> bool:
    """Whether the claim holds for at most `max_frac` of the group: each episode and role weighs 1, in equal
    parts on its trajectories."""
    episodes = [(t.episode_idx, t.role) for t in facts.trajectories]
    weights = episode_weights(episodes, [1] * len(episodes))
    claimed = sum(weight for weight, claim in zip(weights, claims, strict=True) if claim)
    return claimed <= max_frac * sum(weights) + _ROUNDING

"""Statistics of a group, for filters, curators, shaping and credit: the members of each role, and values
relative to their mean.

Every episode weighs the same, however many trajectories of a role it has (`GroupFacts.weights`).

Legend: N trajectories or turns, E episodes.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from astraflow.types.facts import GroupFacts

__all__ = [
    "ROUNDING",
    "UNCOMPARED",
    "Floats",
    "Members",
    "Scale",
    "are_equal",
    "by_role",
    "centered_values",
    "group_mean",
    "relative_rewards",
    "relative_values",
    "without_lone",
]

Floats = NDArray[np.float64]
Scale = Literal["std", "population_std", "none"]


class _Uncompared(float):
    """The type of `UNCOMPARED`."""


UNCOMPARED = _Uncompared(0.0)
"""The advantage of a trajectory that credit has nothing to compare with. It stays 0 whatever normalizes the
batch, and losses that learn from advantages leave the trajectory out."""
ROUNDING = 1e-9
"""Largest rounding error of a sum of weights that should be a whole number."""
_FLOAT32_STEPS = 4 * 2.0**-23
"""Relative difference of values that a few roundings to float32 may cause."""
_FLOAT64_NOISE = 1e-12
"""What remains of numbers around 1 that cancel, such as 0.1 + 0.2 - 0.3."""


@dataclass(frozen=True, slots=True)
class Members:
    """The trajectories of one role in a group."""

    role: str
    positions: NDArray[np.intp]
    """[N]; the trajectories' positions in `facts.trajectories`."""
    rewards: Floats
    """[N]."""
    weights: Floats
    """[N]; the weights of an episode sum to 1."""
    episodes: NDArray[np.intp]
    """[N]; the number of the trajectory's episode among the role's E episodes, from 0."""
    num_episodes: int

    def episode_rewards(self) -> Floats:
        """[E]: the weighted mean of each episode's rewards; exact if they are all equal."""
        if self.num_episodes == len(self.rewards):
            return self.rewards
        # Averages differences from the first reward: a rounding error of the mean of equal rewards would be
        # blown up when it is divided by their deviation.
        first_E = np.empty(self.num_episodes)
        first_E[self.episodes[::-1]] = self.rewards[
            ::-1
        ]  # reversed, so the first of each episode is written last
        excess_N = self.weights * (self.rewards - first_E[self.episodes])
        return first_E + np.bincount(self.episodes, weights=excess_N, minlength=self.num_episodes)


def by_role(facts: GroupFacts) -> Iterator[Members]:
    """Yields the trajectories of each role, because rewards are compared within a role only.

    If a role acts in a single episode of the group (self-play in groups of one), episodes can't be compared
    with each other. Then each of its trajectories counts as an episode.
    """
    roles = [t.role for t in facts.trajectories]
    rewards_N = np.asarray([t.reward for t in facts.trajectories], dtype=np.float64)
    weights_N = np.asarray(facts.weights)
    for role in dict.fromkeys(roles):
        members = [i for i, r in enumerate(roles) if r == role]
        positions = np.asarray(members, dtype=np.intp)
        episode_numbers: dict[int, int] = {}
        episodes = [
            episode_numbers.setdefault(facts.trajectories[i].episode_idx, len(episode_numbers))
            for i in members
        ]
        is_single_episode = len(episode_numbers) == 1
        yield Members(
            role=role,
            positions=positions,
            rewards=rewards_N[positions],
            weights=np.ones(len(members)) if is_single_episode else weights_N[positions],
            episodes=np.arange(len(members)) if is_single_episode else np.asarray(episodes, dtype=np.intp),
            num_episodes=len(members) if is_single_episode else len(episode_numbers),
        )


def group_mean(facts: GroupFacts) -> float:
    """Mean reward over the group's episodes; an episode counts once per role that acts in it."""
    values = np.concatenate([members.episode_rewards() for members in by_role(facts)])
    return float(values.sum() / len(values))


def are_equal(values: Sequence[float] | Floats) -> bool:
    """Whether values differ by rounding alone: by a few steps of float32, in which rewards may come."""
    lowest = min(values)
    highest = max(values)
    return highest - lowest <= _FLOAT32_STEPS * max(abs(lowest), abs(highest)) + _FLOAT64_NOISE


def centered_values(values_N: Floats, weights_N: Floats) -> Floats:
    """Values minus their weighted mean, [N]; exactly 0 if they are equal, however many there are."""
    if are_equal(values_N):
        return np.zeros_like(values_N)
    # Relative to the first value, so that a mean of equal values has no rounding error.
    excess_N = values_N - values_N[0]
    return excess_N - np.add.reduce(weights_N * excess_N) / np.add.reduce(weights_N)


def relative_values(values_N: Floats, weights_N: Floats, *, scale: Scale, epsilon: float) -> Floats:
    """Values minus their weighted mean, divided by their deviation plus `epsilon`; 0 for a single value.

    n = sum(w);  mean = sum(w x) / n;  deviation = sqrt(sum(w (x - mean)^2) / (n - 1))
    `std`: as above, but divides by n if n is 1 (turns of one episode's forks). `population_std`: always
    divides by n. `none`: values minus their mean, undivided. Shapes: all [N].
    """
    if len(values_N) < 2:
        return np.zeros_like(values_N)
    centered_N = centered_values(values_N, weights_N)
    if scale == "none":
        return centered_N
    num = np.add.reduce(weights_N)
    freedom = num - 1 if scale == "std" and num > 1 + ROUNDING else num
    variance = np.add.reduce(weights_N * centered_N * centered_N) / freedom
    return centered_N / (math.sqrt(variance) + epsilon)


def without_lone(facts: GroupFacts, advantages: Sequence[float]) -> tuple[float, ...]:
    """The advantages, with `UNCOMPARED` for the only trajectory of a role."""
    counts = Counter(t.role for t in facts.trajectories)
    return tuple(
        UNCOMPARED if counts[t.role] == 1 else advantage
        for t, advantage in zip(facts.trajectories, advantages, strict=True)
    )


def relative_rewards(facts: GroupFacts, *, scale: Scale, epsilon: float) -> Floats:
    """The group's rewards [N], each relative to the rewards of its role; see `relative_values`."""
    advantages_N = np.zeros(len(facts.trajectories))
    for members in by_role(facts):
        advantages_N[members.positions] = relative_values(
            members.rewards, members.weights, scale=scale, epsilon=epsilon
        )
    return advantages_N

"""What filters, curators, shaping and credit share: the members of each role in a group, and values relative
to their mean.

Every episode weighs the same, however many trajectories of a role it has (`GroupFacts.weights`).

Legend: N trajectories or turns, E episodes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from astraflow.types.facts import GroupFacts

__all__ = [
    "ROUNDING",
    "Floats",
    "Members",
    "Scale",
    "by_role",
    "group_mean",
    "relative",
    "relative_rewards",
]

Floats = NDArray[np.float64]
Scale = Literal["std", "population_std", "none"]

ROUNDING = 1e-9
"""How far a sum of weights may be from a whole number."""


@dataclass(frozen=True, slots=True)
class Members:
    """The trajectories of one role in a group."""

    role: str
    positions: NDArray[np.intp]
    """[N] in `facts.trajectories`."""
    rewards: Floats
    """[N]."""
    weights: Floats
    """[N]; those of an episode sum to 1."""
    episodes: NDArray[np.intp]
    """[N] which of the E episodes, counted from 0."""
    num_episodes: int

    def episode_rewards(self) -> Floats:
        """[E]: the weighted mean of each episode's rewards; exactly their value where they are equal."""
        if self.num_episodes == len(self.rewards):
            return self.rewards
        first = np.empty(self.num_episodes)
        first[self.episodes[::-1]] = self.rewards[::-1]
        beyond = self.weights * (self.rewards - first[self.episodes])
        return first + np.bincount(self.episodes, weights=beyond, minlength=self.num_episodes)


def by_role(facts: GroupFacts) -> Iterator[Members]:
    """The trajectories of each role: rewards are compared within a role only.

    Where a role acts in a single episode of the group (self-play in groups of one), no episode can be
    compared with another: then each of its trajectories counts as one.
    """
    roles = [t.role for t in facts.trajectories]
    rewards_N = np.asarray([t.reward for t in facts.trajectories], dtype=np.float64)
    weights_N = np.asarray(facts.weights)
    for role in dict.fromkeys(roles):
        members = np.flatnonzero([r == role for r in roles])
        numbers: dict[int, int] = {}
        episodes = [numbers.setdefault(facts.trajectories[i].episode_idx, len(numbers)) for i in members]
        is_alone = len(numbers) == 1
        yield Members(
            role=role,
            positions=members,
            rewards=rewards_N[members],
            weights=np.ones(len(members)) if is_alone else weights_N[members],
            episodes=np.arange(len(members)) if is_alone else np.asarray(episodes, dtype=np.intp),
            num_episodes=len(members) if is_alone else len(numbers),
        )


def group_mean(facts: GroupFacts) -> float:
    """Mean reward of the group: over its episodes, one in which several roles act counting once for each."""
    values = np.concatenate([own.episode_rewards() for own in by_role(facts)])
    return float(values.sum() / len(values))


def relative(values_N: Floats, weights_N: Floats, *, scale: Scale, epsilon: float) -> Floats:
    """Values minus their mean, over their deviation plus `epsilon` unless `scale` is `none`; 0 for one alone.

    n = sum(w);  mean = sum(w x) / n;  deviation = sqrt(sum(w (x - mean)^2) / (n - 1))
    `std`: as above, or over n where n is 1 (turns of one episode's forks); `population_std`: n, not n - 1.
    """
    if len(values_N) < 2:
        return np.zeros_like(values_N)
    num = np.add.reduce(weights_N)
    # As `mean` and `std` do it, bit by bit where weights are 1, without what they spend on arguments.
    centered_N = values_N - np.add.reduce(weights_N * values_N) / num
    if scale == "none":
        return centered_N
    freedom = num - 1 if scale == "std" and num > 1 + ROUNDING else num
    variance = np.add.reduce(weights_N * centered_N * centered_N) / freedom
    return centered_N / (math.sqrt(variance) + epsilon)


def relative_rewards(facts: GroupFacts, *, scale: Scale, epsilon: float) -> Floats:
    """The rewards [N] of the group, each relative to those of its role."""
    advantages_N = np.zeros(len(facts.trajectories))
    for own in by_role(facts):
        advantages_N[own.positions] = relative(own.rewards, own.weights, scale=scale, epsilon=epsilon)
    return advantages_N

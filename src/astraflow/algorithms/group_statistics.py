"""Statistics of a group, for filters, curators, shaping and credit: the members of each role, and values
relative to their mean.

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
    "relative_rewards",
    "relative_values",
]

Floats = NDArray[np.float64]
Scale = Literal["std", "population_std", "none"]

ROUNDING = 1e-9
"""Largest rounding error of a sum of weights that should be a whole number."""


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


def relative_values(values_N: Floats, weights_N: Floats, *, scale: Scale, epsilon: float) -> Floats:
    """Values minus their weighted mean, divided by their deviation plus `epsilon`; 0 for a single value.

    n = sum(w);  mean = sum(w x) / n;  deviation = sqrt(sum(w (x - mean)^2) / (n - 1))
    `std`: as above, but divides by n if n is 1 (turns of one episode's forks). `population_std`: always
    divides by n. `none`: values minus their mean, undivided. Shapes: all [N].
    """
    if len(values_N) < 2:
        return np.zeros_like(values_N)
    num = np.add.reduce(weights_N)
    # For weights of 1 this equals `mean` and `std` bit for bit, without their overhead of checking arguments.
    centered_N = values_N - np.add.reduce(weights_N * values_N) / num
    if scale == "none":
        return centered_N
    freedom = num - 1 if scale == "std" and num > 1 + ROUNDING else num
    variance = np.add.reduce(weights_N * centered_N * centered_N) / freedom
    return centered_N / (math.sqrt(variance) + epsilon)


def relative_rewards(facts: GroupFacts, *, scale: Scale, epsilon: float) -> Floats:
    """The group's rewards [N], each relative to the rewards of its role; see `relative_values`."""
    advantages_N = np.zeros(len(facts.trajectories))
    for members in by_role(facts):
        advantages_N[members.positions] = relative_values(
            members.rewards, members.weights, scale=scale, epsilon=epsilon
        )
    return advantages_N

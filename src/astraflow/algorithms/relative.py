"""What credit functions share: the members of each role, and values relative to their mean."""

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from astraflow.protocols import GroupFacts, TrajectoryFacts

__all__ = ["Floats", "Scale", "by_role", "relative", "turn_returns"]

Floats = NDArray[np.float64]
Scale = Literal["std", "population_std", "none"]


def by_role(facts: GroupFacts) -> Iterator[tuple[NDArray[np.intp], Floats]]:
    """(positions, rewards) of the trajectories of each role: rewards are compared within a role only."""
    roles = [t.role for t in facts.trajectories]
    rewards_N = np.asarray([t.reward for t in facts.trajectories], dtype=np.float64)
    for role in dict.fromkeys(roles):
        members = np.flatnonzero([r == role for r in roles])
        yield members, rewards_N[members]


def relative(values_N: Floats, *, scale: Scale, epsilon: float) -> Floats:
    """Values minus their mean, over their deviation plus `epsilon` unless `scale` is `none`; 0 for one alone.

    `std`: sample (n-1) deviation; `population_std`: n instead of n-1.
    """
    if len(values_N) < 2:
        return np.zeros_like(values_N)
    num = len(values_N)
    # As `mean` and `std` do it, bit by bit, without what they spend on arguments: a quarter of the time.
    centered_N = values_N - np.add.reduce(values_N) / num
    if scale == "none":
        return centered_N
    variance = np.add.reduce(centered_N * centered_N) / (num - 1 if scale == "std" else num)
    return centered_N / (math.sqrt(variance) + epsilon)


def turn_returns(trajectory: TrajectoryFacts, discount: float) -> Floats:
    """R_k = sum_{l >= k} discount^(l - k) r_l over the turns [K]; what the trajectory was rewarded beyond its
    turns counts for its last one."""
    rewards_K = np.asarray(trajectory.turn_rewards, dtype=np.float64)
    rewards_K[-1] += trajectory.reward - rewards_K.sum()
    for k in range(len(rewards_K) - 2, -1, -1):
        rewards_K[k] += discount * rewards_K[k + 1]
    return rewards_K

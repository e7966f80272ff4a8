"""Credit `rloo`: reward minus the mean of the others (arXiv:2402.14740, eq. 8)."""

import numpy as np

from astraflow.algorithms.relative import by_role
from astraflow.protocols import GroupFacts

__all__ = ["rloo"]


def rloo(facts: GroupFacts) -> tuple[float, ...]:
    """A_i = r_i - mean_{j != i}(r_j), within a role: the baseline does not depend on r_i, so it is unbiased.

    A role with a single trajectory has no others: its advantage is 0.
    """
    advantages_N = np.zeros(len(facts.trajectories))
    for members, rewards in by_role(facts):
        if (num := len(rewards)) > 1:
            advantages_N[members] = (rewards - rewards.mean()) * num / (num - 1)
    return tuple(advantages_N.tolist())

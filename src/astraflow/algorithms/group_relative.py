"""Credit `group_relative`: reward minus the mean of the group, by role (GRPO, arXiv:2402.03300)."""

import numpy as np

from astraflow.algorithms.relative import Scale, by_role, relative
from astraflow.facts import GroupFacts

__all__ = ["group_relative"]


def group_relative(facts: GroupFacts, *, scale: Scale = "std", epsilon: float = 1e-6) -> tuple[float, ...]:
    """One advantage per trajectory, among the n episodes in which its role acts in the group.

    `std`:            A_i = (r_i - mean(r)) / (s + epsilon),  s = sqrt(sum_j w_j (r_j - mean(r))^2 / (n - 1))
    `population_std`: the same with n instead of n - 1
    `none`:           A_i = r_i - mean(r)                     (Dr. GRPO, arXiv:2503.20783)

    mean(r) = sum_j w_j r_j / n, w the weights of the trajectories: 1 where an episode has one of the role.
    A role with a single trajectory has nothing to compare with: its advantage is 0.
    """
    advantages_N = np.zeros(len(facts.trajectories))
    for own in by_role(facts):
        advantages_N[own.positions] = relative(own.rewards, own.weights, scale=scale, epsilon=epsilon)
    return tuple(advantages_N.tolist())

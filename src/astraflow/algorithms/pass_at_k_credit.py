"""Credit `pass_at_k`: the advantage of an answer for the best of k answers (arXiv:2508.10751)."""

import math

import numpy as np

from astraflow.algorithms.relative import by_role
from astraflow.facts import GroupFacts

__all__ = ["pass_at_k_credit"]


def pass_at_k_credit(
    facts: GroupFacts, *, k: int = 2, right_above: float = 0.5, epsilon: float = 1e-6
) -> tuple[float, ...]:
    """The mean advantage of an episode over all sets of k of the role's N episodes, R of them wrong.

    m = 1 - C(R, k) / C(N, k),  s = sqrt(m (1 - m))
    right: A = (1 - m) / (s + epsilon)
    wrong: A = (1 - m - C(R - 1, k - 1) / C(N - 1, k - 1)) / (s + epsilon)

    A set of k passes if one of it is right, which is an episode whose reward is above `right_above`. All
    trajectories of an episode have its advantage. 0 where a role has fewer than k episodes, or s is 0.
    Source: Chen et al. 2025 (arXiv:2508.10751), section 2.4, analytic derivation.
    """
    advantages_N = np.zeros(len(facts.trajectories))
    for own in by_role(facts):
        is_right_E = own.episode_rewards() > right_above
        num, num_wrong = own.num_episodes, int((~is_right_E).sum())
        if num < k:
            continue
        mean = 1 - math.comb(num_wrong, k) / math.comb(num, k)
        deviation = math.sqrt(mean * (1 - mean))
        if deviation == 0:
            continue
        right = 1 - mean
        wrong = right - math.comb(num_wrong - 1, k - 1) / math.comb(num - 1, k - 1)
        values_E = np.where(is_right_E, right, wrong) / (deviation + epsilon)
        advantages_N[own.positions] = values_E[own.episodes]
    return tuple(advantages_N.tolist())

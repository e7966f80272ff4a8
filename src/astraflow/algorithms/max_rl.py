"""Credit `max_rl`: reward relative to the pass rate, towards maximum likelihood (arXiv:2602.02710)."""

import numpy as np

from astraflow.algorithms.relative import by_role
from astraflow.facts import GroupFacts

__all__ = ["max_rl"]


def max_rl(facts: GroupFacts, *, epsilon: float = 1e-6) -> tuple[float, ...]:
    """A_i = (r_i - mean(r)) / (mean(r) + epsilon) within a role; 0 if mean(r) <= 0 or it has one episode.

    The mean is over episodes. For rewards 0 and 1, K of N right: the mean gradient over the right ones only,
    minus a baseline, which is unbiased for the likelihood's gradient truncated at order N (Tajwar et al.
    2026). Hard tasks weigh 1/p.
    """
    advantages_N = np.zeros(len(facts.trajectories))
    for own in by_role(facts):
        mean = own.episode_rewards().mean()
        if own.num_episodes > 1 and mean > 0:
            advantages_N[own.positions] = (own.rewards - mean) / (mean + epsilon)
    return tuple(advantages_N.tolist())

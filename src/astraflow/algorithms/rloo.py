"""Credit `rloo`: reward minus the mean of the other episodes (arXiv:2402.14740, eq. 8)."""

import numpy as np

from astraflow.algorithms.relative import by_role
from astraflow.facts import GroupFacts

__all__ = ["rloo"]


def rloo(facts: GroupFacts) -> tuple[float, ...]:
    """A_i = r_i - mean of the other episodes' rewards, within a role: the baseline does not depend on the
    own episode, so it is unbiased.

    An episode's reward is the weighted mean of its trajectories'. In a role with a single episode there are
    no others: advantage 0.
    """
    advantages_N = np.zeros(len(facts.trajectories))
    for own in by_role(facts):
        if (num := own.num_episodes) > 1:
            values_E = own.episode_rewards()
            beyond_E = (values_E - values_E.mean()) * num / (num - 1)
            advantages_N[own.positions] = own.rewards - values_E[own.episodes] + beyond_E[own.episodes]
    return tuple(advantages_N.tolist())

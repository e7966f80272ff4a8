"""Credit `opo`: reward minus a baseline that weighs rewards by length (OPO, arXiv:2505.23585)."""

import numpy as np

from astraflow.algorithms.relative import by_role
from astraflow.facts import GroupFacts

__all__ = ["opo"]


def opo(facts: GroupFacts) -> tuple[float, ...]:
    """A_i = r_i - b, b = sum_j |y_j| r_j / sum_j |y_j| within a role, |y_j| the trained tokens.

    The baseline of least variance, if the squared norm of a trajectory's gradient grows with its length.
    Forks share their episode's tokens, so they leave it as it is. One trajectory alone: advantage 0.
    Source: Hao et al. 2025 (arXiv:2505.23585); the formula as public codes have it.
    """
    advantages_N = np.zeros(len(facts.trajectories))
    lengths_N = np.asarray([t.num_trained_tokens for t in facts.trajectories], dtype=np.float64)
    for own in by_role(facts):
        lengths = lengths_N[own.positions]
        if len(lengths) > 1 and lengths.sum() > 0:
            advantages_N[own.positions] = own.rewards - (lengths * own.rewards).sum() / lengths.sum()
    return tuple(advantages_N.tolist())

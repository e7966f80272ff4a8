"""Credit `turn_discount`: each turn by what followed it (after arXiv:2402.03300, section 4.1.3)."""

import numpy as np

from astraflow.algorithms.relative import Scale, relative, turn_returns
from astraflow.protocols import GroupFacts

__all__ = ["turn_discount"]


def turn_discount(
    facts: GroupFacts, *, discount: float = 0.95, scale: Scale = "std", epsilon: float = 1e-6
) -> tuple[tuple[float, ...], ...]:
    """One advantage a turn: its discounted return, relative to those of all turns of its role in the group.

    R_k = sum_{l >= k} discount^(l - k) r_l;  A_k = (R_k - mean(R)) / (std(R) + epsilon)
    """
    returns = [turn_returns(t, discount) for t in facts.trajectories]
    found: list[tuple[float, ...]] = [()] * len(returns)
    roles = [t.role for t in facts.trajectories]
    for role in dict.fromkeys(roles):
        members = [i for i, r in enumerate(roles) if r == role]
        values = relative(np.concatenate([returns[i] for i in members]), scale=scale, epsilon=epsilon)
        cuts = np.cumsum([len(returns[i]) for i in members])[:-1]
        for i, own in zip(members, np.split(values, cuts), strict=True):
            found[i] = tuple(own.tolist())
    return tuple(found)

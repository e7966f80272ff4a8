"""Credit `turn_discount`: each turn by what followed it (after arXiv:2402.03300, section 4.1.3)."""

import numpy as np

from astraflow.algorithms.relative import Scale, by_role, relative, turn_returns
from astraflow.facts import GroupFacts

__all__ = ["turn_discount"]


def turn_discount(
    facts: GroupFacts, *, discount: float = 0.95, scale: Scale = "std", epsilon: float = 1e-6
) -> tuple[tuple[float, ...], ...]:
    """One advantage per turn: its discounted return, relative to those of all turns of its role in the group.

    R_k = sum_{l >= k} discount^(l - k) r_l;  A_k = (R_k - mean(R)) / (std(R) + epsilon)

    A turn weighs as much as its trajectory: 1 where an episode has one trajectory of the role. A fork's
    returns are its own: what it was rewarded as a whole counts for its last turn.
    """
    returns = [turn_returns(t, discount) for t in facts.trajectories]
    found: list[tuple[float, ...]] = [()] * len(returns)
    for own in by_role(facts):
        members: list[int] = own.positions.tolist()
        counts = [len(returns[i]) for i in members]
        weights = np.repeat(own.weights, counts)
        values = relative(
            np.concatenate([returns[i] for i in members]), weights, scale=scale, epsilon=epsilon
        )
        for i, part in zip(members, np.split(values, np.cumsum(counts)[:-1]), strict=True):
            found[i] = tuple(part.tolist())
    return tuple(found)

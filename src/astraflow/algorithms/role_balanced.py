"""Credit `role_balanced`: some roles are compared with one another, each weighing as much as the others."""

from collections.abc import Sequence

import numpy as np

from astraflow.algorithms.relative import by_role, relative
from astraflow.facts import GroupFacts

__all__ = ["role_balanced"]


def role_balanced(
    facts: GroupFacts, *, roles: Sequence[str] = ("verifier_of_right", "verifier_of_wrong")
) -> tuple[float, ...]:
    """One advantage per trajectory. `n_k`: episodes with role k of the `K` named ones; `n`: their sum.

    m = mean over k of the mean over the episodes of role k;  A_i = n / (K n_k) (r_i - m) for i of role k

    The weights sum to n. A policy that cannot tell the roles apart gains nothing by guessing the more
    frequent one: what pays for one role costs as much for the others. A group that lacks one of the roles
    says nothing about the balance: advantage 0. Roles that are not named are compared with themselves.
    """
    advantages_N = np.zeros(len(facts.trajectories))
    found = {own.role: own for own in by_role(facts)}
    for role, own in found.items():
        if role not in roles:
            advantages_N[own.positions] = relative(own.rewards, own.weights, scale="none", epsilon=0.0)
    if all(role in found for role in roles):
        chosen = [found[role] for role in roles]
        mean = np.mean([own.episode_rewards().mean() for own in chosen])
        num = sum(own.num_episodes for own in chosen)
        for own in chosen:
            advantages_N[own.positions] = num / (len(roles) * own.num_episodes) * (own.rewards - mean)
    return tuple(advantages_N.tolist())

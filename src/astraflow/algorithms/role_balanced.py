"""Credit `role_balanced`: some roles are compared with one another, each weighing as much as the others."""

from collections.abc import Sequence

import numpy as np

from astraflow.algorithms.relative import by_role, relative
from astraflow.protocols import GroupFacts

__all__ = ["role_balanced"]


def role_balanced(
    facts: GroupFacts, *, roles: Sequence[str] = ("verifier_of_right", "verifier_of_wrong")
) -> tuple[float, ...]:
    """One advantage a trajectory; for `n` trajectories of the `K` named roles, `n_k` of them of role k:

    m = mean over k of mean_{i in k}(r_i);  A_i = n / (K n_k) (r_i - m) for i of role k

    The weights sum to n. A policy that cannot tell the roles apart gains nothing by guessing the more
    frequent one: what pays for one role costs as much for the others. A group that lacks one of the roles
    says nothing about the balance: advantage 0. Roles that are not named are compared with themselves.
    """
    advantages_N = np.zeros(len(facts.trajectories))
    found = dict(zip(dict.fromkeys(t.role for t in facts.trajectories), by_role(facts), strict=True))
    for role, (members, rewards) in found.items():
        if role not in roles:
            advantages_N[members] = relative(rewards, scale="none", epsilon=0.0)
    if all(role in found for role in roles):
        chosen = [found[role] for role in roles]
        mean = np.mean([rewards.mean() for _, rewards in chosen])
        num = sum(len(rewards) for _, rewards in chosen)
        for members, rewards in chosen:
            advantages_N[members] = num / (len(roles) * len(rewards)) * (rewards - mean)
    return tuple(advantages_N.tolist())

"""Filter `zero_variance`: a group whose rewards are all equal carries no gradient (arXiv:2503.14476)."""

from astraflow.facts import GroupFacts

__all__ = ["zero_variance"]


def zero_variance(facts: GroupFacts, *, epsilon: float = 1e-6) -> bool:
    """True (keep) if the rewards of at least one role differ by more than `epsilon`.

    By role, since credit compares trajectories within a role only.
    """
    lowest: dict[str, float] = {}
    highest: dict[str, float] = {}
    for trajectory in facts.trajectories:
        role, reward = trajectory.role, trajectory.reward
        lowest[role] = min(reward, lowest.get(role, reward))
        highest[role] = max(reward, highest.get(role, reward))
    return any(highest[role] - lowest[role] > epsilon for role in lowest)

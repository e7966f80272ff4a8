"""Credit `reinforce_plus_plus`: rewards, normalised over the whole batch (arXiv:2501.03262)."""

from typing import Literal

import numpy as np

from astraflow.algorithms.relative import by_role
from astraflow.facts import GroupFacts

__all__ = ["reinforce_plus_plus"]


def reinforce_plus_plus(
    facts: GroupFacts, *, baseline: Literal["none", "group"] = "none"
) -> tuple[float, ...]:
    """`none`: A_i = r_i; `group`: A_i = r_i - mean(r) within a role (REINFORCE++-baseline).

    The mean is over episodes. The table then whitens the advantages over the trained tokens of the batch,
    whatever `normalize` says. The paper's KL term belongs to the trainer, and is not in here.
    """
    advantages_N = np.asarray([t.reward for t in facts.trajectories], dtype=np.float64)
    if baseline == "group":
        for own in by_role(facts):
            advantages_N[own.positions] -= own.episode_rewards().mean()
    return tuple(advantages_N.tolist())

"""Credit `gigpo`: episodes and single steps from the same state compared (arXiv:2505.10978)."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from astraflow.algorithms.group_relative import group_relative
from astraflow.algorithms.relative import Floats, Scale, relative, turn_returns
from astraflow.facts import GroupFacts, episode_weights

__all__ = ["gigpo"]


def gigpo(
    facts: GroupFacts,
    *,
    step_weight: float = 1.0,
    discount: float = 0.95,
    scale: Scale = "std",
    epsilon: float = 1e-6,
) -> tuple[tuple[float, ...], ...]:
    """One advantage a turn: A = A_episode + step_weight * A_step (eq. 8).

    A_episode: the trajectory's reward relative to its role's (eq. 3). A_step: the turn's discounted return
    relative to those of all turns of the role in the group that saw the same state (eq. 6 and 7); 0 where
    no other did. States are told apart by the turns' state keys. Where several trajectories of one episode
    saw a state, they count as one: their turns weigh as the trajectories do.
    """
    by_episode = group_relative(facts, scale=scale, epsilon=epsilon)
    found = [np.full(len(t.turn_rewards), a) for t, a in zip(facts.trajectories, by_episode, strict=True)]
    steps: defaultdict[tuple[str, int], list[tuple[int, int, float]]] = defaultdict(list)
    for i, trajectory in enumerate(facts.trajectories):
        returns = turn_returns(trajectory, discount)
        for k, key in enumerate(trajectory.state_keys):
            steps[trajectory.role, key].append((i, k, float(returns[k])))
    for group in steps.values():
        weights = _weights(facts, [i for i, _, _ in group])
        values = relative(np.asarray([value for _, _, value in group]), weights, scale=scale, epsilon=epsilon)
        for (i, k, _), value in zip(group, values, strict=True):
            found[i][k] += step_weight * value
    return tuple(tuple(own.tolist()) for own in found)


def _weights(facts: GroupFacts, trajectories: Sequence[int]) -> Floats:
    """The weight of a turn of each of `trajectories`, which may come several times; those of one episode sum
    to 1 over its trajectories."""
    distinct = list(dict.fromkeys(trajectories))
    chosen = [facts.trajectories[i] for i in distinct]
    weights = episode_weights([t.episode_idx for t in chosen], [t.num_trained_tokens for t in chosen])
    by_trajectory = dict(zip(distinct, weights, strict=True))
    return np.asarray([by_trajectory[i] for i in trajectories])

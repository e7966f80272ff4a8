"""Credit that computes one advantage per turn from the rewards of a group. Each variant is a config that is
called with a group.

The part of a trajectory's reward that its turns don't account for goes to the last turn.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from astraflow.algorithms.group_statistics import (
    UNCOMPARED,
    Floats,
    Scale,
    by_role,
    relative_rewards,
    relative_values,
    without_lone,
)
from astraflow.config import Config
from astraflow.types.facts import GroupFacts, TrajectoryFacts, episode_weights

__all__ = ["GaeCredit", "GigpoCredit", "TurnDiscountCredit"]


def _turn_returns(trajectory: TrajectoryFacts, discount: float) -> Floats:
    """The discounted return of each turn, [K]: R_k = sum_{l >= k} discount^(l - k) r_l."""
    rewards_K = np.asarray(trajectory.turn_rewards, dtype=np.float64)
    rewards_K[-1] += trajectory.reward - rewards_K.sum()
    for k in range(len(rewards_K) - 2, -1, -1):
        rewards_K[k] += discount * rewards_K[k + 1]
    return rewards_K


class TurnDiscountCredit(Config):
    """The discounted return of each turn, relative to all turns of its role in the group."""

    name: Literal["turn_discount"] = "turn_discount"
    discount: float = Field(default=0.95, gt=0, le=1)
    """Factor on a reward per turn of delay."""
    scale: Scale = "std"
    """The same choices as in `group_relative`."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""

    def __call__(self, facts: GroupFacts) -> tuple[tuple[float, ...], ...]:
        """R_k = sum_{l >= k} discount^(l - k) r_l;  A_k = (R_k - mean(R)) / (std(R) + epsilon)

        mean and std are over all turns of the role in the group. Each turn has the weight of its trajectory,
        which is 1 if the episode has one trajectory of the role. The returns of a fork are computed from the
        fork alone. The only turn of a role is `UNCOMPARED`.
        Source: after Shao et al. 2024 (arXiv:2402.03300), section 4.1.3.
        """
        returns = [_turn_returns(t, self.discount) for t in facts.trajectories]
        advantages: list[tuple[float, ...]] = [(UNCOMPARED,) * len(own) for own in returns]
        for members in by_role(facts):
            trajectories: list[int] = members.positions.tolist()
            counts = [len(returns[i]) for i in trajectories]
            if sum(counts) < 2:
                continue
            weights = np.repeat(members.weights, counts)
            joined = np.concatenate([returns[i] for i in trajectories])
            values = relative_values(joined, weights, scale=self.scale, epsilon=self.epsilon)
            for i, part in zip(trajectories, np.split(values, np.cumsum(counts)[:-1]), strict=True):
                advantages[i] = tuple(part.tolist())
        return tuple(advantages)


class GigpoCredit(Config):
    """Compares whole episodes, and turns that saw the same state (GiGPO, arXiv:2505.10978)."""

    name: Literal["gigpo"] = "gigpo"
    step_weight: float = Field(default=1.0, ge=0)
    """Weight of the comparison between turns."""
    discount: float = Field(default=0.95, gt=0, le=1)
    """Factor on a reward per turn of delay."""
    scale: Scale = "std"
    """The same choices as in `group_relative`, applied to both comparisons."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""

    def __call__(self, facts: GroupFacts) -> tuple[tuple[float, ...], ...]:
        """A = A_episode + step_weight * A_step (eq. 8).

        A_episode: the trajectory's reward relative to the rewards of its role (eq. 3). A_step: the turn's
        discounted return relative to the returns of all turns of the role in the group that saw the same
        state (eq. 6 and 7); 0 if no other turn saw it. Turns saw the same state if their state keys are
        equal. If several trajectories of one episode saw a state, the weights of their turns sum to 1. The
        only trajectory of a role is `UNCOMPARED` unless two of its turns saw the same state.
        """
        by_episode = relative_rewards(facts, scale=self.scale, epsilon=self.epsilon)
        advantages = [
            np.full(len(t.turn_rewards), a) for t, a in zip(facts.trajectories, by_episode, strict=True)
        ]
        steps: defaultdict[tuple[str, int], list[tuple[int, int, float]]] = defaultdict(list)
        for i, trajectory in enumerate(facts.trajectories):
            returns = _turn_returns(trajectory, self.discount)
            for k, key in enumerate(trajectory.state_keys):
                steps[trajectory.role, key].append((i, k, float(returns[k])))
        is_compared = [a is not UNCOMPARED for a in without_lone(facts, by_episode.tolist())]
        for group in steps.values():
            for i, _, _ in group:
                is_compared[i] |= len(group) > 1
            weights = _turn_weights(facts, [i for i, _, _ in group])
            returns_of_group = np.asarray([value for _, _, value in group])
            values = relative_values(returns_of_group, weights, scale=self.scale, epsilon=self.epsilon)
            for (i, k, _), value in zip(group, values, strict=True):
                advantages[i][k] += self.step_weight * value
        return tuple(
            tuple(own.tolist()) if compared else (UNCOMPARED,) * len(own)
            for own, compared in zip(advantages, is_compared, strict=True)
        )


def _turn_weights(facts: GroupFacts, trajectories: Sequence[int]) -> Floats:
    """The weight of a turn of each of the `trajectories`, which may occur several times.

    The weights of the distinct trajectories of an episode sum to 1.
    """
    distinct = list(dict.fromkeys(trajectories))
    chosen = [facts.trajectories[i] for i in distinct]
    weights = episode_weights([t.episode_idx for t in chosen], [t.num_trained_tokens for t in chosen])
    by_trajectory = dict(zip(distinct, weights, strict=True))
    return np.asarray([by_trajectory[i] for i in trajectories])


class GaeCredit(Config):
    """Passes the rewards of turns on unchanged; the critic of `train.auxiliary.critic` turns them into
    advantages (GAE, arXiv:1506.02438)."""

    name: Literal["gae"] = "gae"

    def __call__(self, facts: GroupFacts) -> tuple[tuple[float, ...], ...]:
        """Each turn's reward. The trainer assigns it to the last trained token of the turn."""
        return tuple(tuple(_turn_returns(t, 0.0).tolist()) for t in facts.trajectories)

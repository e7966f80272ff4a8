"""Credit: computes one advantage per trajectory from the rewards of a group. Each variant is a config that is
called with a group. Variants that compute one advantage per turn are in `turn_credit`.

Legend: N trajectories of the group or of one role in it, E episodes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from astraflow.algorithms.group_statistics import (
    UNCOMPARED,
    Floats,
    Scale,
    are_equal,
    by_role,
    centered_values,
    relative_rewards,
    relative_values,
    without_lone,
)
from astraflow.algorithms.own import load_own_function
from astraflow.algorithms.turn_credit import GaeCredit, GigpoCredit, TurnDiscountCredit
from astraflow.config import Config, Use
from astraflow.errors import DataError
from astraflow.types.bounds import MAX_ADVANTAGE
from astraflow.types.facts import GroupFacts, TrajectoryFacts

__all__ = [
    "UNCOMPARED",
    "Advantages",
    "Credit",
    "CreditConfig",
    "GdpoCredit",
    "GroupRelativeCredit",
    "HierarchicalCredit",
    "MaxRlCredit",
    "OpoCredit",
    "PassAtKCredit",
    "RaeCredit",
    "ReinforcePlusPlusCredit",
    "RlooCredit",
    "RoleBalancedCredit",
    "RoleBaselines",
    "make_credit",
]

Advantages = Sequence[float | Sequence[float]]
"""One entry per trajectory: a number for all of its trained tokens, or one number for each of its turns. A
trajectory that can't be compared with anything gets `UNCOMPARED`."""

Credit = Callable[[GroupFacts], Advantages]


class GroupRelativeCredit(Config):
    """Reward minus the mean of the group, per role; optionally divided by the standard deviation (GRPO,
    arXiv:2402.03300)."""

    name: Literal["group_relative"] = "group_relative"
    scale: Scale = "std"
    """`std`: divide by the sample standard deviation (n - 1) plus `epsilon`. `population_std`: the same with
    n. `none`: do not divide (Dr. GRPO, arXiv:2503.20783)."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """One advantage per trajectory, among the n episodes in which its role acts in the group.

        `std`:            A_i = (r_i - mean(r)) / (s + epsilon)
        `population_std`: the same with n instead of n - 1 in s
        `none`:           A_i = r_i - mean(r)

        mean(r) = sum_j w_j r_j / n;  s = sqrt(sum_j w_j (r_j - mean(r))^2 / (n - 1))
        w_j: weight of trajectory j in its episode; 1 if the role has only that trajectory there.
        If a role has a single trajectory in the group, its advantage is `UNCOMPARED`.
        """
        return without_lone(facts, relative_rewards(facts, scale=self.scale, epsilon=self.epsilon).tolist())


class RlooCredit(Config):
    """Reward minus the mean of the other members of the group, per role (RLOO, arXiv:2402.14740)."""

    name: Literal["rloo"] = "rloo"

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """A_i = r_i - mean of the other episodes' rewards, within a role (eq. 8).

        The baseline of an episode does not depend on that episode, so it is unbiased. An episode's reward is
        the weighted mean of its trajectories' rewards. The only episode of a role is `UNCOMPARED`.
        """
        advantages_N = np.zeros(len(facts.trajectories))
        for members in by_role(facts):
            num = members.num_episodes
            if num < 2:
                continue
            values_E = members.episode_rewards()
            # R_e - mean of the others = (R_e - mean of all) * n / (n - 1), without a loop over episodes.
            excess_E = centered_values(values_E, np.ones(num)) * num / (num - 1)
            beyond_episode = members.rewards - values_E[members.episodes]
            if are_equal(members.rewards):
                continue
            advantages_N[members.positions] = beyond_episode + excess_E[members.episodes]
        return without_lone(facts, advantages_N.tolist())


class RoleBalancedCredit(Config):
    """Compares several roles with each other, and gives each role the same weight, however often it occurs.
    Designed for a verifier whose verdicts on right and on wrong answers are separate roles."""

    name: Literal["role_balanced"] = "role_balanced"
    roles: tuple[str, ...] = Field(default=("verifier_of_right", "verifier_of_wrong"), min_length=2)
    """Roles that are compared with each other; in a group that lacks one of them, the others aren't trained.
    Every other role is compared only with itself."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """One advantage per trajectory. K: number of named roles; n_k: episodes with role k; n: sum of n_k.

        m = mean over k of the mean over the episodes of role k;  A_i = n / (K n_k) (r_i - m) for i of role k

        The weights sum to n. A policy that cannot tell the roles apart gains nothing by guessing the more
        frequent one: a gain for one role is an equal loss for the others. If a group lacks one of the named
        roles, the others are `UNCOMPARED`. Roles that are not named are compared with themselves.
        """
        advantages_N = np.zeros(len(facts.trajectories))
        roles_present = {members.role: members for members in by_role(facts)}
        has_all = all(role in roles_present for role in self.roles)
        for role, members in roles_present.items():
            if role not in self.roles:
                advantages_N[members.positions] = relative_values(
                    members.rewards, members.weights, scale="none", epsilon=0.0
                )
        chosen = [roles_present[role] for role in self.roles] if has_all else []
        if chosen and not are_equal(np.concatenate([members.rewards for members in chosen])):
            mean = np.mean([members.episode_rewards().mean() for members in chosen])
            num = sum(members.num_episodes for members in chosen)
            for members in chosen:
                weight = num / (len(self.roles) * members.num_episodes)
                advantages_N[members.positions] = weight * (members.rewards - mean)
        compared = without_lone(facts, advantages_N.tolist())
        return tuple(
            compared[i] if t.role not in self.roles else float(advantages_N[i]) if has_all else UNCOMPARED
            for i, t in enumerate(facts.trajectories)
        )


class MaxRlCredit(Config):
    """Reward minus the mean of the group, divided by that mean, per role (MaxRL, arXiv:2602.02710); hard
    tasks weigh more."""

    name: Literal["max_rl"] = "max_rl"
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the mean."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """A_i = (r_i - mean(r)) / (mean(r) + epsilon) within a role; `UNCOMPARED` if mean(r) <= 0 or
        it has one episode.

        The mean is over episodes. For rewards 0 and 1 with K of N answers right, this is the mean gradient
        over the right answers only, minus a baseline. It is an unbiased estimate of the gradient of the
        likelihood, truncated at order N (Tajwar et al. 2026). A task with pass rate p weighs 1/p.
        """
        advantages: list[float] = [UNCOMPARED] * len(facts.trajectories)
        for members in by_role(facts):
            mean = members.episode_rewards().mean()
            if members.num_episodes > 1 and mean > 0:
                excess = 0.0 if are_equal(members.rewards) else members.rewards - mean
                own = np.broadcast_to(excess / (mean + self.epsilon), members.rewards.shape)
                for i, advantage in zip(members.positions, own.tolist(), strict=True):
                    advantages[i] = advantage
        return tuple(advantages)


class OpoCredit(Config):
    """Reward minus the mean reward weighted by length, per role (OPO, arXiv:2505.23585)."""

    name: Literal["opo"] = "opo"

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """A_i = r_i - b, b = sum_j |y_j| r_j / sum_j |y_j| within a role, |y_j| the trained tokens.

        This baseline has the least variance if the squared norm of a trajectory's gradient is proportional to
        its length. Forks share their episode's tokens, so they do not change it. A single trajectory
        is `UNCOMPARED`.
        Source: Hao et al. 2025 (arXiv:2505.23585); the formula as in public implementations.
        """
        advantages_N = np.zeros(len(facts.trajectories))
        lengths_N = np.asarray([t.num_trained_tokens for t in facts.trajectories], dtype=np.float64)
        for members in by_role(facts):
            lengths = lengths_N[members.positions]
            if len(lengths) > 1 and lengths.sum() > 0:
                advantages_N[members.positions] = centered_values(members.rewards, lengths)
        return without_lone(facts, advantages_N.tolist())


class PassAtKCredit(Config):
    """How much an answer adds to the best of k answers (arXiv:2508.10751). Designed for exploration, where
    one right answer out of several is enough."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=2, ge=1)
    """Number of answers; one of them must be right. Less than `group_size`."""
    right_above: float = 0.5
    """Reward above which an answer counts as right."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """The mean advantage of an episode over all sets of k of the role's N episodes, R of them wrong.

        m = 1 - C(R, k) / C(N, k),  s = sqrt(m (1 - m))
        right: A = (1 - m) / (s + epsilon)
        wrong: A = (1 - m - C(R - 1, k - 1) / C(N - 1, k - 1)) / (s + epsilon)

        An episode is right if its reward is above `right_above`. A set of k passes if at least one of its
        episodes is right. All trajectories of an episode get its advantage, which is 0 if s is 0, and
        `UNCOMPARED` if the role has fewer than k episodes.
        Source: Chen et al. 2025 (arXiv:2508.10751), section 2.4, analytic derivation.
        """
        k = self.k
        advantages: list[float] = [UNCOMPARED] * len(facts.trajectories)
        for members in by_role(facts):
            is_right_E = members.episode_rewards() > self.right_above
            num = members.num_episodes
            num_wrong = int((~is_right_E).sum())
            if num < k:
                continue
            mean = 1 - math.comb(num_wrong, k) / math.comb(num, k)
            deviation = math.sqrt(mean * (1 - mean))
            values_E = np.zeros(num)
            if deviation > 0:
                right = 1 - mean
                wrong = right - math.comb(num_wrong - 1, k - 1) / math.comb(num - 1, k - 1)
                values_E = np.where(is_right_E, right, wrong) / (deviation + self.epsilon)
            for i, advantage in zip(members.positions, values_E[members.episodes].tolist(), strict=True):
                advantages[i] = advantage
        return tuple(advantages)


class ReinforcePlusPlusCredit(Config):
    """The reward itself, whitened over the batch (REINFORCE++, arXiv:2501.03262)."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Literal["none", "group"] = "none"
    """`group`: subtract the mean of the group first (REINFORCE++-baseline)."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """`none`: A_i = r_i; `group`: A_i = r_i - mean(r) within a role, the mean over episodes;
        `UNCOMPARED` if the role has a single trajectory.

        The table then whitens the advantages over the trained tokens of the batch, whatever `normalize` says.
        The paper's KL term is not included: the trainer adds it.
        """
        if self.baseline == "none":
            return tuple(t.reward for t in facts.trajectories)
        return without_lone(facts, relative_rewards(facts, scale="none", epsilon=0.0).tolist())


class GdpoCredit(Config):
    """Several rewards, each made relative to its own mean and deviation in the group before they are added
    up; then whitened over the batch (GDPO, arXiv:2601.05242)."""

    name: Literal["gdpo"] = "gdpo"
    rewards: dict[str, float] = Field(default={"reward": 1.0}, min_length=1)
    """Reward -> weight. `reward` is the trajectory's reward; any other name is a metric of the episode, which
    every episode must have."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviations."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """A_i = sum_k weight_k (r_ki - mean(r_k)) / (s_k + epsilon), within a role.

        mean and s (sample deviation) are as in `group_relative`. A reward that is equal in all episodes adds
        0, and the scale of a reward does not matter. So large or frequent rewards do not drown out small or
        rare ones, as they would if rewards were summed first. The table then whitens the advantages over the
        trained tokens of the batch, whatever `normalize` says. The only trajectory of a role is
        `UNCOMPARED`.
        Raises: DataError if an episode lacks a metric.
        Source: Liu et al. 2026: group-wise normalization per reward, weighted sum, batch-wise normalization.
        """
        advantages_N = np.zeros(len(facts.trajectories))
        for name, weight in self.rewards.items():
            values_N = np.asarray(
                [_find_reward(facts, t, name) for t in facts.trajectories], dtype=np.float64
            )
            for members in by_role(facts):
                values = relative_values(
                    values_N[members.positions], members.weights, scale="std", epsilon=self.epsilon
                )
                advantages_N[members.positions] += weight * values
        return without_lone(facts, advantages_N.tolist())


def _find_reward(facts: GroupFacts, trajectory: TrajectoryFacts, name: str) -> float:
    if name == "reward":
        return trajectory.reward
    metrics = facts.metrics.get(trajectory.episode_idx, {})
    if name not in metrics:
        raise DataError(
            f"episode {trajectory.episode_idx} has no metric {name!r}, which table.credit.rewards names; "
            f"the episode's metrics are: {', '.join(metrics) or 'none'}"
        )
    return metrics[name]


class RaeCredit(Config):
    """Reward minus a moving average of the earlier rewards of the same role and task source (role-conditioned
    advantage estimation, SPIRAL, arXiv:2506.24119). Designed for self-play, also with `group_size: 1`."""

    name: Literal["rae"] = "rae"
    decay: float = Field(default=0.95, ge=0, lt=1)
    """Factor on the moving average per episode; the newest reward has weight `1 - decay`."""

    def make(self) -> "RoleBaselines":
        """The credit with these settings, before its first group."""
        return RoleBaselines(self)


class RoleBaselines:
    """A_i = r_i - b, where b is the baseline of the role and task source before the group.

    Afterwards, b <- decay^E b + (1 - decay^E) m, with m the mean reward of the role's E episodes in the
    group. All baselines start at 0. For one episode this is the published rule, b <- decay b + (1 - decay) r.
    As in the authors' code, the baseline is read before it moves, so it does not depend on the rewards that
    it is subtracted from. The episodes of a group count as E equal ones, so their order does not matter.
    Source: Liu et al. 2025 (arXiv:2506.24119), role-conditioned advantage estimation.
    Example: decay 0.5, groups of one with rewards 1, 1 and -1: advantages 1, 0.5 and -1.75.
    """

    def __init__(self, settings: RaeCredit) -> None:
        self._decay = settings.decay
        self._baselines: dict[str, dict[str, float]] = {}
        """Source -> role -> baseline."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """Returns one advantage per trajectory, and then updates the baselines."""
        advantages_N = np.zeros(len(facts.trajectories))
        baselines = self._baselines.setdefault(facts.source, {})
        for members in by_role(facts):
            baseline = baselines.get(members.role, 0.0)
            advantages_N[members.positions] = members.rewards - baseline
            mean = float(members.episode_rewards().mean())
            decay = self._decay**members.num_episodes
            # The table drops a group beyond this bound, so its reward must not affect later groups.
            if abs(mean) <= MAX_ADVANTAGE:
                baselines[members.role] = decay * baseline + (1 - decay) * mean
        return tuple(advantages_N.tolist())

    def state(self) -> dict[str, Any]:
        """The baselines."""
        return {"baselines": self._baselines}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._baselines = {
            str(source): {str(role): float(baseline) for role, baseline in own.items()}
            for source, own in state["baselines"].items()
        }


class HierarchicalCredit(Config):
    """Compares heads over the group, and the workers of a head with each other. Designed for a proposer whose
    task several solvers attempt, and for a manager with workers."""

    name: Literal["hierarchical"] = "hierarchical"
    heads: tuple[str, ...] = Field(default=("proposer", "manager"), min_length=1)
    """Roles that decide what the other roles of their episode work on. They are compared over the group."""
    team_weight: float = Field(default=0.0, ge=0)
    """Weight of the comparison of an episode's workers, as a team, with those of other episodes. With 0,
    workers with equal rewards learn nothing."""
    scale: Scale = "std"
    """The same choices as in `group_relative`, applied to each comparison."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """One advantage per trajectory i of role k in episode e.

        head:   A_i as in `group_relative`
        worker: A_i = (r_i - m_e) / (s_e + epsilon) + team_weight * (m_e - m) / (s + epsilon)

        m_e, s_e: mean and deviation of the rewards of role k in episode e, weighted by trained tokens so that
        forks do not change them; the deviation divides by n, even for `std`. m, s: mean and deviation of the
        m_e over the group's episodes.
        Workers of different heads work on different tasks, so their rewards can't be compared directly: a
        solver with an easy task is not better than one with a hard task. If a worker is alone in its episode,
        its first term is 0, and its advantage is `UNCOMPARED` without a second term.
        Source: ours, after Absolute Zero (arXiv:2505.03335), which has baselines per role and kind of task,
        and GiGPO (arXiv:2505.10978, eq. 8), which adds the comparisons of two levels.
        """
        advantages = list(
            without_lone(facts, relative_rewards(facts, scale=self.scale, epsilon=self.epsilon).tolist())
        )
        weights_N = np.asarray(facts.weights)
        rewards_N = np.asarray([t.reward for t in facts.trajectories], dtype=np.float64)
        crews: dict[str, dict[int, list[int]]] = {}
        for i, trajectory in enumerate(facts.trajectories):
            if trajectory.role not in self.heads:
                crews.setdefault(trajectory.role, {}).setdefault(trajectory.episode_idx, []).append(i)
        for crew_of in crews.values():
            means_E = np.asarray(
                [np.average(rewards_N[crew], weights=weights_N[crew]) for crew in crew_of.values()]
            )
            teams_E = self._relative(means_E, np.ones(len(means_E)))
            has_teams = self.team_weight > 0 and len(crew_of) > 1
            for crew, team in zip(crew_of.values(), teams_E, strict=True):
                values = self._relative(rewards_N[crew], weights_N[crew]) + self.team_weight * team
                is_compared = has_teams or len(crew) > 1
                for i, value in zip(crew, values.tolist(), strict=True):
                    advantages[i] = value if is_compared else UNCOMPARED
        return tuple(advantages)

    def _relative(self, values: Floats, weights: Floats) -> Floats:
        return relative_values(values, weights, scale=self.scale, epsilon=self.epsilon)


CreditConfig = Annotated[
    GroupRelativeCredit
    | RlooCredit
    | RoleBalancedCredit
    | MaxRlCredit
    | OpoCredit
    | PassAtKCredit
    | ReinforcePlusPlusCredit
    | TurnDiscountCredit
    | GigpoCredit
    | GaeCredit
    | GdpoCredit
    | RaeCredit
    | HierarchicalCredit
    | Use,
    Field(discriminator="name"),
]


def make_credit(config: CreditConfig) -> Credit:
    """Makes the credit of a table. Raises: ConfigError if the user's own function can't be used."""
    match config:
        case Use():
            return load_own_function(config, where="table.credit")
        case RaeCredit():
            return config.make()
        case _:
            return config

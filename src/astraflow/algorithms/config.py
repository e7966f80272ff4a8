"""Data algorithms of a recipe: curators, filters and credit. One class per variant."""
# size: a catalogue, one class per variant; splitting it by kind would hide that it is one choice

from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use

__all__ = [
    "CreditConfig",
    "CuratorConfig",
    "CurriculumConfig",
    "FilterConfig",
    "FollowingConfig",
    "GaeConfig",
    "GigpoConfig",
    "GresoConfig",
    "GresoFloorsConfig",
    "GroupRelativeConfig",
    "LengthFilterConfig",
    "LengthRewardConfig",
    "MaxRlConfig",
    "OpoConfig",
    "OverlongConfig",
    "PassAtKCreditConfig",
    "PriorityConfig",
    "ReinforcePlusPlusConfig",
    "RepetitionConfig",
    "RewardRangeConfig",
    "RlooConfig",
    "RoleBalancedConfig",
    "ShapingConfig",
    "ShuffleConfig",
    "SolvedConfig",
    "TruncatedConfig",
    "TurnDiscountConfig",
    "WeightedConfig",
    "ZeroVarianceConfig",
]


class ShuffleConfig(Config):
    """Draws every task once per epoch, in an order that depends on the run's seed and the epoch."""

    name: Literal["shuffle"] = "shuffle"


class WeightedConfig(Config):
    """Draws from the task sources in proportion to given weights, whatever their sizes; within a source as
    `shuffle`."""

    name: Literal["weighted"] = "weighted"
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Source -> weight; a source that is not named has weight 1."""


class FollowingConfig(Config):
    """Base of the curators that follow the outcomes of a policy."""

    policy: str = ""
    """Policy whose rewards count; empty: the scores of the episodes count."""


class SolvedConfig(FollowingConfig):
    """Passes over tasks that are nearly always solved."""

    name: Literal["solved"] = "solved"
    threshold: float = Field(default=0.95, gt=0, le=1)
    """Moving pass rate at or above which a task counts as solved."""
    min_visits: int = Field(default=2, ge=1)
    """Number of groups that a task must have had before it can count as solved."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in the moving pass rate."""
    revisit: float = Field(default=0.05, ge=0, le=1)
    """Probability that a solved task is drawn anyway, so that forgetting is noticed."""


class CurriculumConfig(FollowingConfig):
    """Prefers tasks near a target difficulty, which rises while the policy does well (after AdaRFT,
    arXiv:2504.05520)."""

    name: Literal["curriculum"] = "curriculum"
    start: float = Field(default=0.0, ge=0, le=1)
    """Initial target difficulty, where difficulty is 1 - pass rate."""
    goal: float = Field(default=0.5, ge=0, le=1)
    """Mean pass rate at which the target stays where it is."""
    rate: float = Field(default=0.05, gt=0)
    """Largest change of the target per version."""
    sharpness: float = Field(default=2.0, gt=0)
    """Steepness of the target's response to the distance from the goal."""
    width: float = Field(default=0.25, gt=0)
    """Distance from the target at which a task is drawn with probability exp(-1/2)."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """Smallest probability with which any task is drawn."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in the moving pass rate."""


class PriorityConfig(FollowingConfig):
    """Draws tasks in proportion to their learnability p (1 - p), where p is the pass rate
    (arXiv:2408.15099)."""

    name: Literal["priority"] = "priority"
    exponent: float = Field(default=1.0, ge=0)
    """Power of the learnability: 0 treats all tasks alike; larger values prefer the most learnable ones."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Smallest probability with which any task is drawn."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in the moving learnability."""


class GresoConfig(FollowingConfig):
    """Passes over tasks whose last groups had rewards without variance (GRESO, arXiv:2506.02177)."""

    name: Literal["greso"] = "greso"
    target_easy: float = Field(default=0.25 / 3, ge=0, le=1)
    """Target share of groups with only right answers; below it, easy tasks are drawn more often."""
    target_hard: float = Field(default=0.5 / 3, ge=0, le=1)
    """Target share of groups with only wrong answers; below it, hard tasks are drawn more often."""
    start_p: float = Field(default=0.5, gt=0, le=1)
    """Initial value of p for easy and for hard tasks; a task is drawn with probability p^z after z groups in
    a row without variance."""
    delta: float = Field(default=0.01, ge=0)
    """Change of p per version, from the second epoch on."""
    min_p: float = Field(default=0.05, gt=0, le=1)
    """Smallest value of p."""
    max_p: float = Field(default=0.95, gt=0, le=1)
    """Largest value of p."""
    floor_easy: float = Field(default=0.01, gt=0, le=1)
    """Smallest probability with which an easy task is drawn."""
    floor_hard: float = Field(default=0.01, gt=0, le=1)
    """Smallest probability with which a hard task is drawn."""
    easy_above: float = 0.5
    """Mean reward above which a group without variance counts as easy; otherwise it counts as hard."""


class GresoFloorsConfig(GresoConfig):
    """The same as `greso`, with the higher floors of the AstraFlow recipes."""

    name: Literal["greso_floors"] = "greso_floors"  # pyright: ignore[reportIncompatibleVariableOverride] - tag
    target_easy: float = Field(default=0.083, ge=0, le=1)
    """Target share of groups with only right answers; below it, easy tasks are drawn more often."""
    target_hard: float = Field(default=0.167, ge=0, le=1)
    """Target share of groups with only wrong answers; below it, hard tasks are drawn more often."""
    floor_easy: float = Field(default=0.10, gt=0, le=1)
    """Smallest probability with which an easy task is drawn."""
    floor_hard: float = Field(default=0.40, gt=0, le=1)
    """Smallest probability with which a hard task is drawn."""


CuratorConfig = Annotated[
    ShuffleConfig
    | WeightedConfig
    | SolvedConfig
    | CurriculumConfig
    | PriorityConfig
    | GresoConfig
    | GresoFloorsConfig
    | Use,
    Field(discriminator="name"),
]


class ZeroVarianceConfig(Config):
    """Drops groups whose rewards are all equal, because they carry no gradient (dynamic sampling,
    arXiv:2503.14476)."""

    name: Literal["zero_variance"] = "zero_variance"
    epsilon: float = Field(default=1e-6, ge=0)
    """Largest difference between rewards that count as equal."""


class LengthFilterConfig(Config):
    """Drops groups in which too many trajectories are too short or too long."""

    name: Literal["length"] = "length"
    min_tokens: int = Field(default=1, ge=0)
    """Smallest number of trained tokens of a trajectory."""
    max_tokens: int = Field(default=1_000_000, ge=1)
    """Largest number of trained tokens of a trajectory."""
    max_frac: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the group that may be outside these bounds."""


class TruncatedConfig(Config):
    """Drops groups in which too many trajectories hit the token limit, or removes only those trajectories
    from the comparison."""

    name: Literal["truncated"] = "truncated"
    action: Literal["drop", "mask"] = "drop"
    """`drop`: drop the group. `mask`: keep it, give truncated trajectories advantage 0, and compare the
    others without them (overlong filtering, arXiv:2503.14476)."""
    max_frac: float = Field(default=0.5, ge=0, le=1)
    """With `drop`, largest share of the group that may be truncated."""


class RepetitionConfig(Config):
    """Drops groups in which too many trajectories repeat themselves."""

    name: Literal["repetition"] = "repetition"
    max_repeated: float = Field(default=0.5, ge=0, le=1)
    """Largest share of a trajectory's 8-grams of sampled tokens that may have occurred earlier in it."""
    max_frac: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the group that may repeat itself more than that."""


class RewardRangeConfig(Config):
    """Keeps only groups whose mean reward lies within bounds (arXiv:2504.03380)."""

    name: Literal["reward_range"] = "reward_range"
    low: float = 0.1
    """Smallest mean reward."""
    high: float = 0.9
    """Largest mean reward."""


FilterConfig = Annotated[
    ZeroVarianceConfig | LengthFilterConfig | TruncatedConfig | RepetitionConfig | RewardRangeConfig | Use,
    Field(discriminator="name"),
]


class OverlongConfig(Config):
    """Penalizes trajectories softly as they approach the token limit (DAPO, arXiv:2503.14476, eq. 13)."""

    name: Literal["overlong"] = "overlong"
    max_tokens: int = Field(default=20_480, ge=1)
    """Number of trained tokens from which a trajectory gets the full penalty."""
    cache_tokens: int = Field(default=4_096, ge=1)
    """Number of tokens below `max_tokens` over which the penalty grows from 0."""
    weight: float = Field(default=1.0, ge=0)
    """Size of the full penalty."""


class LengthRewardConfig(Config):
    """Rewards the shorter trajectories of a group and penalizes the longer ones (Kimi k1.5,
    arXiv:2501.12599)."""

    name: Literal["length"] = "length"
    weight: float = Field(default=0.1, ge=0)
    """Weight of the bonus, which lies within [-0.5, 0.5]."""
    right_above: float = 0.5
    """Reward above which a trajectory counts as right; a wrong one can only be penalized."""


ShapingConfig = Annotated[OverlongConfig | LengthRewardConfig | Use, Field(discriminator="name")]


class GroupRelativeConfig(Config):
    """Reward minus the mean of the group, per role; optionally divided by the standard deviation (GRPO,
    arXiv:2402.03300)."""

    name: Literal["group_relative"] = "group_relative"
    scale: Literal["std", "population_std", "none"] = "std"
    """`std`: divide by the sample standard deviation (n - 1) plus `epsilon`. `population_std`: the same with
    n. `none`: do not divide (Dr. GRPO, arXiv:2503.20783)."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class RlooConfig(Config):
    """Reward minus the mean of the other members of the group, per role (RLOO, arXiv:2402.14740)."""

    name: Literal["rloo"] = "rloo"


class RoleBalancedConfig(Config):
    """Compares several roles with one another and gives each the same weight, however often it occurs. Made
    for a verifier whose verdicts on right and on wrong answers are roles of their own."""

    name: Literal["role_balanced"] = "role_balanced"
    roles: tuple[str, ...] = Field(default=("verifier_of_right", "verifier_of_wrong"), min_length=2)
    """Roles that are compared with one another; a group that lacks one of them gives them no advantage. Every
    other role is compared with itself only."""


class MaxRlConfig(Config):
    """Reward minus the mean of the group, divided by that mean, per role (MaxRL, arXiv:2602.02710); hard
    tasks weigh more."""

    name: Literal["max_rl"] = "max_rl"
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the mean."""


class OpoConfig(Config):
    """Reward minus the mean reward weighted by length, per role (OPO, arXiv:2505.23585)."""

    name: Literal["opo"] = "opo"


class PassAtKCreditConfig(Config):
    """How much an answer adds to the best of k answers (arXiv:2508.10751). Made for exploration, where one
    right answer out of several is enough."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=2, ge=1)
    """Number of answers of which one must be right; less than `group_size`."""
    right_above: float = 0.5
    """Reward above which an answer counts as right."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class ReinforcePlusPlusConfig(Config):
    """The reward itself, whitened over the batch (REINFORCE++, arXiv:2501.03262)."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Literal["none", "group"] = "none"
    """`group`: subtract the mean of the group first (REINFORCE++-baseline)."""


class TurnDiscountConfig(Config):
    """The discounted return of each turn, relative to all turns of its role in the group."""

    name: Literal["turn_discount"] = "turn_discount"
    discount: float = Field(default=0.95, gt=0, le=1)
    """Factor on a reward per turn of delay."""
    scale: Literal["std", "population_std", "none"] = "std"
    """The same choices as in `group_relative`."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class GigpoConfig(Config):
    """Compares whole episodes, and turns that saw the same state (GiGPO, arXiv:2505.10978)."""

    name: Literal["gigpo"] = "gigpo"
    step_weight: float = Field(default=1.0, ge=0)
    """Weight of the comparison between turns."""
    discount: float = Field(default=0.95, gt=0, le=1)
    """Factor on a reward per turn of delay."""
    scale: Literal["std", "population_std", "none"] = "std"
    """The same choices as in `group_relative`, applied to both comparisons."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class GaeConfig(Config):
    """Passes the rewards of turns on unchanged; the critic of `train.auxiliary.critic` turns them into
    advantages (GAE, arXiv:1506.02438)."""

    name: Literal["gae"] = "gae"


CreditConfig = Annotated[
    GroupRelativeConfig
    | RlooConfig
    | RoleBalancedConfig
    | MaxRlConfig
    | OpoConfig
    | PassAtKCreditConfig
    | ReinforcePlusPlusConfig
    | TurnDiscountConfig
    | GigpoConfig
    | GaeConfig
    | Use,
    Field(discriminator="name"),
]

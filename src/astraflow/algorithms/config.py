"""Data algorithms of a recipe: curators, filters, credit and samplers. One class a variant."""
# size: a catalogue, a class a variant

# size: a catalogue, one class a variant; splitting it by kind would hide that a recipe chooses from all of it

from typing import Annotated, Literal

from pydantic import Field

from astraflow.config import Config, Use

__all__ = [
    "CapacityConfig",
    "CreditConfig",
    "CuratorConfig",
    "CurriculumConfig",
    "EdfConfig",
    "FifoConfig",
    "FilterConfig",
    "FollowingConfig",
    "GaeConfig",
    "GigpoConfig",
    "GresoConfig",
    "GresoFloorsConfig",
    "GroupRelativeConfig",
    "KeepConfig",
    "LengthFilterConfig",
    "LengthRewardConfig",
    "MaxRlConfig",
    "OnPolicyConfig",
    "OpoConfig",
    "OverlongConfig",
    "PassAtKCreditConfig",
    "PriorityConfig",
    "ReinforcePlusPlusConfig",
    "RemoverConfig",
    "RepetitionConfig",
    "ReplayConfig",
    "RewardRangeConfig",
    "RlooConfig",
    "RoleBalancedConfig",
    "SamplerConfig",
    "ShapingConfig",
    "ShuffleConfig",
    "SolvedConfig",
    "SweepConfig",
    "TruncatedConfig",
    "TurnDiscountConfig",
    "WeightedConfig",
    "WindowConfig",
    "ZeroVarianceConfig",
]


class ShuffleConfig(Config):
    """Every task once an epoch, in an order that depends on the run's seed and the epoch."""

    name: Literal["shuffle"] = "shuffle"


class WeightedConfig(Config):
    """Task sources in proportion to weights, whatever their sizes; within a source as `shuffle`."""

    name: Literal["weighted"] = "weighted"
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Source -> weight; a source that is not named has weight 1."""


class FollowingConfig(Config):
    """Of curators that follow a policy's outcomes."""

    policy: str = ""
    """Whose rewards count; empty: the episodes' scores."""


class SolvedConfig(FollowingConfig):
    """Passes over tasks that are solved nearly always."""

    name: Literal["solved"] = "solved"
    threshold: float = Field(default=0.95, gt=0, le=1)
    """Moving pass rate from which a task counts as solved."""
    min_visits: int = Field(default=2, ge=1)
    """Groups that a task must have had."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Of the newest group in the moving pass rate."""
    revisit: float = Field(default=0.05, ge=0, le=1)
    """Chance that a solved task is drawn nevertheless, so that forgetting shows."""


class CurriculumConfig(FollowingConfig):
    """Tasks near a target difficulty that rises while the policy does well (after AdaRFT,
    arXiv:2504.05520)."""

    name: Literal["curriculum"] = "curriculum"
    start: float = Field(default=0.0, ge=0, le=1)
    """First target difficulty, 1 - pass rate."""
    goal: float = Field(default=0.5, ge=0, le=1)
    """Mean pass rate at which the target stays."""
    rate: float = Field(default=0.05, gt=0)
    """Largest change of the target a version."""
    sharpness: float = Field(default=2.0, gt=0)
    """Of the target's response to the distance from the goal."""
    width: float = Field(default=0.25, gt=0)
    """Distance from the target at which a task is drawn with chance exp(-1/2)."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """Least chance of any task."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Of the newest group in the moving pass rate."""


class PriorityConfig(FollowingConfig):
    """Tasks in proportion to their learnability p (1 - p) (arXiv:2408.15099)."""

    name: Literal["priority"] = "priority"
    exponent: float = Field(default=1.0, ge=0)
    """0: all alike; larger: the most learnable ones only."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Least chance of any task."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Of the newest group in the moving learnability."""


class GresoConfig(FollowingConfig):
    """Passes over tasks whose last groups had no variance (GRESO, arXiv:2506.02177)."""

    name: Literal["greso"] = "greso"
    target_easy: float = Field(default=0.25 / 3, ge=0, le=1)
    """Share of groups that are all right, below which easy tasks come more often."""
    target_hard: float = Field(default=0.5 / 3, ge=0, le=1)
    """Share of groups that are all wrong, below which hard tasks come more often."""
    start_p: float = Field(default=0.5, gt=0, le=1)
    """First base of the chance to be drawn, p^z, of easy and of hard tasks."""
    delta: float = Field(default=0.01, ge=0)
    """Change of p per version, from the second epoch on."""
    min_p: float = Field(default=0.05, gt=0, le=1)
    """Least p."""
    max_p: float = Field(default=0.95, gt=0, le=1)
    """Greatest p."""
    floor_easy: float = Field(default=0.01, gt=0, le=1)
    """Least chance of an easy task."""
    floor_hard: float = Field(default=0.01, gt=0, le=1)
    """Least chance of a hard task."""
    easy_above: float = 0.5
    """Mean reward above which a group without variance is easy."""


class GresoFloorsConfig(GresoConfig):
    """`greso` with the higher floors of the AstraFlow recipes."""

    name: Literal["greso_floors"] = "greso_floors"  # pyright: ignore[reportIncompatibleVariableOverride] - tag
    target_easy: float = Field(default=0.083, ge=0, le=1)
    """Share of groups that are all right, below which easy tasks come more often."""
    target_hard: float = Field(default=0.167, ge=0, le=1)
    """Share of groups that are all wrong, below which hard tasks come more often."""
    floor_easy: float = Field(default=0.10, gt=0, le=1)
    """Least chance of an easy task."""
    floor_hard: float = Field(default=0.40, gt=0, le=1)
    """Least chance of a hard task."""


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
    """Drops groups whose rewards are all equal: they carry no gradient (dynamic sampling,
    arXiv:2503.14476)."""

    name: Literal["zero_variance"] = "zero_variance"
    epsilon: float = Field(default=1e-6, ge=0)
    """Largest difference of rewards that counts as equal."""


class LengthFilterConfig(Config):
    """Drops groups in which many trajectories are too short or too long."""

    name: Literal["length"] = "length"
    min_tokens: int = Field(default=1, ge=0)
    """Least trained tokens of a trajectory."""
    max_tokens: int = Field(default=1_000_000, ge=1)
    """Most trained tokens of a trajectory."""
    max_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of the group that may be outside."""


class TruncatedConfig(Config):
    """Drops groups in which many trajectories hit the token limit, or gives just those no advantage."""

    name: Literal["truncated"] = "truncated"
    action: Literal["drop", "mask"] = "drop"
    """`mask`: truncated trajectories get advantage 0, and the others are compared without them (overlong
    filtering, arXiv:2503.14476)."""
    max_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of the group that may be truncated, for `drop`."""


class RepetitionConfig(Config):
    """Drops groups in which many trajectories repeat themselves."""

    name: Literal["repetition"] = "repetition"
    max_repeated: float = Field(default=0.5, ge=0, le=1)
    """Share of a trajectory's 8-grams of sampled tokens that may have come before in it."""
    max_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of the group that may be above that."""


class RewardRangeConfig(Config):
    """Keeps groups of a mean reward within bounds (arXiv:2504.03380)."""

    name: Literal["reward_range"] = "reward_range"
    low: float = 0.1
    """Least mean reward."""
    high: float = 0.9
    """Greatest mean reward."""


FilterConfig = Annotated[
    ZeroVarianceConfig | LengthFilterConfig | TruncatedConfig | RepetitionConfig | RewardRangeConfig | Use,
    Field(discriminator="name"),
]


class OverlongConfig(Config):
    """Soft punishment of the last tokens before the limit (DAPO, arXiv:2503.14476, eq. 13)."""

    name: Literal["overlong"] = "overlong"
    max_tokens: int = Field(default=20_480, ge=1)
    """Trained tokens of a trajectory that are punished in full."""
    cache_tokens: int = Field(default=4_096, ge=1)
    """Tokens below `max_tokens` over which the punishment grows."""
    weight: float = Field(default=1.0, ge=0)
    """Full punishment."""


class LengthRewardConfig(Config):
    """A bonus for the shorter ones of a group (Kimi k1.5, arXiv:2501.12599)."""

    name: Literal["length"] = "length"
    weight: float = Field(default=0.1, ge=0)
    """Of the bonus, which is within [-0.5, 0.5]."""
    right_above: float = 0.5
    """Reward above which a trajectory is right; others get no bonus, only the malus."""


ShapingConfig = Annotated[OverlongConfig | LengthRewardConfig | Use, Field(discriminator="name")]


class GroupRelativeConfig(Config):
    """Reward minus the group's mean, by role; optionally over its standard deviation (GRPO,
    arXiv:2402.03300)."""

    name: Literal["group_relative"] = "group_relative"
    scale: Literal["std", "population_std", "none"] = "std"
    """`std`: divide by the sample (n-1) standard deviation plus `epsilon`; `population_std`: with n; `none`:
    Dr. GRPO (arXiv:2503.20783)."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class RlooConfig(Config):
    """Reward minus the mean of the others, by role (RLOO, arXiv:2402.14740)."""

    name: Literal["rloo"] = "rloo"


class RoleBalancedConfig(Config):
    """Some roles compared with one another, each weighing as much as the others, however often it occurs: for
    a verifier whose verdicts on right and on wrong answers are roles of their own."""

    name: Literal["role_balanced"] = "role_balanced"
    roles: tuple[str, ...] = Field(default=("verifier_of_right", "verifier_of_wrong"), min_length=2)
    """Compared with one another; a group that lacks one of them gives no advantage. Others are compared with
    themselves."""


class MaxRlConfig(Config):
    """Reward minus the mean, over the mean, by role (MaxRL, arXiv:2602.02710): hard tasks weigh more."""

    name: Literal["max_rl"] = "max_rl"
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the mean."""


class OpoConfig(Config):
    """Reward minus the mean reward weighed by length, by role (OPO, arXiv:2505.23585)."""

    name: Literal["opo"] = "opo"


class PassAtKCreditConfig(Config):
    """How much an answer adds to the best of k answers (arXiv:2508.10751): for exploration, where one right
    answer of several is enough."""

    name: Literal["pass_at_k"] = "pass_at_k"
    k: int = Field(default=2, ge=1)
    """Answers of which one must be right; below `group_size`."""
    right_above: float = 0.5
    """Reward above which an answer is right."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class ReinforcePlusPlusConfig(Config):
    """Rewards, whitened over the batch (REINFORCE++, arXiv:2501.03262)."""

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    baseline: Literal["none", "group"] = "none"
    """`group`: subtract the group's mean first (REINFORCE++-baseline)."""


class TurnDiscountConfig(Config):
    """Each turn by its discounted return, relative to all turns of its role in the group."""

    name: Literal["turn_discount"] = "turn_discount"
    discount: float = Field(default=0.95, gt=0, le=1)
    """Of a reward, for each turn that it comes later."""
    scale: Literal["std", "population_std", "none"] = "std"
    """As for `group_relative`."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class GigpoConfig(Config):
    """Episodes compared, and turns that saw the same state (GiGPO, arXiv:2505.10978)."""

    name: Literal["gigpo"] = "gigpo"
    step_weight: float = Field(default=1.0, ge=0)
    """Of the comparison of turns."""
    discount: float = Field(default=0.95, gt=0, le=1)
    """Of a reward, for each turn that it comes later."""
    scale: Literal["std", "population_std", "none"] = "std"
    """As for `group_relative`, of both comparisons."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Added to the standard deviation."""


class GaeConfig(Config):
    """Rewards of turns as they are; the critic of `train.auxiliary.critic` makes advantages of them (GAE,
    arXiv:1506.02438)."""

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


class FifoConfig(Config):
    """Groups in the order in which they were drawn; worst staleness `tickets / groups_per_batch - 1 + L`."""

    name: Literal["fifo"] = "fifo"


class SweepConfig(Config):
    """Groups in the order in which they completed; those over `max_staleness` at take are dropped as
    stale."""

    name: Literal["sweep"] = "sweep"


class EdfConfig(Config):
    """Completed groups with the oldest tokens first; those over `max_staleness` at take are dropped as
    stale."""

    name: Literal["edf"] = "edf"


class WindowConfig(Config):
    """As `fifo`, but a slow group is passed over by those drawn soon after it; worst staleness `(tickets +
    span - 2) // groups_per_batch + L`, at most `max_staleness`."""

    name: Literal["window"] = "window"
    span: int = Field(default=128, ge=1)
    """Draws, counted from the oldest group that waits, among which a batch is found."""


class OnPolicyConfig(Config):
    """Only groups of the very version that is updated; needs `max_staleness: 0`."""

    name: Literal["on_policy"] = "on_policy"


SamplerConfig = Annotated[
    FifoConfig | SweepConfig | EdfConfig | WindowConfig | OnPolicyConfig, Field(discriminator="name")
]


class KeepConfig(Config):
    """Evicts nothing: the tickets bound how many groups wait."""

    name: Literal["keep"] = "keep"


class CapacityConfig(Config):
    """Evicts completed groups above a number; rollout goes on, and batches are of the freshest groups."""

    name: Literal["capacity"] = "capacity"
    num_groups: int = Field(default=128, ge=1)
    """Completed groups that may wait; at least `groups_per_batch`."""
    evict: Literal["oldest", "stalest"] = "stalest"
    """First drawn first, or oldest token first."""


RemoverConfig = Annotated[KeepConfig | CapacityConfig, Field(discriminator="name")]


class ReplayConfig(Config):
    """Groups that were trained on come again in later batches, beside the fresh ones; never above
    `max_staleness`."""

    ratio: float = Field(default=0.0, ge=0)
    """Replayed groups for each fresh one of a batch, at most; 0: no replay."""
    size: int = Field(default=256, ge=1)
    """Groups that are kept for it, the latest."""
    select: Literal["latest", "uniform", "priority"] = "uniform"
    """Newest tokens first, at random, or at random in proportion to the size of the advantages."""
    max_uses: int = Field(default=2, ge=2)
    """Steps that may train on one group, the first included."""
    reserve: int = Field(default=0, ge=0)
    """Versions of `max_staleness` that fresh groups leave to replayed ones, by fewer tickets."""

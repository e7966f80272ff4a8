"""Filters: decide which complete groups are trained on. Each is a config that is called with a group."""

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from astraflow.algorithms.group_statistics import ROUNDING, group_mean
from astraflow.algorithms.own import load_own_function
from astraflow.config import Config, Use
from astraflow.types.facts import GroupFacts, episode_weights

__all__ = [
    "Filter",
    "FilterConfig",
    "LengthFilter",
    "RepetitionFilter",
    "RewardRangeFilter",
    "TruncatedFilter",
    "ZeroVarianceFilter",
    "make_filter",
]

Filter = Callable[[GroupFacts], bool | str]
"""True keeps the group. False drops it, and so does a string, which is the reason."""


class ZeroVarianceFilter(Config):
    """Drops groups whose rewards are all equal, because they carry no gradient (dynamic sampling,
    arXiv:2503.14476)."""

    name: Literal["zero_variance"] = "zero_variance"
    epsilon: float = Field(default=1e-6, ge=0)
    """Largest difference between rewards that count as equal."""

    def __call__(self, facts: GroupFacts) -> bool:
        """Keeps a group if the rewards of at least one role differ by more than `epsilon`.

        Roles are checked separately, because credit compares trajectories within a role only.
        """
        lowest: dict[str, float] = {}
        highest: dict[str, float] = {}
        for trajectory in facts.trajectories:
            role = trajectory.role
            reward = trajectory.reward
            lowest[role] = min(reward, lowest.get(role, reward))
            highest[role] = max(reward, highest.get(role, reward))
        return any(highest[role] - lowest[role] > self.epsilon for role in lowest)


class LengthFilter(Config):
    """Drops groups in which too many trajectories are too short or too long."""

    name: Literal["length"] = "length"
    ordered_bounds: ClassVar = ("min_tokens", "max_tokens")
    min_tokens: int = Field(default=1, ge=0)
    """Smallest number of trained tokens of a trajectory."""
    max_tokens: int = Field(default=1_000_000, ge=1)
    """Largest number of trained tokens of a trajectory."""
    max_frac: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the group that may be outside these bounds."""

    def __call__(self, facts: GroupFacts) -> bool:
        """Keeps a group unless more than `max_frac` of it is outside [min_tokens, max_tokens]."""
        claims = [not self.min_tokens <= t.num_trained_tokens <= self.max_tokens for t in facts.trajectories]
        return _holds_for_few(facts, claims, self.max_frac)


class TruncatedFilter(Config):
    """Drops groups in which too many trajectories hit the token limit, or removes only those trajectories
    from the comparison."""

    name: Literal["truncated"] = "truncated"
    action: Literal["drop", "mask"] = "drop"
    """`drop`: drop the group. `mask`: keep it, but don't train truncated trajectories; the filters that
    follow, and credit, get the others alone (overlong filtering, arXiv:2503.14476)."""
    max_frac: float = Field(default=0.5, ge=0, le=1)
    """With `drop`, largest share of the group that may be truncated."""

    def __call__(self, facts: GroupFacts) -> bool:
        """Keeps a group unless more than `max_frac` of its trajectories hit the token limit.

        `mask`: keeps the group unless all trajectories hit the limit. The table then leaves truncated ones
        out, and compares the others among themselves (arXiv:2503.14476, section 3.4).
        """
        claims = [t.is_truncated for t in facts.trajectories]
        return not all(claims) if self.action == "mask" else _holds_for_few(facts, claims, self.max_frac)


class RepetitionFilter(Config):
    """Drops groups in which too many trajectories repeat themselves."""

    name: Literal["repetition"] = "repetition"
    max_repeated: float = Field(default=0.5, ge=0, le=1)
    """Largest share of a trajectory's 8-grams of sampled tokens that may have occurred earlier in it."""
    max_frac: float = Field(default=0.5, ge=0, le=1)
    """Largest share of the group that may exceed `max_repeated`."""

    def __call__(self, facts: GroupFacts) -> bool:
        """Keeps a group unless more than `max_frac` of its trajectories have a share of repeated 8-grams
        above `max_repeated`."""
        claims = [t.repeated_frac > self.max_repeated for t in facts.trajectories]
        return _holds_for_few(facts, claims, self.max_frac)


class RewardRangeFilter(Config):
    """Keeps only groups whose mean reward lies within bounds (arXiv:2504.03380)."""

    name: Literal["reward_range"] = "reward_range"
    ordered_bounds: ClassVar = ("low", "high")
    low: float = 0.1
    """Smallest mean reward."""
    high: float = 0.9
    """Largest mean reward."""

    def __call__(self, facts: GroupFacts) -> bool:
        """Keeps a group whose mean reward is within [low, high]."""
        return self.low <= group_mean(facts) <= self.high


FilterConfig = Annotated[
    ZeroVarianceFilter | LengthFilter | TruncatedFilter | RepetitionFilter | RewardRangeFilter | Use,
    Field(discriminator="name"),
]


def make_filter(config: FilterConfig) -> Filter:
    """Makes a filter of a table. Raises: ConfigError if the user's own function can't be used."""
    return load_own_function(config, where="table.filters") if isinstance(config, Use) else config


def _holds_for_few(facts: GroupFacts, claims: Sequence[bool], max_frac: float) -> bool:
    """Whether the claim holds for at most `max_frac` of the group.

    Each role of each episode weighs 1, divided equally among its trajectories.
    """
    episodes = [(t.episode_idx, t.role) for t in facts.trajectories]
    weights = episode_weights(episodes, [1] * len(episodes))
    claimed = sum(weight for weight, claim in zip(weights, claims, strict=True) if claim)
    return claimed <= max_frac * sum(weights) + ROUNDING

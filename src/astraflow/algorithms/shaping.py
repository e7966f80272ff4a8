"""Shaping: changes rewards by length, after the filters and before credit. Each variant is a config that is
called with a group.

Only credit receives the shaped rewards; filters, curators and reports use the original ones.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field

from astraflow.algorithms.group_statistics import by_role
from astraflow.algorithms.own import load_own_function
from astraflow.config import Config, Use
from astraflow.types.facts import GroupFacts

__all__ = ["LengthShaping", "OverlongShaping", "Shaping", "ShapingConfig", "make_shaping"]

Shaping = Callable[[GroupFacts], Sequence[float]]
"""Returns the new reward of each trajectory."""


class OverlongShaping(Config):
    """Penalizes trajectories softly as they approach the token limit (DAPO, arXiv:2503.14476, eq. 13)."""

    name: Literal["overlong"] = "overlong"
    ordered_bounds: ClassVar = ("cache_tokens", "max_tokens")
    max_tokens: int = Field(default=20_480, ge=1)
    """Number of trained tokens from which a trajectory gets the full penalty."""
    cache_tokens: int = Field(default=4_096, ge=1)
    """Number of tokens below `max_tokens` over which the penalty grows from 0; at most `max_tokens`."""
    weight: float = Field(default=1.0, ge=0)
    """Size of the full penalty."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """r + weight * R, where |y| is the number of trained tokens of the trajectory.

        R = 0                                                 if |y| <= max_tokens - cache_tokens
        R = (max_tokens - cache_tokens - |y|) / cache_tokens  up to |y| = max_tokens
        R = -1                                                above
        """
        free_tokens = self.max_tokens - self.cache_tokens
        return tuple(
            t.reward
            - self.weight * min(1.0, max(0.0, (t.num_trained_tokens - free_tokens) / self.cache_tokens))
            for t in facts.trajectories
        )


class LengthShaping(Config):
    """Rewards the shorter trajectories of a group and penalizes the longer ones (Kimi k1.5,
    arXiv:2501.12599)."""

    name: Literal["length"] = "length"
    weight: float = Field(default=0.1, ge=0)
    """Weight of the bonus, which lies within [-0.5, 0.5]."""
    right_above: float = 0.5
    """Reward above which a trajectory counts as right; a wrong one can only be penalized."""

    def __call__(self, facts: GroupFacts) -> tuple[float, ...]:
        """r + weight * l, within a role (section 2.3.3).

        l = 0.5 - (|y| - min) / (max - min) if the reward is above `right_above`, else min(0, that value);
        0 if all lengths are equal. |y|: trained tokens of the role in the whole episode, however many
        trajectories hold them.
        """
        shaped_N = np.asarray([t.reward for t in facts.trajectories], dtype=np.float64)
        lengths_N = np.asarray([t.num_trained_tokens for t in facts.trajectories], dtype=np.float64)
        for members in by_role(facts):
            lengths_E = np.bincount(members.episodes, weights=lengths_N[members.positions])
            spread = np.ptp(lengths_E)
            if spread == 0:
                continue
            bonus = (0.5 - (lengths_E - lengths_E.min()) / spread)[members.episodes]
            is_right = members.rewards > self.right_above
            shaped_N[members.positions] += self.weight * np.where(is_right, bonus, np.minimum(bonus, 0))
        return tuple(shaped_N.tolist())


ShapingConfig = Annotated[OverlongShaping | LengthShaping | Use, Field(discriminator="name")]


def make_shaping(config: ShapingConfig) -> Shaping:
    """Makes the shaping of a table. Raises: ConfigError if the user's own function can't be used."""
    return load_own_function(config, where="table.shaping") if isinstance(config, Use) else config

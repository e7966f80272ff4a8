"""Rewards as credit sees them: shaping by length, applied after the filters and before credit.

Filters, curators and the reported rewards see them unshaped.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from astraflow.algorithms.config import ShapingConfig
from astraflow.algorithms.relative import by_role
from astraflow.config import Use, check_args, load_attr
from astraflow.facts import GroupFacts

__all__ = ["SHAPING", "Shaping", "length_reward", "make_shaping", "overlong"]

Shaping = Callable[[GroupFacts], Sequence[float]]
"""The new reward of each trajectory."""


def make_shaping(config: ShapingConfig) -> Shaping:
    """The shaping of a config. Raises: ConfigError if the user's own cannot be loaded or called so."""
    if not isinstance(config, Use):
        return partial(SHAPING[config.name], **config.model_dump(exclude={"name"}))
    function: Callable[..., Sequence[float]] = load_attr(config.use, where="table.shaping.use")
    check_args(function, config.args, where="table.shaping.args")
    return partial(function, **config.args)


def overlong(
    facts: GroupFacts, *, max_tokens: int = 20_480, cache_tokens: int = 4_096, weight: float = 1.0
) -> tuple[float, ...]:
    """Soft overlong punishment: r + weight * R, |y| the trained tokens (arXiv:2503.14476, eq. 13).

    R = 0 if |y| <= max_tokens - cache_tokens; (max_tokens - cache_tokens - |y|) / cache_tokens up to
    max_tokens; -1 above.
    """
    over = [t.num_trained_tokens - (max_tokens - cache_tokens) for t in facts.trajectories]
    return tuple(
        t.reward - weight * min(1.0, max(0.0, tokens / cache_tokens))
        for t, tokens in zip(facts.trajectories, over, strict=True)
    )


def length_reward(facts: GroupFacts, *, weight: float = 0.1, right_above: float = 0.5) -> tuple[float, ...]:
    """Shorter is better: r + weight * l, within a role (Kimi k1.5, arXiv:2501.12599, section 2.3.3).

    l = 0.5 - (|y| - min) / (max - min) if the reward is above `right_above`, else min(0, that); 0 if all are
    of one length. |y|: trained tokens of the role in the whole episode, however many trajectories hold them.
    """
    shaped_N = np.asarray([t.reward for t in facts.trajectories], dtype=np.float64)
    lengths_N = np.asarray([t.num_trained_tokens for t in facts.trajectories], dtype=np.float64)
    for own in by_role(facts):
        lengths_E = np.bincount(own.episodes, weights=lengths_N[own.positions])
        if (spread := np.ptp(lengths_E)) > 0:
            bonus = (0.5 - (lengths_E - lengths_E.min()) / spread)[own.episodes]
            shaped_N[own.positions] += weight * np.where(
                own.rewards > right_above, bonus, np.minimum(bonus, 0)
            )
    return tuple(shaped_N.tolist())


SHAPING: dict[str, Callable[..., Sequence[float]]] = {"length": length_reward, "overlong": overlong}
"""Built-in shaping by name."""

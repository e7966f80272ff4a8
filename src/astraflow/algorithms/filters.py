"""Which completed groups are trained on: the choice of filters, and how one is built from its config."""

from collections.abc import Callable
from functools import partial

from astraflow.algorithms.config import FilterConfig
from astraflow.algorithms.group_limits import length, repetition, reward_range, truncated
from astraflow.algorithms.zero_variance import zero_variance
from astraflow.config import Use, check_args, load_attr
from astraflow.facts import GroupFacts

__all__ = ["FILTERS", "Filter", "make_filter"]

Filter = Callable[[GroupFacts], bool | str]
"""True keeps the group; False drops it, and so does a text, which is the reason."""


def make_filter(config: FilterConfig) -> Filter:
    """The filter of a config. Raises: ConfigError if the user's own cannot be loaded or called so."""
    if not isinstance(config, Use):
        return partial(FILTERS[config.name], **config.model_dump(exclude={"name"}))
    function: Callable[..., bool | str] = load_attr(config.use, where="table.filters.use")
    check_args(function, config.args, where="table.filters.args")
    return partial(function, **config.args)


FILTERS: dict[str, Callable[..., bool | str]] = {
    "length": length,
    "repetition": repetition,
    "reward_range": reward_range,
    "truncated": truncated,
    "zero_variance": zero_variance,
}
"""Built-in filters by name."""

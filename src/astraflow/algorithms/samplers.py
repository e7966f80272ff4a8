"""Which ready groups a batch takes: the choice of samplers, and how one is built from its config."""

from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from astraflow.algorithms.config import SamplerConfig
from astraflow.algorithms.edf import Edf
from astraflow.algorithms.fifo import Fifo
from astraflow.algorithms.on_policy import OnPolicy
from astraflow.algorithms.sweep import Sweep
from astraflow.algorithms.window import Window
from astraflow.protocols import Completed

__all__ = ["SAMPLERS", "Sampler", "make_sampler"]


class Sampler(Protocol):
    """Picks the groups of a batch, and states how stale they can be at worst."""

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, Completed], num_groups: int
    ) -> tuple[int, ...] | None:
        """The ids of the next batch's groups, or None if it is not there yet.

        `waiting`: all undecided groups that are in no batch, in draw order. `ready`: the completed ones
        among them, in completion order. Membership tests must be cheap (dict views are).
        """
        ...

    def worst_staleness(
        self, *, max_tickets: int, groups_per_batch: int, engine_lag: int, max_staleness: int
    ) -> int:
        """The worst staleness of a group at take."""
        ...


def make_sampler(config: SamplerConfig) -> Sampler:
    """The sampler of a config."""
    return SAMPLERS[config.name](**config.model_dump(exclude={"name"}))


SAMPLERS: dict[str, Callable[..., Sampler]] = {
    "edf": Edf,
    "fifo": Fifo,
    "on_policy": OnPolicy,
    "sweep": Sweep,
    "window": Window,
}
"""Built-in samplers by name."""

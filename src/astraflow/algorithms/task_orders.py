"""Curators that propose tasks in an order that outcomes do not change: `shuffle` and `weighted`."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from astraflow.algorithms.seeded import permute
from astraflow.config import Config
from astraflow.types.facts import Outcome

__all__ = ["Shuffle", "ShuffleConfig", "Weighted", "WeightedConfig"]


class ShuffleConfig(Config):
    """Draws every task once per epoch, in an order that depends on the run's seed and the epoch."""

    name: Literal["shuffle"] = "shuffle"


class WeightedConfig(Config):
    """Draws from the task sources in proportion to given weights, whatever their sizes; the order within a
    source is that of `shuffle`."""

    name: Literal["weighted"] = "weighted"
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Source -> weight; a source that is not named has weight 1."""


class Shuffle:
    """Draws every task once per epoch.

    Example: `Shuffle(num_tasks=3, seed=7)` gives e.g. 2, 0, 1, and then the next epoch's order, 0, 2, 1.
    """

    def __init__(self, *, num_tasks: int, seed: int) -> None:
        self._num_tasks = num_tasks
        self._seed = seed
        self._epoch = 0
        self._position = 0

    def next(self) -> int:
        """Index of the next task to draw."""
        task_idx = permute(self._position, size=self._num_tasks, seed=self._seed, epoch=self._epoch)
        self._position += 1
        if self._position == self._num_tasks:
            self._position = 0
            self._epoch += 1
        return task_idx

    def observe(self, outcome: Outcome) -> None:
        """Outcomes do not change the order."""

    def state(self) -> dict[str, Any]:
        """The epoch, and the position in it."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])


class Weighted:
    """Draws from the source that is furthest behind its share; within a source, in the order of `Shuffle`.

    After n draws, a source of weight w has had n * w / sum(weights) of them, give or take one.
    Example: sources `a` (10 tasks) and `b` (3 tasks) with weights 1 and 2 give b, a, b, b, a, b, ...
    """

    def __init__(self, *, sources: Mapping[str, int], weights: Mapping[str, float], seed: int) -> None:
        self._weights = {name: weights.get(name, 1.0) for name, size in sources.items() if size > 0}
        self._starts: dict[str, int] = {}
        start = 0
        for name, size in sources.items():
            self._starts[name] = start
            start += size
        self._orders = {name: Shuffle(num_tasks=sources[name], seed=seed) for name in self._weights}
        self._drawn = dict.fromkeys(self._weights, 0)

    def next(self) -> int:
        """Index of the next task to draw."""
        total = sum(self._weights.values())
        num = sum(self._drawn.values()) + 1
        name = max(self._weights, key=lambda n: self._weights[n] / total * num - self._drawn[n])
        self._drawn[name] += 1
        return self._starts[name] + self._orders[name].next()

    def observe(self, outcome: Outcome) -> None:
        """Outcomes do not change the mix."""

    def state(self) -> dict[str, Any]:
        """Number of draws and state of the order, for each source."""
        return {"drawn": self._drawn, "orders": {name: o.state() for name, o in self._orders.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._drawn = {name: int(state["drawn"][name]) for name in self._weights}
        for name, order in self._orders.items():
            order.restore(state["orders"][name])

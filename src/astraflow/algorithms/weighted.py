"""Curator `weighted`: task sources mixed by weight, whatever their sizes."""

from collections.abc import Mapping
from typing import Any

from astraflow.algorithms.shuffle import Shuffle
from astraflow.facts import Outcome

__all__ = ["Weighted"]


class Weighted:
    """Each draw goes to the source that is furthest behind its share; within a source, as `shuffle`.

    After n draws a source of weight w has had n * w / sum(weights) of them, give or take one.
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
        total, num = sum(self._weights.values()), sum(self._drawn.values()) + 1
        name = max(self._weights, key=lambda n: self._weights[n] / total * num - self._drawn[n])
        self._drawn[name] += 1
        return self._starts[name] + self._orders[name].next()

    def observe(self, outcome: Outcome) -> None:
        """Outcomes do not change the mix."""

    def state(self) -> dict[str, Any]:
        """Draws and order of each source."""
        return {"drawn": self._drawn, "orders": {name: o.state() for name, o in self._orders.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._drawn = {name: int(state["drawn"][name]) for name in self._weights}
        for name, order in self._orders.items():
            order.restore(state["orders"][name])

"""What curators remember of tasks, and their seeded chance. Nothing here is random: a chance is a hash of a
counter."""

from collections.abc import Mapping
from typing import Any

import xxhash

from astraflow.algorithms.relative import group_mean
from astraflow.facts import GroupFacts

__all__ = ["MovingMeans", "chance", "mean_reward"]


def chance(*parts: object) -> float:
    """A number in `[0, 1)` that depends on nothing but `parts`, and is uniform over them."""
    return xxhash.xxh3_64_intdigest("/".join(map(str, parts)).encode()) / 2**64


def mean_reward(facts: GroupFacts) -> float:
    """Mean reward of a group's episodes, at least 0 and at most 1: the pass rate where rewards are 0 or 1."""
    return min(1.0, max(0.0, group_mean(facts)))


class MovingMeans:
    """An exponentially weighted mean a task: m <- m + weight * (value - m), starting at the first value."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._means: dict[int, tuple[float, int]] = {}

    def add(self, task_idx: int, value: float) -> None:
        """One more visit of a task."""
        mean, visits = self.of(task_idx, value)
        self._means[task_idx] = (mean + self._weight * (value - mean), visits + 1)

    def of(self, task_idx: int, default: float = 0.0) -> tuple[float, int]:
        """(mean, visits) of a task; `default` and 0 for one that was never visited."""
        return self._means.get(task_idx, (default, 0))

    def state(self) -> dict[int, tuple[float, int]]:
        """All of them, in order of the first visit; not a copy."""
        return self._means

    def restore(self, state: Mapping[Any, Any]) -> None:
        """Goes on where `state` was taken."""
        self._means = {int(task): (float(mean), int(visits)) for task, (mean, visits) in state.items()}

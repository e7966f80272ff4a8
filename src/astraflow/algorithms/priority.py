"""Curator `priority`: tasks in proportion to how much there is to learn from them (arXiv:2408.15099)."""

from collections.abc import Mapping
from typing import Any

from astraflow.algorithms.task_history import MovingMeans, chance, mean_reward
from astraflow.facts import Outcome

__all__ = ["Priority"]


class Priority:
    """P(draw) = max(floor, (4 l)^exponent), l the moving mean of p (1 - p) over the task's visits.

    l is the learnability of a task with pass rate p (Rutherford et al. 2024, eq. 1): greatest at one half. A
    task that was never visited is drawn.
    """

    def __init__(
        self,
        *,
        seed: int,
        policy: str = "",
        exponent: float = 1.0,
        floor: float = 0.1,
        weight: float = 0.5,
    ) -> None:
        self._seed, self._policy = seed, policy
        self._exponent, self._floor = exponent, floor
        self._learnable = MovingMeans(weight)
        self._looks = 0

    def why_skip(self, task_idx: int) -> str:
        """`little_to_learn`, or empty."""
        value, visits = self._learnable.of(task_idx)
        if not visits:
            return ""
        self._looks += 1
        drawn = chance(self._seed, "priority", self._policy, self._looks)
        return "" if drawn < max(self._floor, (4 * value) ** self._exponent) else "little_to_learn"

    def observe(self, outcome: Outcome) -> None:
        """Moves the task's learnability."""
        if (facts := outcome.groups.get(self._policy)) is not None:
            rate = mean_reward(facts)
            self._learnable.add(outcome.task_idx, rate * (1 - rate))

    def state(self) -> dict[str, Any]:
        """Learnability of the tasks and the counter of the seeded chance."""
        return {"looks": self._looks, "learnable": self._learnable.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._looks = int(state["looks"])
        self._learnable.restore(state["learnable"])

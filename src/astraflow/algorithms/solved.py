"""Curator `solved`: passes over tasks that the policy solves nearly always."""

from collections.abc import Mapping
from typing import Any

from astraflow.algorithms.task_history import MovingMeans, chance, mean_reward
from astraflow.facts import Outcome

__all__ = ["Solved"]


class Solved:
    """Skips a task whose moving pass rate has reached `threshold`, but for a chance of `revisit`.

    m <- m + weight * (pass rate - m); skipped if visits >= min_visits and m >= threshold.
    """

    def __init__(
        self,
        *,
        seed: int,
        policy: str = "",
        threshold: float = 0.95,
        min_visits: int = 2,
        weight: float = 0.5,
        revisit: float = 0.05,
    ) -> None:
        self._seed, self._policy = seed, policy
        self._threshold, self._min_visits, self._revisit = threshold, min_visits, revisit
        self._rates = MovingMeans(weight)
        self._looks = 0

    def why_skip(self, task_idx: int) -> str:
        """`solved`, or empty."""
        rate, visits = self._rates.of(task_idx)
        if visits < self._min_visits or rate < self._threshold:
            return ""
        self._looks += 1
        return "" if chance(self._seed, "solved", self._policy, self._looks) < self._revisit else "solved"

    def observe(self, outcome: Outcome) -> None:
        """Moves the task's pass rate."""
        if (facts := outcome.groups.get(self._policy)) is not None:
            self._rates.add(outcome.task_idx, mean_reward(facts))

    def state(self) -> dict[str, Any]:
        """Pass rates and the counter of the seeded chance."""
        return {"looks": self._looks, "rates": self._rates.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._looks = int(state["looks"])
        self._rates.restore(state["rates"])

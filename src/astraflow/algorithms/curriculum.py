"""Curator `curriculum`: tasks near a target difficulty that follows the policy (after AdaRFT,
arXiv:2504.05520)."""

import math
from collections.abc import Mapping
from typing import Any

from astraflow.algorithms.task_history import MovingMeans, chance, mean_reward
from astraflow.facts import Outcome

__all__ = ["Curriculum"]


class Curriculum:
    """Draws a task by how near its measured difficulty d = 1 - moving pass rate is to a target T.

    P(draw) = max(floor, exp(-((d - T) / width)^2 / 2)); a task never visited is drawn, to measure it.
    After each version: T <- clip(T + rate * tanh(sharpness * (R - goal)), 0, 1), R the mean pass rate of the
    groups since the version before. The rule for T is AdaRFT's; that difficulty is measured is ours.
    """

    def __init__(
        self,
        *,
        seed: int,
        policy: str = "",
        start: float = 0.0,
        goal: float = 0.5,
        rate: float = 0.05,
        sharpness: float = 2.0,
        width: float = 0.25,
        floor: float = 0.05,
        weight: float = 0.5,
    ) -> None:
        self._seed, self._policy = seed, policy
        self._goal, self._rate, self._sharpness = goal, rate, sharpness
        self._width, self._floor = width, floor
        self._rates = MovingMeans(weight)
        self._target = start
        self._version = self._looks = self._num = 0
        self._sum = 0.0

    def why_skip(self, task_idx: int) -> str:
        """`too_easy`, `too_hard`, or empty."""
        rate, visits = self._rates.of(task_idx)
        if not visits:
            return ""
        distance = 1.0 - rate - self._target
        likelihood = max(self._floor, math.exp(-((distance / self._width) ** 2) / 2))
        self._looks += 1
        if chance(self._seed, "curriculum", self._policy, self._looks) < likelihood:
            return ""
        return "too_hard" if distance > 0 else "too_easy"

    def observe(self, outcome: Outcome) -> None:
        """Measures the task, and moves the target once a version."""
        facts = outcome.groups.get(self._policy)
        if facts is None:
            return
        if outcome.versions[self._policy] > self._version and self._num:
            step = self._rate * math.tanh(self._sharpness * (self._sum / self._num - self._goal))
            self._target = min(1.0, max(0.0, self._target + step))
            self._version, self._sum, self._num = outcome.versions[self._policy], 0.0, 0
        rate = mean_reward(facts)
        self._sum += rate
        self._num += 1
        self._rates.add(outcome.task_idx, rate)

    def state(self) -> dict[str, Any]:
        """Target, pass rates and counters."""
        return {
            "target": self._target,
            "version": self._version,
            "looks": self._looks,
            "seen": (self._sum, self._num),
            "rates": self._rates.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._target, self._version = float(state["target"]), int(state["version"])
        self._looks = int(state["looks"])
        self._sum, self._num = float(state["seen"][0]), int(state["seen"][1])
        self._rates.restore(state["rates"])

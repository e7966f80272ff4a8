"""Curators that skip tasks with little to learn from: `solved`, `curriculum`, `priority` and `greso`. Each
follows the outcomes of the groups that were drawn.

Nothing here is random: each chance is a hash of the run's seed and a counter.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from astraflow.algorithms.filters import ZeroVarianceFilter
from astraflow.algorithms.group_statistics import group_mean
from astraflow.algorithms.seeded import chance
from astraflow.config import Config
from astraflow.protocols import TaskGate
from astraflow.types.facts import GroupFacts, Outcome

__all__ = [
    "Curriculum",
    "CurriculumConfig",
    "Greso",
    "GresoConfig",
    "GresoFloorsConfig",
    "Priority",
    "PriorityConfig",
    "Solved",
    "SolvedConfig",
    "TaskGateConfig",
    "mean_reward",
]


class TaskGateConfig(Config):
    """Base of the curators that follow the outcomes of a policy."""

    policy: str = ""
    """Policy whose rewards count; empty: the episodes' scores count."""

    def make(self, *, seed: int) -> TaskGate:
        """The curator with these settings."""
        raise NotImplementedError


# --- memory per task ------------------------------------------------------------------------------


def mean_reward(facts: GroupFacts) -> float:
    """Mean reward of a group's episodes, clipped to [0, 1]; the pass rate if rewards are 0 or 1."""
    return min(1.0, max(0.0, group_mean(facts)))


class _MovingMeans:
    """One moving mean per task: m <- m + weight * (value - m), starting at the first value."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._means: dict[int, tuple[float, int]] = {}

    def add(self, task_idx: int, value: float) -> None:
        """Records one more visit of a task."""
        mean, visits = self.of(task_idx, value)
        self._means[task_idx] = (mean + self._weight * (value - mean), visits + 1)

    def of(self, task_idx: int, default: float = 0.0) -> tuple[float, int]:
        """(mean, visits) of a task; (`default`, 0) if it was never visited."""
        return self._means.get(task_idx, (default, 0))

    def state(self) -> dict[int, tuple[float, int]]:
        """The means of all tasks, in the order of their first visits; not a copy."""
        return self._means

    def restore(self, state: Mapping[Any, Any]) -> None:
        """Restores what `state` returned."""
        self._means = {int(task): (float(mean), int(visits)) for task, (mean, visits) in state.items()}


class SolvedConfig(TaskGateConfig):
    """Skips tasks that are nearly always solved."""

    name: Literal["solved"] = "solved"
    threshold: float = Field(default=0.95, gt=0, le=1)
    """Moving pass rate from which a task counts as solved."""
    min_visits: int = Field(default=2, ge=1)
    """Number of groups that a task must have had before it can count as solved."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in the moving pass rate."""
    revisit: float = Field(default=0.05, ge=0, le=1)
    """Probability that a solved task is drawn anyway, so that forgetting is noticed."""

    def make(self, *, seed: int) -> "Solved":
        """The curator with these settings."""
        return Solved(self, seed=seed)


class Solved:
    """Skips a task whose moving pass rate has reached `threshold`, except with probability `revisit`.

    m <- m + weight * (pass rate - m); skipped if visits >= min_visits and m >= threshold.
    """

    def __init__(self, settings: SolvedConfig, *, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._rates = _MovingMeans(settings.weight)
        self._looks = 0

    def why_skip(self, task_idx: int) -> str:
        """`solved`, or empty."""
        settings = self._settings
        rate, visits = self._rates.of(task_idx)
        if visits < settings.min_visits or rate < settings.threshold:
            return ""
        self._looks += 1
        is_revisited = chance(self._seed, "solved", settings.policy, self._looks) < settings.revisit
        return "" if is_revisited else "solved"

    def observe(self, outcome: Outcome) -> None:
        """Updates the task's pass rate."""
        facts = outcome.groups.get(self._settings.policy)
        if facts is not None:
            self._rates.add(outcome.task_idx, mean_reward(facts))

    def state(self) -> dict[str, Any]:
        """Pass rates and the counter of the seeded chance."""
        return {"looks": self._looks, "rates": self._rates.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._looks = int(state["looks"])
        self._rates.restore(state["rates"])


class CurriculumConfig(TaskGateConfig):
    """Prefers tasks near a target difficulty, which rises while the policy does well (after AdaRFT,
    arXiv:2504.05520)."""

    name: Literal["curriculum"] = "curriculum"
    start: float = Field(default=0.0, ge=0, le=1)
    """Initial target difficulty, where difficulty is 1 - pass rate."""
    goal: float = Field(default=0.5, ge=0, le=1)
    """Mean pass rate at which the target does not change."""
    rate: float = Field(default=0.05, gt=0)
    """Largest change of the target per version."""
    sharpness: float = Field(default=2.0, gt=0)
    """Steepness of the target's response to the distance from the goal."""
    width: float = Field(default=0.25, gt=0)
    """Distance from the target at which a task is drawn with probability exp(-1/2)."""
    floor: float = Field(default=0.05, gt=0, le=1)
    """Smallest probability with which any task is drawn."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in the moving pass rate."""

    def make(self, *, seed: int) -> "Curriculum":
        """The curator with these settings."""
        return Curriculum(self, seed=seed)


class Curriculum:
    """Draws a task the more likely, the closer its measured difficulty d is to a target T.

    d = 1 - moving pass rate;  P(draw) = max(floor, exp(-((d - T) / width)^2 / 2))
    A task that was never visited is always drawn, to measure it.

    After each version: T <- clip(T + rate * tanh(sharpness * (R - goal)), 0, 1), where R is the mean pass
    rate of the groups since the previous version.
    Source: the rule for T is AdaRFT's (arXiv:2504.05520); measuring the difficulty is ours.
    """

    def __init__(self, settings: CurriculumConfig, *, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._rates = _MovingMeans(settings.weight)
        self._target = settings.start
        self._version = 0
        self._looks = 0
        self._sum = 0.0
        """Sum of the pass rates since the previous version."""
        self._num = 0

    def why_skip(self, task_idx: int) -> str:
        """`too_easy`, `too_hard`, or empty."""
        settings = self._settings
        rate, visits = self._rates.of(task_idx)
        if not visits:
            return ""
        distance = 1.0 - rate - self._target
        likelihood = max(settings.floor, math.exp(-((distance / settings.width) ** 2) / 2))
        self._looks += 1
        if chance(self._seed, "curriculum", settings.policy, self._looks) < likelihood:
            return ""
        return "too_hard" if distance > 0 else "too_easy"

    def observe(self, outcome: Outcome) -> None:
        """Updates the task's pass rate, and moves the target once per version."""
        settings = self._settings
        facts = outcome.groups.get(settings.policy)
        if facts is None:
            return
        if outcome.versions[settings.policy] > self._version and self._num:
            step = settings.rate * math.tanh(settings.sharpness * (self._sum / self._num - settings.goal))
            self._target = min(1.0, max(0.0, self._target + step))
            self._version = outcome.versions[settings.policy]
            self._sum = 0.0
            self._num = 0
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
        """Restores what `state` returned."""
        self._target = float(state["target"])
        self._version = int(state["version"])
        self._looks = int(state["looks"])
        self._sum = float(state["seen"][0])
        self._num = int(state["seen"][1])
        self._rates.restore(state["rates"])


class PriorityConfig(TaskGateConfig):
    """Draws tasks in proportion to their learnability p (1 - p), where p is the pass rate
    (arXiv:2408.15099)."""

    name: Literal["priority"] = "priority"
    exponent: float = Field(default=1.0, ge=0)
    """Power of the learnability: 0 treats all tasks alike; larger values prefer the most learnable ones."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Smallest probability with which any task is drawn."""
    weight: float = Field(default=0.5, gt=0, le=1)
    """Weight of the newest group in the moving learnability."""

    def make(self, *, seed: int) -> "Priority":
        """The curator with these settings."""
        return Priority(self, seed=seed)


class Priority:
    """P(draw) = max(floor, (4 l)^exponent), where l is the moving mean of p (1 - p) over the task's visits.

    p (1 - p) is the learnability of a task with pass rate p; its maximum is 1/4, at p = 1/2. A task that was
    never visited is always drawn.
    Source: Rutherford et al. 2024 (arXiv:2408.15099), eq. 1.
    """

    def __init__(self, settings: PriorityConfig, *, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._learnable = _MovingMeans(settings.weight)
        self._looks = 0

    def why_skip(self, task_idx: int) -> str:
        """`little_to_learn`, or empty."""
        settings = self._settings
        value, visits = self._learnable.of(task_idx)
        if not visits:
            return ""
        self._looks += 1
        drawn = chance(self._seed, "priority", settings.policy, self._looks)
        likelihood = max(settings.floor, (4 * value) ** settings.exponent)
        return "" if drawn < likelihood else "little_to_learn"

    def observe(self, outcome: Outcome) -> None:
        """Updates the task's learnability."""
        facts = outcome.groups.get(self._settings.policy)
        if facts is not None:
            rate = mean_reward(facts)
            self._learnable.add(outcome.task_idx, rate * (1 - rate))

    def state(self) -> dict[str, Any]:
        """Learnability of the tasks and the counter of the seeded chance."""
        return {"looks": self._looks, "learnable": self._learnable.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._looks = int(state["looks"])
        self._learnable.restore(state["learnable"])


class GresoConfig(TaskGateConfig):
    """Skips tasks whose latest groups had rewards without variance (GRESO, arXiv:2506.02177)."""

    name: Literal["greso"] = "greso"
    ordered_bounds: ClassVar = ("min_p", "max_p")
    target_easy: float = Field(default=0.25 / 3, ge=0, le=1)
    """Target share of groups with only right answers; below it, easy tasks are drawn more often."""
    target_hard: float = Field(default=0.5 / 3, ge=0, le=1)
    """Target share of groups with only wrong answers; below it, hard tasks are drawn more often."""
    start_p: float = Field(default=0.5, gt=0, le=1)
    """Initial value of p for easy and for hard tasks; a task is drawn with probability p^z after z groups in
    a row without variance."""
    delta: float = Field(default=0.01, ge=0)
    """Change of p per version, from the second epoch on."""
    min_p: float = Field(default=0.05, gt=0, le=1)
    """Smallest value of p."""
    max_p: float = Field(default=0.95, gt=0, le=1)
    """Largest value of p."""
    floor_easy: float = Field(default=0.01, gt=0, le=1)
    """Smallest probability with which an easy task is drawn."""
    floor_hard: float = Field(default=0.01, gt=0, le=1)
    """Smallest probability with which a hard task is drawn."""
    easy_above: float = 0.5
    """Mean reward above which a group without variance counts as easy; otherwise it counts as hard."""

    def make(self, *, seed: int) -> "Greso":
        """The curator with these settings."""
        return Greso(self, seed=seed)


class GresoFloorsConfig(GresoConfig):
    """The same as `greso`, with the higher floors of the AstraFlow recipes."""

    name: Literal["greso_floors"] = "greso_floors"  # pyright: ignore[reportIncompatibleVariableOverride] - tag
    target_easy: float = Field(default=0.083, ge=0, le=1)
    """Target share of groups with only right answers; below it, easy tasks are drawn more often."""
    target_hard: float = Field(default=0.167, ge=0, le=1)
    """Target share of groups with only wrong answers; below it, hard tasks are drawn more often."""
    floor_easy: float = Field(default=0.10, gt=0, le=1)
    """Smallest probability with which an easy task is drawn."""
    floor_hard: float = Field(default=0.40, gt=0, le=1)
    """Smallest probability with which a hard task is drawn."""


_Kind = Literal["easy", "hard"]
_has_variance = ZeroVarianceFilter()


class Greso:
    """P(skip) = 1 - max(p^z, floor), where z counts the task's latest visits in a row without variance.

    `easy` (all right) and `hard` (all wrong) tasks have separate values of p. After each version of the
    policy, p moves by `delta` within [min_p, max_p]: down if the share of such groups among those completed
    since the previous version reaches its target, else up.

    A task is never skipped before its first visit, so the first epoch is complete. In that epoch the shares
    don't depend on p, and p would only drift to a bound. So only groups of tasks that were visited before
    count, and p adapts from the second epoch on.
    Source: Zheng et al. 2025 (arXiv:2506.02177), section 4 and algorithm 1; waiting for the second epoch:
    the authors' code.
    Example: with the default p of 0.5, two tasks, each visited once without variance, are drawn with
    probability 0.5 in the second epoch.
    """

    def __init__(self, settings: GresoConfig, *, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._targets: dict[_Kind, float] = {"easy": settings.target_easy, "hard": settings.target_hard}
        self._floors: dict[_Kind, float] = {"easy": settings.floor_easy, "hard": settings.floor_hard}
        self._p: dict[_Kind, float] = {"easy": settings.start_p, "hard": settings.start_p}
        self._runs: dict[int, tuple[_Kind, int]] = {}
        self._visited: dict[int, None] = {}
        self._seen: dict[str, int] = {"easy": 0, "hard": 0, "all": 0}
        """Number of groups since the previous version, of tasks that were visited before."""
        self._version = 0
        self._looks = 0

    def why_skip(self, task_idx: int) -> str:
        """`easy`, `hard`, or empty."""
        if task_idx not in self._runs:
            return ""
        kind, num = self._runs[task_idx]
        self._looks += 1
        drawn = chance(self._seed, "greso", self._settings.policy, self._looks)
        return "" if drawn < max(self._p[kind] ** num, self._floors[kind]) else kind

    def observe(self, outcome: Outcome) -> None:
        """Counts the group if its task was visited before, and moves both values of p once per version."""
        policy = self._settings.policy
        facts = outcome.groups.get(policy)
        if facts is None:
            return
        if outcome.versions[policy] > self._version:
            if self._seen["all"]:
                self._adapt()
            self._version = outcome.versions[policy]
        is_revisit = outcome.task_idx in self._visited
        self._visited[outcome.task_idx] = None
        self._seen["all"] += is_revisit
        if _has_variance(facts):
            self._runs.pop(outcome.task_idx, None)
            return
        kind: _Kind = "easy" if mean_reward(facts) > self._settings.easy_above else "hard"
        self._seen[kind] += is_revisit
        _, num = self._runs.get(outcome.task_idx, (kind, 0))
        self._runs[outcome.task_idx] = (kind, num + 1)

    def _adapt(self) -> None:
        settings = self._settings
        for kind, target in self._targets.items():
            is_reached = self._seen[kind] / self._seen["all"] >= target
            moved = self._p[kind] + (-settings.delta if is_reached else settings.delta)
            self._p[kind] = min(settings.max_p, max(settings.min_p, moved))
        self._seen = dict.fromkeys(self._seen, 0)

    def state(self) -> dict[str, Any]:
        """Both values of p, the visited tasks and their runs of zero variance, and counters."""
        return {
            "p_easy": self._p["easy"],
            "p_hard": self._p["hard"],
            "version": self._version,
            "looks": self._looks,
            "seen": self._seen,
            "in_a_row": self._runs,
            "visited": self._visited,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._p = {"easy": float(state["p_easy"]), "hard": float(state["p_hard"])}
        self._version = int(state["version"])
        self._looks = int(state["looks"])
        self._seen = {key: int(state["seen"][key]) for key in self._seen}
        self._runs = {int(task): (kind, int(num)) for task, (kind, num) in state["in_a_row"].items()}
        self._visited = {int(task): None for task in state["visited"]}

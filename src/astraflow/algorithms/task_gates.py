"""Curators that skip tasks with little to learn from: `solved`, `curriculum`, `priority` and `greso`. Each
follows the outcomes of the groups that were drawn.

Nothing here is random: each chance is a hash of the run's seed and a counter.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Literal, TypeVar

import msgspec
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


_Means = dict[int, tuple[float, int]]
"""(moving mean, visits) of each task that was visited."""


def _add_visit(means: _Means, task_idx: int, value: float, weight: float) -> None:
    """Records a visit: m <- m + weight * (value - m), starting at the first value."""
    mean, visits = means.get(task_idx, (value, 0))
    means[task_idx] = (mean + weight * (value - mean), visits + 1)


class _State(msgspec.Struct, forbid_unknown_fields=True):
    looks: int = 0
    """Counter of the seeded chance."""


_SettingsT = TypeVar("_SettingsT", bound=TaskGateConfig)
_StateT = TypeVar("_StateT", bound=_State)


class _Gate(Generic[_SettingsT, _StateT]):
    """The settings and the state of a gate."""

    def __init__(self, settings: _SettingsT, first: _StateT, *, seed: int) -> None:
        self._settings = settings
        self._seed = seed
        self._now = first

    def _chance(self, name: str) -> float:
        """The next number in [0, 1)."""
        self._now.looks += 1
        return chance(self._seed, name, self._settings.policy, self._now.looks)

    def state(self) -> dict[str, Any]:
        """The state as plain data; not a copy."""
        return msgspec.structs.asdict(self._now)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned."""
        self._now = msgspec.convert(state, type(self._now), strict=False, str_keys=True)


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


class _Rates(_State):
    rates: _Means = {}
    """Pass rates."""


class Solved(_Gate[SolvedConfig, _Rates]):
    """Skips a task whose moving pass rate has reached `threshold`, except with probability `revisit`.

    m <- m + weight * (pass rate - m); skipped if visits >= min_visits and m >= threshold.
    """

    def __init__(self, settings: SolvedConfig, *, seed: int) -> None:
        super().__init__(settings, _Rates(), seed=seed)

    def why_skip(self, task_idx: int) -> str:
        """`solved`, or empty."""
        settings = self._settings
        rate, visits = self._now.rates.get(task_idx, (0.0, 0))
        if visits < settings.min_visits or rate < settings.threshold:
            return ""
        return "" if self._chance("solved") < settings.revisit else "solved"

    def observe(self, outcome: Outcome) -> None:
        """Updates the task's pass rate."""
        facts = outcome.groups.get(self._settings.policy)
        if facts is not None:
            _add_visit(self._now.rates, outcome.task_idx, mean_reward(facts), self._settings.weight)


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


class _Target(_Rates):
    target: float = 0.0
    version: int = 0
    seen: tuple[float, int] = (0.0, 0)
    """Sum of the pass rates since the previous version, and their number."""


class Curriculum(_Gate[CurriculumConfig, _Target]):
    """Draws a task the more likely, the closer its measured difficulty d is to a target T.

    d = 1 - moving pass rate;  P(draw) = max(floor, exp(-((d - T) / width)^2 / 2))
    A task that was never visited is always drawn, to measure it.

    After each version: T <- clip(T + rate * tanh(sharpness * (R - goal)), 0, 1), where R is the mean pass
    rate of the groups since the previous version.
    Source: the rule for T is AdaRFT's (arXiv:2504.05520); measuring the difficulty is ours.
    """

    def __init__(self, settings: CurriculumConfig, *, seed: int) -> None:
        super().__init__(settings, _Target(target=settings.start), seed=seed)

    def why_skip(self, task_idx: int) -> str:
        """`too_easy`, `too_hard`, or empty."""
        settings = self._settings
        if task_idx not in self._now.rates:
            return ""
        distance = 1.0 - self._now.rates[task_idx][0] - self._now.target
        likelihood = max(settings.floor, math.exp(-((distance / settings.width) ** 2) / 2))
        if self._chance("curriculum") < likelihood:
            return ""
        return "too_hard" if distance > 0 else "too_easy"

    def observe(self, outcome: Outcome) -> None:
        """Updates the task's pass rate, and moves the target once per version."""
        settings = self._settings
        now = self._now
        facts = outcome.groups.get(settings.policy)
        if facts is None:
            return
        total, num = now.seen
        if outcome.versions[settings.policy] > now.version and num:
            step = settings.rate * math.tanh(settings.sharpness * (total / num - settings.goal))
            now.target = min(1.0, max(0.0, now.target + step))
            now.version = outcome.versions[settings.policy]
            total = 0.0
            num = 0
        rate = mean_reward(facts)
        now.seen = (total + rate, num + 1)
        _add_visit(now.rates, outcome.task_idx, rate, settings.weight)


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


class _Learnable(_State):
    learnable: _Means = {}


class Priority(_Gate[PriorityConfig, _Learnable]):
    """P(draw) = max(floor, (4 l)^exponent), where l is the moving mean of p (1 - p) over the task's visits.

    p (1 - p) is the learnability of a task with pass rate p; its maximum is 1/4, at p = 1/2. A task that was
    never visited is always drawn.
    Source: Rutherford et al. 2024 (arXiv:2408.15099), eq. 1.
    """

    def __init__(self, settings: PriorityConfig, *, seed: int) -> None:
        super().__init__(settings, _Learnable(), seed=seed)

    def why_skip(self, task_idx: int) -> str:
        """`little_to_learn`, or empty."""
        settings = self._settings
        if task_idx not in self._now.learnable:
            return ""
        likelihood = max(settings.floor, (4 * self._now.learnable[task_idx][0]) ** settings.exponent)
        return "" if self._chance("priority") < likelihood else "little_to_learn"

    def observe(self, outcome: Outcome) -> None:
        """Updates the task's learnability."""
        facts = outcome.groups.get(self._settings.policy)
        if facts is not None:
            rate = mean_reward(facts)
            learnable = rate * (1 - rate)
            _add_visit(self._now.learnable, outcome.task_idx, learnable, self._settings.weight)


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


class _Runs(_State):
    p_easy: float = 0.0
    p_hard: float = 0.0
    version: int = 0
    seen: dict[Literal["easy", "hard", "all"], int] = {}
    """Number of groups since the previous version, of tasks that were visited before."""
    in_a_row: dict[int, tuple[_Kind, int]] = {}
    visited: dict[int, None] = {}


class Greso(_Gate[GresoConfig, _Runs]):
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
        first = _Runs(p_easy=settings.start_p, p_hard=settings.start_p, seen={"easy": 0, "hard": 0, "all": 0})
        super().__init__(settings, first, seed=seed)

    def why_skip(self, task_idx: int) -> str:
        """`easy`, `hard`, or empty."""
        if task_idx not in self._now.in_a_row:
            return ""
        kind, num = self._now.in_a_row[task_idx]
        if kind == "easy":
            likelihood = max(self._now.p_easy**num, self._settings.floor_easy)
        else:
            likelihood = max(self._now.p_hard**num, self._settings.floor_hard)
        return "" if self._chance("greso") < likelihood else kind

    def observe(self, outcome: Outcome) -> None:
        """Counts the group if its task was visited before, and moves both values of p once per version."""
        policy = self._settings.policy
        now = self._now
        facts = outcome.groups.get(policy)
        if facts is None:
            return
        if outcome.versions[policy] > now.version:
            if now.seen["all"]:
                now.p_easy = self._moved(now.p_easy, "easy", self._settings.target_easy)
                now.p_hard = self._moved(now.p_hard, "hard", self._settings.target_hard)
                now.seen = dict.fromkeys(now.seen, 0)
            now.version = outcome.versions[policy]
        is_revisit = outcome.task_idx in now.visited
        now.visited[outcome.task_idx] = None
        now.seen["all"] += is_revisit
        if _has_variance(facts):
            now.in_a_row.pop(outcome.task_idx, None)
            return
        kind: _Kind = "easy" if mean_reward(facts) > self._settings.easy_above else "hard"
        now.seen[kind] += is_revisit
        _, num = now.in_a_row.get(outcome.task_idx, (kind, 0))
        now.in_a_row[outcome.task_idx] = (kind, num + 1)

    def _moved(self, p: float, kind: _Kind, target: float) -> float:
        settings = self._settings
        is_reached = self._now.seen[kind] / self._now.seen["all"] >= target
        step = -settings.delta if is_reached else settings.delta
        return min(settings.max_p, max(settings.min_p, p + step))

"""Curator `greso`: passes over tasks whose groups keep having no variance (arXiv:2506.02177)."""

from collections.abc import Mapping
from typing import Any, Literal

from astraflow.algorithms.task_history import chance, mean_reward
from astraflow.algorithms.zero_variance import zero_variance
from astraflow.facts import Outcome

__all__ = ["Greso"]

_Kind = Literal["easy", "hard"]


class Greso:
    """P(skip) = 1 - max(p^z, floor): z the task's zero-variance visits in a row, up to the last one.

    `easy` (all right) and `hard` (all wrong) tasks have their own p. After each version of the policy: if the
    share of such groups among those completed since the version before is at least its target, p falls by
    `delta`, else it rises by `delta`, within [min_p, max_p].

    A task is never skipped before its first visit, so the first epoch is whole, and p adapts from the second
    epoch on: only groups of tasks that were visited before are counted. In the first epoch the shares do not
    depend on p, which would only drift to a bound.
    Source: Zheng et al. 2025, section 4 and algorithm 1; that p waits for the second epoch: authors' code.
    Example: two tasks, each visited once without variance, are drawn with chance 0.5 in the second epoch.
    """

    def __init__(
        self,
        *,
        seed: int,
        policy: str = "",
        target_easy: float = 0.25 / 3,
        target_hard: float = 0.5 / 3,
        start_p: float = 0.5,
        delta: float = 0.01,
        min_p: float = 0.05,
        max_p: float = 0.95,
        floor_easy: float = 0.01,
        floor_hard: float = 0.01,
        easy_above: float = 0.5,
    ) -> None:
        self._seed, self._policy = seed, policy
        self._targets: dict[_Kind, float] = {"easy": target_easy, "hard": target_hard}
        self._floors: dict[_Kind, float] = {"easy": floor_easy, "hard": floor_hard}
        self._p: dict[_Kind, float] = {"easy": start_p, "hard": start_p}
        self._delta, self._min_p, self._max_p, self._easy_above = delta, min_p, max_p, easy_above
        self._in_a_row: dict[int, tuple[_Kind, int]] = {}
        self._visited: dict[int, None] = {}
        self._seen: dict[str, int] = {"easy": 0, "hard": 0, "all": 0}
        self._version = self._looks = 0

    def why_skip(self, task_idx: int) -> str:
        """`easy`, `hard`, or empty."""
        if task_idx not in self._in_a_row:
            return ""
        kind, num = self._in_a_row[task_idx]
        self._looks += 1
        drawn = chance(self._seed, "greso", self._policy, self._looks)
        return "" if drawn < max(self._p[kind] ** num, self._floors[kind]) else kind

    def observe(self, outcome: Outcome) -> None:
        """Counts the group if its task was visited before, and moves both p once a version."""
        facts = outcome.groups.get(self._policy)
        if facts is None:
            return
        if outcome.versions[self._policy] > self._version:
            if self._seen["all"]:
                self._adapt()
            self._version = outcome.versions[self._policy]
        is_revisit = outcome.task_idx in self._visited
        self._visited[outcome.task_idx] = None
        self._seen["all"] += is_revisit
        if zero_variance(facts):
            self._in_a_row.pop(outcome.task_idx, None)
            return
        kind: _Kind = "easy" if mean_reward(facts) > self._easy_above else "hard"
        self._seen[kind] += is_revisit
        _, num = self._in_a_row.get(outcome.task_idx, (kind, 0))
        self._in_a_row[outcome.task_idx] = (kind, num + 1)

    def _adapt(self) -> None:
        for kind, target in self._targets.items():
            is_reached = self._seen[kind] / self._seen["all"] >= target
            moved = self._p[kind] + (-self._delta if is_reached else self._delta)
            self._p[kind] = min(self._max_p, max(self._min_p, moved))
        self._seen = dict.fromkeys(self._seen, 0)

    def state(self) -> dict[str, Any]:
        """Both p, the tasks' runs of zero variance, the tasks visited, and counters."""
        return {
            "p_easy": self._p["easy"],
            "p_hard": self._p["hard"],
            "version": self._version,
            "looks": self._looks,
            "seen": self._seen,
            "in_a_row": self._in_a_row,
            "visited": self._visited,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._p = {"easy": float(state["p_easy"]), "hard": float(state["p_hard"])}
        self._version, self._looks = int(state["version"]), int(state["looks"])
        self._seen = {key: int(state["seen"][key]) for key in self._seen}
        self._in_a_row = {int(task): (kind, int(num)) for task, (kind, num) in state["in_a_row"].items()}
        # An older version did not keep the visits; those without variance, it did.
        self._visited = {int(task): None for task in state.get("visited", state["in_a_row"])}

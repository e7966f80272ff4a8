"""Evaluation as the rules have it: which rounds are due, what they pin, what their records must say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from astraflow.dataflow.core.commands import Command, LeaseIssued, PublishVersion
from astraflow.dataflow.core.plan import RunPlan
from astraflow.types import EvalRecord

__all__ = ["Round", "Rounds"]


@dataclass(slots=True)
class Round:
    """One set at pinned versions."""

    policy: str
    version: int
    step: int
    eval_set: str
    pinned: dict[str, int]
    opened_s: float
    deadline_s: float
    """How long it may take."""
    slots: dict[int, Any] = field(default_factory=dict[int, Any])
    is_over: bool = False


class Rounds:
    """All rounds of a run, in the order in which they must open."""

    def __init__(
        self, plan: RunPlan, problem: Callable[[str], None], last_step: Callable[[str], int]
    ) -> None:
        self._plan, self._problem, self._last_step = plan, problem, last_step
        self._rounds: list[Round] = []
        self._due: list[tuple[str, int, int]] = []
        self._evaluated = dict.fromkeys(plan.policies, -1)

    def after(self, command: Command, now_s: float, newest: Mapping[str, int]) -> None:
        """Opens what a publication makes due, once every policy has a version."""
        if not isinstance(command, PublishVersion) or command.manifest.version != newest[command.policy]:
            return
        self.due(command.policy, command.step, now_s, newest)

    def due(self, name: str, step: int, now_s: float, newest: Mapping[str, int]) -> None:
        """Opens the rounds of a policy's newest version, which holds this many steps, if they are due."""
        is_due = step % self._plan.eval.every == 0 or step == self._last_step(name)
        if self._plan.eval.sets and is_due and step > self._evaluated[name]:
            self._evaluated[name] = step
            self._due.append((name, newest[name], step))
        if min(newest.values()) < 0:
            return
        for policy, version, done in self._due:
            pinned = {**newest, policy: version}
            longest_s = self._plan.eval.deadline_s
            for eval_set in self._plan.eval.sets:
                self._rounds.append(Round(policy, version, done, eval_set, pinned, now_s, longest_s))
        self._due.clear()

    def change(self, plan: RunPlan) -> None:
        """Another schedule holds: open rounds of sets that went, or have another size, are dropped. Their
        steps are due again."""
        before = self._plan.eval.sets
        self._plan = plan
        now = plan.eval.sets
        for round_ in self._rounds:
            if not round_.is_over and now.get(round_.eval_set) != before[round_.eval_set]:
                self._drop(round_)

    def resume(self) -> None:
        """The run was over and goes on: what was open then is due again."""
        for round_ in self._rounds:
            if not round_.is_over:
                self._drop(round_)
        for name, _, step in self._due:
            self._evaluated[name] = min(self._evaluated[name], step - 1)
        self._due.clear()

    def _drop(self, round_: Round) -> None:
        round_.is_over = True
        self._evaluated[round_.policy] = min(self._evaluated[round_.policy], round_.step - 1)

    def slot(self, round_id: int, episode_idx: int, make: Callable[[], Any]) -> Any:
        """An episode of a round."""
        round_ = self._rounds[round_id]
        size = self._plan.eval.sets[round_.eval_set]
        if not 0 <= episode_idx < size.num_tasks * size.samples:
            self._problem(f"episode {episode_idx} of {round_}")
        if episode_idx not in round_.slots:
            round_.slots[episode_idx] = make()
        return round_.slots[episode_idx]

    def is_over(self, round_id: int) -> bool:
        """Whether a round was reported."""
        return self._rounds[round_id].is_over

    def leased(self, event: LeaseIssued, served: Mapping[str, tuple[int, ...]]) -> None:
        """A lease goes to a service that serves all that the round pins."""
        round_ = self._rounds[event.group_id]
        missing = {p: v for p, v in round_.pinned.items() if v not in served.get(p, ())}
        if missing or round_.is_over:
            self._problem(f"{event.lease_id} of {round_}: the service lacks {missing}")

    def finished(self, record: EvalRecord, *, expired: bool) -> None:
        """A round is reported, with exactly what it has."""
        key = (record.policy, record.version, record.step, record.eval_set)
        # A round that was dropped may have been followed by another one of the same version.
        alike = [r for r in self._rounds if (r.policy, r.version, r.step, r.eval_set) == key]
        found = [r for r in alike if not r.is_over]
        if len(found) != 1:
            self._problem(f"{record} of rounds {alike}")
        round_, size = found[0], self._plan.eval.sets[record.eval_set]
        round_.is_over = True
        num_slots = size.num_tasks * size.samples
        good = {idx: slot.facts.score for idx, slot in round_.slots.items() if slot.winner}
        num_failed = sum(slot.has_failed for slot in round_.slots.values())
        if (record.num_tasks, record.num_samples, record.num_failed) != (
            size.num_tasks, len(good), num_slots - len(good),
        ):  # fmt: skip
            self._problem(f"{record}: {len(good)} of {num_slots} episodes are good")
        by_task: dict[int, list[float]] = {}
        for idx, score in good.items():
            by_task.setdefault(idx // size.samples, []).append(score)
        means = [sum(scores) / len(scores) for scores in by_task.values()]
        num_late = sum(slot.is_late for slot in round_.slots.values())
        # A round that is cut off, or has late episodes, has no score: its longest answers are missing.
        mean = sum(means) / len(means) if means else None
        expected = None if expired or num_late else mean
        if not _are_equal(record.score_mean, expected):
            self._problem(f"{record}: the scores are {by_task}, {num_late} episodes are late")
        self._check_missing(record, round_, num_slots - len(good) - num_failed + num_late, mean)
        if expired:
            if record.at_s < round_.opened_s + round_.deadline_s:
                self._problem(f"{record} is cut off before its deadline")
        elif len(good) + num_failed != num_slots:
            self._problem(f"{record} is reported while episodes are open")

    def _check_missing(self, record: EvalRecord, round_: Round, num_missing: int, mean: float | None) -> None:
        """A record without some lengths says how many, and how long the others were; a whole one doesn't."""
        known = [slot.facts for slot in round_.slots.values() if slot.winner]
        lengths = [item.value for facts in known for item in facts.metrics if item.name == "sampled_tokens"]
        said: dict[str, float | None] = {
            "unfinished": float(num_missing),
            "longest_finished_s": max((facts.duration_s for facts in known), default=0.0),
            "longest_finished_tokens": max(lengths, default=0.0),
            "partial_score_mean": mean,
        }
        wanted = said if num_missing else {}
        found = {item.name: item.value for item in record.metrics}
        if any(not _are_equal(found.get(name), wanted.get(name)) for name in said):
            self._problem(f"{record}: what is missing is {wanted}")

    def check_done(self) -> None:
        """At the end of a whole run: all that was due was reported."""
        if self._due or any(not round_.is_over for round_ in self._rounds):
            self._problem(f"rounds are missing: {self._due}, {[r for r in self._rounds if not r.is_over]}")


def _are_equal(score: float | None, expected: float | None) -> bool:
    """None: no episode gave a score."""
    if score is None or expected is None:
        return score is expected
    return abs(score - expected) <= 1e-9

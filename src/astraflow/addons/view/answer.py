"""What a person wants to know first about a run: one sentence and four figures.

The sentence says whether the run learns and what limits it. The figures are the held-out score, the progress,
the speed, and the limit. The page, the terminal, and comparisons show the same ones:

    answer_of_overview(overview, now_s)   a run that is still going, from its steps, evaluations and status
    answer_of_summary(summary)            a run that has ended, from its `summary.json`

Both return a `RunAnswer`, whose `line` is the whole answer on one line of text.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from astraflow.report.overview import RunOverview, duration_text, eta_s, speed_text
from astraflow.report.summary import PolicySummary, Summary
from astraflow.types import Item

__all__ = ["Figure", "RunAnswer", "answer_of_overview", "answer_of_summary"]

_SIGNIFICANT = 2.0
"""A difference between two scores counts if it is at least this many standard errors."""
_CHANGED = 0.02
"""The same for scores without standard errors, such as those of one task."""
_BUSY = 0.1
"""A side that waits for less than this share of the time is busy."""


class Figure(Item, frozen=True, kw_only=True):
    """One number with its name. Example: `Figure(name="Held-out", value="0.963", detail="from 0.340")`."""

    name: Literal["Held-out", "Progress", "Speed", "Limit"]
    value: str
    detail: str = ""
    """Where it comes from, or what it means."""
    tone: Literal["", "good", "warn", "bad"] = ""
    """Whether the figure is good news, needs attention, or is bad news; empty for neither."""


class RunAnswer(Item, frozen=True, kw_only=True):
    """The answer about one run. Example: `print(answer_of_summary(load_summary(folder)).line)`."""

    sentence: str
    figures: tuple[Figure, Figure, Figure, Figure]
    """Held-out, Progress, Speed, and Limit, always in this order."""

    @property
    def line(self) -> str:
        """The sentence and the figures on one line."""
        texts = [
            f"{each.name.lower()} {each.value}{'' if each.name == 'Held-out' else ','} {each.detail}"
            for each in self.figures
        ]
        return f"{self.sentence} ({', '.join(texts)})"


def answer_of_overview(run: RunOverview, now_s: float) -> RunAnswer:
    """Answers for a run that is still going: its score is that of the first policy that has one."""
    status = run.status
    policies = status.policies if status else ()
    held_out = _held_out_of(run, [policy.name for policy in policies])
    done = sum(policy.step for policy in policies)
    total = sum(policy.num_steps for policy in policies)
    left_s = [left for p in policies if (left := eta_s(run.steps.get(p.name, ()), p.num_steps)) is not None]
    elapsed = f"{duration_text(now_s - run.started_s)} so far"
    progress = _progress(done, total, f"{duration_text(max(left_s))} left" if left_s else elapsed)
    limit = _Limit({}, None)
    if status and status.scaling.trainer_wait_frac:
        limit = _Limit(status.scaling.trainer_wait_frac, status.scaling.rollout_wait_frac)
    speed = _speed(run.generated_tokens_per_s(), "generated now")
    return _answer(held_out, progress, speed, limit, is_over=False)


def answer_of_summary(summary: Summary) -> RunAnswer:
    """Answers for a run that has ended. The score is that of the first policy."""
    first = next(iter(summary.policies), None)
    held_out = _held_out_of_policy(first)
    done = sum(policy.steps for policy in summary.policies)
    total = sum(policy.num_steps for policy in summary.policies)
    progress = _progress(done, total, f"in {duration_text(summary.wall_s)}")
    waits: dict[str, float] = {}
    for wait in summary.waits:
        kind, _, policy = wait.who.partition(" ")
        if kind == "trainer":
            waits[policy] = min(1.0, waits.get(policy, 0.0) + wait.frac)
    # While trainers work and do not overlap with generation, generation stands still.
    idle = max(0.0, 1.0 - min(waits.values()) - summary.overlap_frac) if waits else None
    seconds = summary.rl_wall_s
    speed = _speed(summary.generated_tokens / seconds if seconds else 0.0, "generated, on average")
    answer = _answer(held_out, progress, speed, _Limit(waits, idle), is_over=True)
    if first is None and summary.audit_problems:
        sentence = f"There are no results: {summary.audit_problems[0]}."
        return RunAnswer(sentence=sentence, figures=answer.figures)
    return answer


# --- the score ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """The first and the newest score of a policy on its first evaluation set."""

    first: float | None = None
    last: float | None = None
    where: str = ""
    is_same: bool = True
    """Whether only one version was evaluated."""
    significant: float = _CHANGED
    """The smallest difference that counts."""
    reward: tuple[float, float] | None = None
    """First and last training reward of a run that has ended, which stand in if nothing was evaluated."""

    @property
    def rise(self) -> float:
        """How much the score rose, or 0 if the difference does not count."""
        change = (self.last or 0.0) - (self.first or 0.0)
        return change if abs(change) >= self.significant else 0.0

    def figure(self) -> Figure:
        """The figure of the score."""
        if self.last is None:
            return Figure(
                name="Held-out",
                value="\u2013",
                detail="not evaluated" if self.reward else "not evaluated yet",
            )
        if self.is_same:
            return Figure(name="Held-out", value=f"{self.last:.3f}", detail=f"at the start, {self.where}")
        tone = "good" if self.rise > 0 else "bad" if self.rise < 0 else "warn"
        detail = f"from {self.first:.3f}, {self.where}"
        return Figure(name="Held-out", value=f"{self.last:.3f}", detail=detail, tone=tone)

    def clause(self, *, is_over: bool) -> str:
        """Says whether the run learns."""
        if self.last is None and self.reward:
            first, last = self.reward
            return f"Nothing was evaluated; the training reward went from {first:.3f} to {last:.3f}"
        if self.last is None:
            return "No evaluation says yet whether it learns"
        if self.is_same:
            return f"The held-out score was {self.last:.3f} at the start; no later version is evaluated"
        scores = f"from {self.first:.3f} to {self.last:.3f}"
        if self.rise > 0:
            return f"{'It learned' if is_over else 'It learns'}: the held-out score rose {scores}"
        if self.rise < 0:
            return f"{'It got' if is_over else 'It gets'} worse: the held-out score fell {scores}"
        learned = "did not measurably learn" if is_over else "does not measurably learn yet"
        return f"It {learned}: the held-out score went {scores}"


def _held_out_of(run: RunOverview, policies: list[str]) -> _HeldOut:
    keys = sorted(
        run.last_evals, key=lambda key: policies.index(key[0]) if key[0] in policies else len(policies)
    )
    if not keys:
        return _HeldOut()
    first = run.first_evals[keys[0]]
    last = run.last_evals[keys[0]]
    error = math.hypot(first.score_stderr, last.score_stderr)
    significant = _SIGNIFICANT * error if error else _CHANGED
    has_several = len({policy for policy, _ in keys}) > 1
    where = f"{last.policy} on {last.eval_set}" if has_several else last.eval_set
    return _HeldOut(first.score_mean, last.score_mean, where, first is last, significant)


def _held_out_of_policy(policy: PolicySummary | None) -> _HeldOut:
    if policy is None:
        return _HeldOut()
    if not policy.heldout_after:
        return _HeldOut(reward=(policy.reward_first, policy.reward_last) if policy.steps else None)
    name = next(iter(policy.heldout_after))
    first = policy.heldout_before[name]
    last = policy.heldout_after[name]
    return _HeldOut(first, last, name, policy.steps == 0)


# --- progress, speed, and limit ---------------------------------------------------------------------


def _progress(done: int, total: int, time: str) -> Figure:
    steps = f"step {done:,} of {total:,}" if total else "starting"
    return Figure(
        name="Progress", value=f"{done / total:.0%}" if total else "\u2013", detail=f"{steps}, {time}"
    )


def _speed(tokens_per_s: float, detail: str) -> Figure:
    value = speed_text(tokens_per_s).removesuffix(" tok/s")
    if tokens_per_s >= 100_000:
        value = f"{tokens_per_s / 1000:,.0f}k"
    return Figure(name="Speed", value=f"{value} tokens/s", detail=detail)


@dataclass(frozen=True, slots=True)
class _Limit:
    """How long each side waited for the other, as shares of the time."""

    trainers: Mapping[str, float]
    """Policy -> share of its trainer's time without a batch."""
    generation: float | None
    """Share of the time in which generation had to wait; None if unknown."""

    def words(self) -> tuple[str, str, str]:
        """The limiting side, by how much, and both as a clause; all empty if unknown."""
        if not self.trainers:
            return "", "", ""
        policy = max(self.trainers, key=lambda name: self.trainers[name])
        trainer = self.trainers[policy]
        generation = self.generation or 0.0
        name = f"trainer {policy}" if len(self.trainers) > 1 else "trainer"
        by_trainer = f"the {name} waits {trainer:.0%}"
        by_pool = f"generation waits {generation:.0%}"
        if max(trainer, generation) < _BUSY:
            return "balanced", f"{by_trainer}, {by_pool}", "both sides are busy"
        if (
            trainer >= _BUSY
            and generation >= _BUSY
            and min(trainer, generation) > 0.5 * max(trainer, generation)
        ):
            return "taking turns", f"{by_trainer}, {by_pool}", f"both sides wait: {by_trainer}, {by_pool}"
        if trainer > generation:
            return "generation", by_trainer, f"generation is the bottleneck: {by_trainer}"
        return name, by_pool, f"the {name} is the bottleneck: {by_pool}"


def _answer(
    held_out: _HeldOut, progress: Figure, speed: Figure, limit: _Limit, *, is_over: bool
) -> RunAnswer:
    side, detail, clause = limit.words()
    figure = Figure(
        name="Limit",
        value=side[:1].upper() + side[1:] or "\u2013",
        detail=detail or "not enough data yet",
    )
    sentence = held_out.clause(is_over=is_over) + (f"; {clause}." if clause else ".")
    return RunAnswer(sentence=sentence, figures=(held_out.figure(), progress, speed, figure))

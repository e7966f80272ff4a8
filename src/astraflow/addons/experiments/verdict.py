"""Says which variant is ahead, and whether chance explains its lead.

A lead is judged by its interval over seeds. Two variants of one run each have no such interval. Their
evaluations have one over tasks, which tells the two models apart, but not the two recipes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

from astraflow.addons.experiments.intervals import CONFIDENCE, Interval, difference, mean_interval

__all__ = ["FigureVerdict", "Standing", "differences", "verdict"]

Outcome = Literal["matters", "chance", "equal", "unknown", "alone"]
Basis = Literal["seeds", "tasks", "none"]


RUN_DEVIATION = 0.05
"""Standard deviation of the final score of asynchronous runs with the same seed: in the quickstart, such runs
end between 0.68 and 0.81."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What one variant reached in a figure. Example: `Standing("lr=0.01", (0.82, 0.84))`."""

    label: str
    values: tuple[float, ...]
    """One value per run."""
    stderr: float | None = None
    """Standard error over the tasks if the variant is a single run that was evaluated."""
    is_async: bool = False
    """Whether its runs train on episodes of earlier versions, so that two runs of one seed differ."""

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)


@dataclass(frozen=True, slots=True)
class FigureVerdict:
    """Which variant is ahead in a figure. Example: `verdict(sides, "actor on heldout").text`."""

    figure: str
    best: str
    score: Interval
    """The mean of the best variant."""
    other: str
    """The next best variant; empty if there is none."""
    gap: Interval | None
    """By how much the best exceeds the next best, with its interval; None without a next best."""
    outcome: Outcome
    """`matters` if chance does not explain the gap, `chance` if it may, `equal` if there is no gap, `unknown`
    if there is no interval, and `alone` if there is one variant."""
    basis: Basis
    """What the interval of the gap is taken over."""
    headline: str
    """The answer in one sentence."""
    detail: str
    """The interval, and what to do next; empty if there is nothing more to say."""

    @property
    def text(self) -> str:
        """The headline and the detail."""
        return f"{self.headline} {self.detail}".strip()


def verdict(sides: Sequence[Standing], figure: str, *, is_final: bool = True) -> FigureVerdict:
    """Judges at least one variant. `is_final`: whether the runs have finished.

    The best two are chosen by what is judged, so the interval is widened until the intervals of all pairs
    would hold together (Bonferroni).
    """
    best, *others = sorted(sides, key=lambda side: side.mean, reverse=True)
    score = mean_interval(best.values)
    start = "" if is_final else "So far: "
    if not others:
        headline = start + _alone(score, figure)
        return FigureVerdict(figure, best.label, score, "", None, "alone", "none", headline, "")
    other = others[0]
    num_pairs = len(sides) * (len(sides) - 1) // 2
    confidence = 1 - (1 - CONFIDENCE) / num_pairs
    gap, basis = _gap(best, other, confidence)
    outcome = _outcome(gap)
    headline = start + _headline(best, other, figure, outcome, basis)
    detail = _detail(gap, basis, is_async=best.is_async or other.is_async)
    if len(others) > 1:
        beaten = sum(_outcome(_gap(best, each, confidence)[0]) == "matters" for each in others)
        share = "all" if beaten == len(others) else f"{beaten} of the {len(others)}"
        detail += f" {best.label} exceeds {share} others by more than chance explains."
    return FigureVerdict(figure, best.label, score, other.label, gap, outcome, basis, headline, detail)


def differences(sides: Sequence[Standing], figure: str) -> list[str]:
    """Says for each variant but the first whether it differs from the first one.

    With several differences, each interval is widened so that all of them hold together (Bonferroni).
    """
    first, *others = sides
    confidence = 1 - (1 - CONFIDENCE) / max(1, len(others))
    sentences = [
        _difference(other.label, first.label, figure, difference(other.values, first.values, confidence))
        for other in others
    ]
    if len(others) > 1:
        sentences.append(
            f"The {len(others)} intervals hold together with {CONFIDENCE:.0%} confidence (Bonferroni)."
        )
    return sentences


def _gap(best: Standing, other: Standing, confidence: float) -> tuple[Interval, Basis]:
    gap = difference(best.values, other.values, confidence)
    if gap.low is not None:
        return gap, "seeds"
    # Without any spread over tasks, as with a single task, there is nothing to judge by.
    if len(best.values) == len(other.values) == 1 and best.stderr is not None and other.stderr is not None:
        spread = math.hypot(best.stderr, other.stderr)
        if spread > 0:
            spread = math.hypot(spread, *[RUN_DEVIATION for side in (best, other) if side.is_async])
            half = NormalDist().inv_cdf((1 + confidence) / 2) * spread
            return Interval(gap.mean, gap.mean - half, gap.mean + half, 1), "tasks"
    return gap, "none"


def _outcome(gap: Interval) -> Outcome:
    if gap.mean == 0:
        return "equal"
    if gap.low is None or gap.high is None:
        return "unknown"
    return "matters" if gap.low > 0 or gap.high < 0 else "chance"


# --- sentences --------------------------------------------------------------------------------------


def _alone(score: Interval, figure: str) -> str:
    if score.low is None or score.high is None:
        return f"There is only one run to judge by, with {score.mean:.3f} for {figure}."
    return (
        f"{score.num} runs of the same recipe reach {score.mean:.3f} for {figure} "
        f"({CONFIDENCE:.0%} interval {score.low:.3f} to {score.high:.3f})."
    )


def _headline(best: Standing, other: Standing, figure: str, outcome: Outcome, basis: Basis) -> str:
    if outcome == "equal":
        return f"{best.label} and {other.label} are equal for {figure}: {best.mean:.3f}."
    lead = f"{best.label} is ahead of {other.label} by {best.mean - other.mean:.3f} for {figure}"
    match outcome, basis:
        case "matters", "seeds":
            return f"{lead}, and chance does not explain it."
        case "matters", _:
            return f"{lead}, with one run each."
        case "chance", _:
            return f"{lead}, which may be chance."
        case _:
            return f"{lead}, but there are too few runs to tell this from chance."


def _detail(gap: Interval, basis: Basis, *, is_async: bool) -> str:
    if gap.low is None or gap.high is None:
        return "Run more seeds."
    within = f"{gap.low:+.3f} to {gap.high:+.3f}"
    if basis == "seeds":
        return f"The interval of the difference is {within}."
    differ = "differ" if _outcome(gap) == "matters" else "may be equal"
    noise = ""
    if is_async:
        differ = "differ by more than repetitions do" if _outcome(gap) == "matters" else "may be equal"
        noise = f", with {RUN_DEVIATION} for how much repetitions of one asynchronous run differ"
    return (
        f"On these tasks, the two models {differ} (interval {within}{noise}). Run more seeds to judge the "
        "recipes."
    )


def _difference(new: str, old: str, figure: str, gap: Interval) -> str:
    head = f"{figure}: {new} is {abs(gap.mean):.3f} {'above' if gap.mean >= 0 else 'below'} {old}"
    if gap.low is None or gap.high is None:
        return f"{head}. A single run of a variant can't tell this from chance; run more seeds."
    within = f"(interval {gap.low:+.3f} to {gap.high:+.3f})"
    if gap.low > 0 or gap.high < 0:
        return f"{head} {within}. The difference matters: chance does not explain it."
    return f"{head} {within}. This may be chance; more seeds would narrow the interval."

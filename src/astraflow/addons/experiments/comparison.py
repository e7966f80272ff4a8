"""Compares runs: groups those that differ only by their seed, and says whether their differences matter.

    runs -> variants (the same recipe but for the seed) -> mean and interval of each figure -> verdict

A figure is compared only between runs that measured the same thing: the same evaluation set, or the same
training tasks and reward. Only finished runs count, unless none is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from astraflow.addons.experiments.intervals import CONFIDENCE, Interval, mean_interval
from astraflow.addons.experiments.results import RunResult
from astraflow.addons.experiments.verdict import FigureVerdict, Standing, differences, verdict
from astraflow.errors import DataError

__all__ = ["BandPoint", "Comparison", "Member", "RunVariant", "compare", "member_of"]

_NOT_COMPARED = ("seed", "name", "view", "trackers", "dataflow.port", "weights.port")
"""Keys, or their beginnings, that make no difference to what a run learns."""
_NO_VALUE = "\u2013"
_MAX_NAMED_KEYS = 3
"""A variant that differs by more keys is called by the name of its first run."""
_MAX_POINTS = 300
"""A band of more points shows no more in a picture."""


class BandPoint(NamedTuple):
    """The mean of a variant's runs at one step, with its interval if there are several runs."""

    step: int
    mean: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Member:
    """One run, and whether it counts."""

    name: str
    state: str
    reason: str
    seed: str
    steps: int
    wall_s: float
    finals: Mapping[str, float]
    left_out: str = ""
    """Why it doesn't count; empty if it does."""
    variant: str = ""
    """Label of its variant; empty if it doesn't count."""
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    """Differing key -> this run's value."""


@dataclass(frozen=True, slots=True)
class RunVariant:
    """Runs whose recipes differ only by the seed."""

    label: str
    values: Mapping[str, str]
    """Differing key -> this variant's value."""
    runs: tuple[str, ...]
    figures: Mapping[str, Interval]
    bands: Mapping[str, tuple[BandPoint, ...]]
    """Figure -> its mean over the steps that all runs have."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that tables, pictures and pages show. Example: `compare(results).variants`."""

    keys: tuple[str, ...]
    """The keys by which the recipes differ."""
    figures: tuple[str, ...]
    """The figures that can be compared; evaluations come first."""
    variants: tuple[RunVariant, ...]
    members: tuple[Member, ...]
    verdict: FigureVerdict
    """Which variant is ahead in the first figure, and whether chance explains its lead."""
    sentences: tuple[str, ...]
    """Whether each difference from the first variant matters."""
    notes: tuple[str, ...]
    """What is left out and why, and where the intervals come from."""


def compare(results: Sequence[RunResult]) -> Comparison:
    """Compares runs. Raises: DataError if no two of them measured the same thing, or none can be read."""
    counted, reasons = _counted(results)
    is_final = all(run.state == "finished" for run in counted)
    all_keys = dict.fromkeys(key for run in counted for key in run.recipe)
    keys = [key for key in all_keys if not _is_under(key, _NOT_COMPARED) and _num_values(counted, key) > 1]
    figures, notes = _comparable_figures(counted)
    variants = _variants(counted, keys, figures)
    labels = {name: variant.label for variant in variants for name in variant.runs}
    members = [
        member_of(run, keys, left_out=reasons.get(run.name, ""), variant=labels.get(run.name, ""))
        for run in results
    ]
    if not is_final:
        notes.append("no run has finished; these are the figures so far")
    notes += [f"{name} is left out: {why}" for name, why in reasons.items()]
    if any(len(variant.runs) > 1 for variant in variants):
        notes.append(
            f"Intervals are {CONFIDENCE:.0%} intervals of the mean over seeds, from Student's t "
            "distribution; those of differences are Welch's."
        )
    sides = _sides(variants, figures[0], {run.name: run for run in counted})
    return Comparison(
        tuple(keys),
        tuple(figures),
        tuple(variants),
        tuple(members),
        verdict(sides, figures[0], is_final=is_final),
        tuple(differences(sides, figures[0])),
        tuple(notes),
    )


def member_of(run: RunResult, keys: Sequence[str] = (), *, left_out: str = "", variant: str = "") -> Member:
    """Returns what tables and pages show about one run."""
    return Member(
        run.name,
        run.state,
        run.reason,
        run.seed,
        run.steps,
        run.wall_s,
        {name: final.value for name, final in run.finals.items()},
        left_out,
        variant,
        {key: run.recipe.get(key, _NO_VALUE) for key in keys},
    )


# --- which runs and figures count -------------------------------------------------------------------


def _counted(results: Sequence[RunResult]) -> tuple[list[RunResult], dict[str, str]]:
    """Returns the runs that count, and for the others why they don't. Raises: DataError if none counts."""
    finished = [run for run in results if run.state == "finished" and run.finals]
    counted = finished or [run for run in results if run.finals]
    if not counted:
        reasons_text = "; ".join(f"{run.name}: {run.reason or 'no step yet'}" for run in results)
        raise DataError(f"no run has a result to compare ({reasons_text})")
    reasons: dict[str, str] = {}
    for run in results:
        if run in counted:
            continue
        if run.state == "finished":
            reasons[run.name] = "it has no result"
        else:
            why = f": {run.reason}" if run.reason else ""
            after = f" after {run.steps} steps" if run.steps else ""
            reasons[run.name] = f"{run.state}{after}{why}"
    return counted, reasons


def _num_values(runs: Sequence[RunResult], key: str) -> int:
    return len({run.recipe.get(key) for run in runs})


def _is_under(key: str, prefixes: Sequence[str]) -> bool:
    return any(key == prefix or key.startswith(f"{prefix}.") for prefix in prefixes)


def _comparable_figures(runs: Sequence[RunResult]) -> tuple[list[str], list[str]]:
    """Returns the figures that all runs have and measured alike, and notes on the others.

    Raises: DataError if there is none.
    """
    names = dict.fromkeys(name for run in runs for name in run.finals)
    figures: list[str] = []
    notes: list[str] = []
    for name in names:
        missing = [run.name for run in runs if name not in run.finals]
        unlike = [key for key in dict.fromkeys(key for run in runs for key in run.recipe)
                  if _num_values(runs, key) > 1 and _decides(key, name, runs)]  # fmt: skip
        if missing:
            notes.append(f"{name} is not compared: {_listed(missing)} did not measure it")
        elif unlike:
            notes.append(f"{name} is not comparable: the runs differ by {_listed(unlike)}")
        else:
            figures.append(name)
    if not figures:
        raise DataError(f"these runs can't be compared: {'; '.join(notes)}")
    return figures, notes


def _decides(key: str, figure: str, runs: Sequence[RunResult]) -> bool:
    """Checks whether a key decides what a figure measures."""
    eval_set = next(run.finals[figure].eval_set for run in runs if figure in run.finals)
    if not eval_set:
        return _is_under(key, ["tasks"]) and not _is_under(key, ["tasks.curators"])
    own = f"eval.sets.{eval_set}"
    if _is_under(key, [own]):
        return True
    # An evaluation set takes the training tasks' reward unless it names its own.
    is_reward = _is_under(key, ["tasks.reward", "tasks.extract"])
    return is_reward and any(run.recipe.get(f"{own}.reward.name") == "training" for run in runs)


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# --- variants ---------------------------------------------------------------------------------------


def _variants(runs: Sequence[RunResult], keys: Sequence[str], figures: Sequence[str]) -> list[RunVariant]:
    groups: dict[tuple[str, ...], list[RunResult]] = {}
    for run in runs:
        groups.setdefault(tuple(run.recipe.get(key, _NO_VALUE) for key in keys), []).append(run)
    short = _short_names(keys)
    variants: list[RunVariant] = []
    for values, own in groups.items():
        label = ", ".join(f"{short[key]}={value}" for key, value in zip(keys, values, strict=True))
        if len(keys) > _MAX_NAMED_KEYS or not label:
            label = own[0].name if len(groups) > 1 else "all runs"
        variants.append(
            RunVariant(
                label,
                dict(zip(keys, values, strict=True)),
                tuple(run.name for run in own),
                {name: mean_interval([run.finals[name].value for run in own]) for name in figures},
                {name: _band([dict(run.curves[name]) for run in own]) for name in figures},
            )
        )
    return variants


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Maps each key to its shortest ending that no other key has."""
    short: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        endings = (".".join(parts[-num:]) for num in range(1, len(parts) + 1))
        others = [other for other in keys if other != key]
        short[key] = next(
            (end for end in endings if not any(f".{other}".endswith(f".{end}") for other in others)), key
        )
    return short


def _band(curves: Sequence[Mapping[int, float]]) -> tuple[BandPoint, ...]:
    steps = sorted(set(curves[0]).intersection(*curves[1:]))
    every = -(-len(steps) // _MAX_POINTS) or 1
    # Counted from the end, so that the last step is always there.
    steps = steps[::-1][::every][::-1]
    points: list[BandPoint] = []
    for step in steps:
        interval = mean_interval([curve[step] for curve in curves])
        points.append(BandPoint(step, interval.mean, interval.low, interval.high))
    return tuple(points)


def _sides(variants: Sequence[RunVariant], figure: str, runs: Mapping[str, RunResult]) -> list[Standing]:
    sides: list[Standing] = []
    for variant in variants:
        finals = [runs[name].finals[figure] for name in variant.runs]
        stderr = finals[0].stderr if len(finals) == 1 else None
        is_async = any(
            key.endswith(".table.max_staleness") and value != "0"
            for name in variant.runs
            for key, value in runs[name].recipe.items()
        )
        sides.append(Standing(variant.label, tuple(final.value for final in finals), stderr, is_async))
    return sides

"""Numbers for the summary of a run: wall time, overlap of generation and training, staleness, tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.dataflow.accounting import Amounts
from astraflow.dataflow.audit import AuditReport
from astraflow.dataflow.journal.journal_db import TelemetryRow
from astraflow.dataflow.journal.reader import JournalReader

__all__ = ["RunFigures", "intersection", "run_figures", "total_s", "union"]

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What the summary of a run reports in addition to its scores."""

    rl_wall_s: float
    """Time from the first training lease to the last committed step, without interruptions of the run."""
    generate_s: float
    """Part of `rl_wall_s` during which at least one rollout service generated."""
    train_s: float
    """Part of `rl_wall_s` during which at least one trainer trained."""
    overlap_frac: float
    """Share of `rl_wall_s` during which both happened."""
    amounts: Amounts
    """Those of all policies together."""
    waits_s: dict[tuple[str, str], float]
    """Seconds within `rl_wall_s` that a source waited for another, by who waited and for whom."""

    def share(self, seconds: float) -> float:
        """Returns a part of `rl_wall_s` as a share of it, from 0 to 1."""
        return seconds / self.rl_wall_s if self.rl_wall_s else 0.0


def run_figures(folder: Path, report: AuditReport, active: Sequence[Interval] = ()) -> RunFigures:
    """Computes the numbers of an audited journal folder.

    `active` are the periods in which the run was not interrupted. If none overlaps with the journal's, for
    example because the launcher was killed before it wrote any, the whole time counts.

    Raises: JournalError if the journal cannot be read.
    """
    with JournalReader(folder) as reader:
        rows = reader.telemetry()
    wall = (report.first_lease_s, max(report.first_lease_s, report.last_commit_s))
    within = [wall] if report.first_lease_s and report.last_commit_s else []
    within = intersection(within, union(active)) or within
    generate = intersection(within, union(_spans(rows, "generate")))
    train = intersection(within, union(_spans(rows, "train")))
    wall_s = total_s(within)
    trained = [policy.fates.trained for policy in report.policies]
    gradient = [policy.gradient_tokens for policy in report.policies]
    known = [num for num in gradient if num is not None]
    mean = sum(p.fates.trained * p.staleness_mean for p in report.policies) / max(1, sum(trained))
    return RunFigures(
        rl_wall_s=wall_s,
        generate_s=total_s(generate),
        train_s=total_s(train),
        overlap_frac=total_s(intersection(generate, train)) / wall_s if wall_s else 0.0,
        amounts=Amounts(
            staleness_mean=round(mean, 4),
            staleness_max=max((policy.staleness_max for policy in report.policies), default=0),
            staleness_bound=max((policy.staleness_bound for policy in report.policies), default=0),
            generated_tokens=sum(policy.generated_tokens for policy in report.policies),
            committed_tokens=sum(policy.committed_tokens for policy in report.policies),
            gradient_tokens=sum(known) if len(known) == len(gradient) else None,
        ),
        waits_s=_waits(rows, within),
    )


def union(spans: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals that cover the same times, in order. Example: `[(0, 2), (1, 3)]` -> `[(0, 3)]`."""
    merged: list[Interval] = []
    for start, end in sorted(span for span in spans if span[1] > span[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """The times that lie in both arguments. The intervals of each must be disjoint and in order."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if end > start:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def total_s(spans: Iterable[Interval]) -> float:
    """Sum of the lengths of disjoint intervals."""
    return sum(end - start for start, end in spans)


def _spans(rows: list[TelemetryRow], kind: str) -> list[Interval]:
    return [(row.span.start_s, row.span.end_s) for row in rows if row.span.kind == kind]


def _waits(rows: list[TelemetryRow], within: list[Interval]) -> dict[tuple[str, str], float]:
    spans: dict[tuple[str, str], list[Interval]] = {}
    for row in rows:
        if row.span.kind.startswith("wait:"):
            key = (row.source, row.span.kind.removeprefix("wait:"))
            spans.setdefault(key, []).append((row.span.start_s, row.span.end_s))
    return {key: total_s(intersection(within, union(intervals))) for key, intervals in sorted(spans.items())}

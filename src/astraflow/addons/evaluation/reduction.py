"""Combines the metrics of several episodes by their reductions."""

import math
from collections.abc import Iterable, Sequence

from astraflow.errors import WireError
from astraflow.types import PERCENTILES, MetricItem, Reduction

__all__ = ["reduce_metrics"]


def reduce_metrics(groups: Iterable[Sequence[MetricItem]]) -> tuple[MetricItem, ...]:
    """One item per name, in the order of first appearance, reduced over the groups that have the name.

    If any value is NaN, so is the result, except for `last`, which is the value of the last group that has
    the name.

    Example: `reduce_metrics(episode.metrics for episode in episodes)`.

    Raises: WireError if a name comes with two reductions.
    """
    by_name: dict[str, tuple[Reduction, list[float]]] = {}
    for group in groups:
        for item in group:
            reduction, values = by_name.setdefault(item.name, (item.reduction, []))
            if reduction != item.reduction:
                raise WireError(
                    f"metric {item.name!r} has reductions {reduction!r} and {item.reduction!r}; use one"
                )
            values.append(item.value)
    return tuple(
        MetricItem(name, _reduce(reduction, values), reduction)
        for name, (reduction, values) in by_name.items()
    )


def _reduce(reduction: Reduction, values: Sequence[float]) -> float:
    if reduction == "last":
        return values[-1]
    # Without this, the position of a NaN would decide whether `max` and `min` return it.
    if any(math.isnan(value) for value in values):
        return math.nan
    match reduction:
        case "mean":
            return math.fsum(values) / len(values)
        case "sum":
            return math.fsum(values)
        case "max":
            return max(values)
        case "min":
            return min(values)
        case "p50" | "p95":
            # The nearest rank: the smallest value that at least this share of all values do not exceed.
            return sorted(values)[math.ceil(PERCENTILES[reduction] * len(values)) - 1]

"""Sums of the metrics of many episodes, reduced to one number per name.

Workflows choose the names of their metrics, and may even use one name per task. The caller therefore limits
the number of names. Values of further names are left out and counted.

Percentiles (`p50`, `p95`) are meant for times and sizes. Values are counted in bins, 16 per doubling, so a
sum stays small for any number of values. A percentile is off by at most 3.2 %. Values below 1e-6 count as 0,
and values above 1e12 as 1e12.
"""

import math
from collections.abc import Mapping, Sequence

from astraflow.dataflow.core.finite import clamp
from astraflow.dataflow.core.state import MetricSum
from astraflow.types import PERCENTILES, MetricItem
from astraflow.types.bounds import as_label

__all__ = ["add_metrics", "reduce_sums"]


def add_metrics(sums: dict[str, MetricSum], metrics: Sequence[MetricItem], *, most: int) -> int:
    """Adds an episode's metrics to `sums`, up to `most` names. Returns how many had no room.

    A name keeps the reduction of its first value.
    """
    num_left_out = 0
    for item in metrics:
        total = sums.get(item.name)
        if total is not None:
            _add(total, item.value)
        elif len(sums) < most:
            total = MetricSum(value=item.value, num=1, reduction=item.reduction)
            sums[item.name] = total
            if item.reduction in PERCENTILES:
                _count(total, item.value)
        else:
            num_left_out += 1
    return num_left_out


def _add(total: MetricSum, value: float) -> None:
    total.num += 1
    if total.reduction in PERCENTILES:
        _count(total, value)
    elif total.reduction in {"mean", "sum"}:
        total.value += value
    elif total.reduction == "last":
        total.value = value
    elif total.reduction == "max":
        total.value = max(total.value, value)
    else:
        total.value = min(total.value, value)


def reduce_sums(sums: dict[str, MetricSum], *, prefix: str = "") -> tuple[MetricItem, ...]:
    """Reduces each sum to one item, in the order of the names' first values."""
    items: list[MetricItem] = []
    for name, total in sums.items():
        # The prefix may make a name longer than the limit, so `as_label` cuts it.
        items.append(MetricItem(as_label(f"{prefix}{name}"), clamp(_value(total)), total.reduction))
    return tuple(items)


def _value(total: MetricSum) -> float:
    if total.reduction == "mean":
        return total.value / total.num
    if total.reduction in PERCENTILES:
        return _percentile(total.bins, PERCENTILES[total.reduction])
    return total.value


_BINS_PER_DOUBLING = 16
_SMALLEST = 1e-6
_LARGEST = 1e12
_ZERO = -(2**31)
"""The bin of values below the smallest."""


def _count(total: MetricSum, value: float) -> None:
    place = _bin(value)
    total.bins[place] = total.bins.get(place, 0) + 1


def _bin(value: float) -> int:
    """The bin of a value. `frexp` is exact, so every machine finds the same bin."""
    if value < _SMALLEST:
        return _ZERO
    fraction, exponent = math.frexp(min(value, _LARGEST))  # the fraction is 0.5 to 1
    return exponent * _BINS_PER_DOUBLING + int((fraction - 0.5) * 2 * _BINS_PER_DOUBLING)


def _middle(place: int) -> float:
    """The middle of a bin."""
    if place == _ZERO:
        return 0.0
    exponent, step = divmod(place, _BINS_PER_DOUBLING)
    return math.ldexp(0.5 + (step + 0.5) / (2 * _BINS_PER_DOUBLING), exponent)


def _percentile(bins: Mapping[int, int], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed (nearest rank)."""
    rank = math.ceil(share * sum(bins.values()))
    for place in sorted(bins):
        rank -= bins[place]
        if rank <= 0:
            return _middle(place)
    raise AssertionError("a sum has at least one value")

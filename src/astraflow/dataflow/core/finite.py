"""Sums of finite numbers that stay finite, however large the numbers are.

A score or reward may be near the largest float. Its square raises OverflowError, and a sum may become
infinite, which JSON does not know. Where nothing overflows, results are those of the plain formula, to the
last bit: a replay of a journal must give the same events.
"""

import math
from collections.abc import Iterable, Sequence

from astraflow.types.bounds import MAX_METRIC

__all__ = ["bounded", "finite_mean", "finite_sum", "standard_error"]

_LARGEST = MAX_METRIC
_SCALE = 2.0**64
"""More than there are numbers in any sum here. It is a power of two, so that scaling rounds nothing."""


def bounded(value: float) -> float:
    """The value, cut to +-MAX_METRIC."""
    return max(-_LARGEST, min(_LARGEST, value))


def finite_sum(values: Iterable[float]) -> float:
    """The sum, cut to +-MAX_METRIC."""
    held = list(values)
    total = sum(held)
    if math.isfinite(total):
        return bounded(total)
    # Partial sums may overflow where the whole does not.
    return bounded(sum(value / _SCALE for value in held) * _SCALE)


def finite_mean(values: Sequence[float]) -> float:
    """The mean of at least one value."""
    total = sum(values)
    if math.isfinite(total):
        return bounded(total / len(values))
    return bounded(sum(value / len(values) for value in values))


def standard_error(values: Sequence[float]) -> float:
    """Sample deviation divided by sqrt(number); 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    try:
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    except OverflowError:
        variance = math.inf
    if math.isfinite(variance):
        return bounded(math.sqrt(variance / len(values)))
    largest = max(map(abs, values))
    return bounded(standard_error([v / largest for v in values]) * largest)

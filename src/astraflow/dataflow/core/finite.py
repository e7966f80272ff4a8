"""Sums of finite numbers that stay finite, however large the numbers are.

A score or reward may be close to the largest float. Its square raises OverflowError, and a sum may become
infinite, which JSON cannot represent. Without an overflow, results equal those of the plain formula to the
last bit, because the replay of a journal must give the same events.
"""

import math
from collections.abc import Iterable, Sequence

from astraflow.types.bounds import MAX_METRIC

__all__ = ["clamp", "finite_mean", "finite_sum", "standard_error"]

_LARGEST = MAX_METRIC
_SCALE = 2.0**64
"""Larger than the number of values in any sum. A power of two, so that scaling is exact."""


def clamp(value: float) -> float:
    """Limits a value to +-MAX_METRIC."""
    return max(-_LARGEST, min(_LARGEST, value))


def finite_sum(values: Iterable[float]) -> float:
    """The sum, limited to +-MAX_METRIC."""
    numbers = list(values)
    total = sum(numbers)
    if math.isfinite(total):
        return clamp(total)
    # Partial sums may overflow even if the total does not.
    return clamp(sum(value / _SCALE for value in numbers) * _SCALE)


def finite_mean(values: Sequence[float]) -> float:
    """The mean of one or more values, limited to +-MAX_METRIC."""
    total = sum(values)
    if math.isfinite(total):
        return clamp(total / len(values))
    return clamp(sum(value / len(values) for value in values))


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean: sample deviation / sqrt(number). 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    try:
        mean = sum(values) / len(values)
        variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    except OverflowError:
        variance = math.inf
    if math.isfinite(variance):
        return clamp(math.sqrt(variance / len(values)))
    largest = max(map(abs, values))
    return clamp(standard_error([v / largest for v in values]) * largest)

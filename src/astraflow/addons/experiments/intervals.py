"""Confidence intervals of means and of differences between means.

A run's final score is one sample per seed. With so few samples, an interval must come from Student's t
distribution: a normal interval over three seeds would be half as wide as it should be.
"""

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CONFIDENCE", "Interval", "difference", "mean_interval", "t_quantile"]

CONFIDENCE = 0.95
_MAX_DF = 400
"""The quantile of more degrees of freedom differs from this one's by less than 1 %."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and where the true mean lies with the given confidence.

    Example: `mean_interval([0.5, 0.6, 0.7])` is 0.6 within 0.352 and 0.848.
    """

    mean: float
    low: float | None
    """None if the samples don't tell, as a single one."""
    high: float | None
    num: int
    """Number of samples."""


@functools.lru_cache(maxsize=4096)
def t_quantile(confidence: float, df: int) -> float:
    """Returns t such that Student's t with `df` degrees of freedom lies within -t and t this often.

    The probability is the finite series of Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3
    and 26.7.4, inverted by bisection.
    """
    low = 0.0
    high = 1.0
    df = min(df, _MAX_DF)
    while _within(high, df) < confidence:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, df) < confidence:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, df: int) -> float:
    """Probability that Student's t lies within -t and t."""
    angle = math.atan(t / math.sqrt(df))
    cos = math.cos(angle)
    is_odd = df % 2 == 1
    term = cos if is_odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(3 if is_odd else 2, df - 1, 2):
        term *= cos * cos * ((k - 1) / k)
        total += term
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def mean_interval(samples: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Returns the mean of at least one sample, with its t interval if there are two or more."""
    mean = statistics.fmean(samples)
    num = len(samples)
    if num < 2:
        return Interval(mean, None, None, num)
    # `statistics.stdev` computes with fractions, which takes most of the time of a band with many points.
    deviation = math.sqrt(math.fsum((sample - mean) ** 2 for sample in samples) / (num - 1))
    half = t_quantile(confidence, num - 1) * deviation / math.sqrt(num)
    return Interval(mean, mean - half, mean + half, num)


def difference(new: Sequence[float], old: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Returns by how much the mean of `new` exceeds that of `old`, with Welch's interval.

    Welch's interval (Biometrika 34, 1947) doesn't assume that both vary equally. Its degrees of freedom are
    rounded down, which makes it wider. A side with a single sample leaves the interval unknown.
    """
    gap = statistics.fmean(new) - statistics.fmean(old)
    num = min(len(new), len(old))
    if num < 2:
        return Interval(gap, None, None, num)
    parts = [(statistics.variance(side) / len(side), len(side) - 1) for side in (new, old)]
    squared = sum(part for part, _ in parts)
    if squared == 0:
        return Interval(gap, gap, gap, num)
    df = squared**2 / sum(part**2 / free for part, free in parts)
    half = t_quantile(confidence, max(1, math.floor(df))) * math.sqrt(squared)
    return Interval(gap, gap - half, gap + half, num)

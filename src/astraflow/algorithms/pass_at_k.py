"""pass@1, avg@k and unbiased pass@k of scored samples, with 95 % intervals. Pure and deterministic.

The intervals are over tasks. They are for the mean of a task-level value over the population of tasks that
the set was drawn from, and the samples of one task are not independent. `estimate` uses Wilson's interval
with an effective number of draws: it stays within [0, 1], and its width stays above 0 even if every task
agrees.
"""

import math
from collections.abc import Sequence

from astraflow.types import Item
from astraflow.types.facts import is_right

__all__ = ["Estimate", "estimate", "pass_at_k", "pass_estimates", "powers_up_to"]

_Z = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


class Estimate(Item, frozen=True):
    """A mean over tasks and its 95 % interval. Example: `Estimate(0.75, 0.62, 0.85)`."""

    mean: float
    low: float
    high: float


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Chance that at least one of `k` samples passes, drawn without replacement from the `num_samples`.

    1 - C(n - c, k) / C(n, k) = 1 - prod_{i = n - c + 1}^{n} (1 - k / i);  n samples, of which c passed

    This is an unbiased estimate of 1 - (1 - p)^k; 1 - (1 - c / n)^k is not.
    Raises: ValueError unless 1 <= k <= n and 0 <= c <= n.
    Source: Chen et al. 2021 (arXiv:2107.03374), eq. 1.
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(f"pass@{k} is not defined for {num_passed} passed of {num_samples} samples")
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_passed + 1, num_samples + 1))


def powers_up_to(num_samples: int) -> tuple[int, ...]:
    """The values of `k` to report for `num_samples` samples per task: the powers of 2, and `num_samples`."""
    powers = [1 << i for i in range(num_samples.bit_length()) if 1 << i <= num_samples]
    return tuple(sorted({*powers, num_samples})) if num_samples > 0 else ()


def pass_estimates(scores: Sequence[Sequence[float]], *, samples: int) -> dict[int, Estimate]:
    """pass@k for every reported `k`, from the scores of each task's samples that did not fail.

    `samples` is the number of samples requested per task. pass@k leaves out tasks with fewer than `k` scored
    samples, and the result leaves out a `k` for which no task has enough.
    """
    counts = [(len(own), sum(map(is_right, own))) for own in scores]
    estimates: dict[int, Estimate] = {}
    for k in powers_up_to(samples):
        usable = [(num, passed) for num, passed in counts if num >= k]
        if usable:
            values = [pass_at_k(num, passed, k) for num, passed in usable]
            estimates[k] = estimate(values, num_draws=sum(num for num, _ in usable))
    return estimates


def estimate(values: Sequence[float], *, num_draws: int) -> Estimate:
    """Mean p of one value per task, with its 95 % interval. `num_draws`: samples behind all m values.

    Values in [0, 1]: Wilson's score interval with n = m p (1 - p) / var draws, where var is the mean squared
    deviation over the m tasks. n is clipped to [m, num_draws]. It is m if every value is 0 or 1 or if all
    tasks agree on 0 or 1, and more if several samples per task reduce the noise.
    Other values: p +- 1.96 sqrt(var / (m - 1)).
    Sources: Wilson 1927; effective sample size: Korn & Graubard 1998.
    Raises: ValueError without values.
    """
    if not values:
        raise ValueError("an estimate needs at least one task")
    num = len(values)
    mean = math.fsum(values) / num
    variance = math.fsum((value - mean) ** 2 for value in values) / num
    if min(values) < 0 or max(values) > 1:
        error = _Z * math.sqrt(variance / max(1, num - 1))
        return Estimate(mean, mean - error, mean + error)
    return _wilson(mean, _effective_draws(num, mean, variance, most=max(num, num_draws)))


def _effective_draws(num: int, mean: float, variance: float, *, most: int) -> float:
    spread = mean * (1 - mean)
    if spread <= 0:
        return num
    if variance * most <= spread * num:
        return most
    return max(num, num * spread / variance)


def _wilson(mean: float, num: float) -> Estimate:
    square = _Z * _Z / num
    center = (mean + square / 2) / (1 + square)
    half = _Z / (1 + square) * math.sqrt(mean * (1 - mean) / num + square / (4 * num))
    return Estimate(mean, max(0.0, min(mean, center - half)), min(1.0, max(mean, center + half)))

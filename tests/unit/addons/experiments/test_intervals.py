"""Confidence intervals against published tables and worked examples."""

import pytest

from astraflow.addons.experiments.intervals import difference, mean_interval, t_quantile


@pytest.mark.parametrize(
    ("df", "expected"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042), (100, 1.984)],
)
def test_the_quantile_is_that_of_the_tables(df: int, expected: float) -> None:
    assert t_quantile(0.95, df) == pytest.approx(expected, abs=6e-4)


def test_a_small_sample_has_a_wide_interval() -> None:
    interval = mean_interval([0.5, 0.6, 0.7])
    assert (interval.mean, interval.num) == (pytest.approx(0.6), 3)
    assert (interval.low, interval.high) == (pytest.approx(0.3516, abs=1e-4), pytest.approx(0.8484, abs=1e-4))


def test_one_sample_has_no_interval() -> None:
    assert (mean_interval([0.5]).low, difference([0.5], [0.1, 0.2]).low) == (None, None)


def test_welch_takes_the_degrees_of_freedom_of_unequal_variances() -> None:
    # Variances 10/3 and 1/3 over 4: 0.9167 of variance, 3.6 degrees of freedom, rounded down to 3.
    gap = difference([1.0, 2.0, 3.0, 5.0], [10.0, 10.5, 11.0, 11.5])
    half = 3.182446 * (2.916667 / 4 + 0.416667 / 4) ** 0.5
    assert gap.mean == pytest.approx(-8.0)
    assert (gap.low, gap.high) == (pytest.approx(-8 - half, abs=1e-4), pytest.approx(-8 + half, abs=1e-4))


def test_samples_without_variance_have_an_exact_interval() -> None:
    gap = difference([2.0, 2.0], [1.0, 1.0])
    assert (gap.low, gap.high) == (1.0, 1.0)

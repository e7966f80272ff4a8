"""pass@k by hand, by enumeration, and the intervals around means over tasks."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.pass_at_k import Estimate, estimate, pass_at_k, pass_estimates, powers_up_to
from astraflow.types.facts import is_right


@pytest.mark.parametrize(
    ("num_samples", "num_passed", "k", "expected"),
    [(1, 1, 1, 1.0), (1, 0, 1, 0.0), (4, 1, 1, 0.25), (4, 1, 2, 0.5), (5, 2, 3, 0.9), (10, 8, 3, 1.0)],
)
def test_pass_at_k_is_what_is_counted_by_hand(num_samples: int, num_passed: int, k: int, expected: float):
    assert pass_at_k(num_samples, num_passed, k) == pytest.approx(expected)


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(num_samples: int, data: st.DataObject):
    num_passed = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    subsets = list(itertools.combinations(range(num_samples), k))
    share = sum(min(subset) < num_passed for subset in subsets) / len(subsets)
    assert pass_at_k(num_samples, num_passed, k) == pytest.approx(share)


@pytest.mark.parametrize(("num_samples", "k"), [(4, 2), (6, 5)])
def test_pass_at_k_is_unbiased(num_samples: int, k: int):
    chance = 0.3
    expected = sum(
        math.comb(num_samples, c)
        * chance**c
        * (1 - chance) ** (num_samples - c)
        * pass_at_k(num_samples, c, k)
        for c in range(num_samples + 1)
    )
    assert expected == pytest.approx(1 - (1 - chance) ** k)


@pytest.mark.parametrize(("num_samples", "num_passed", "k"), [(2, 1, 3), (2, 3, 1), (2, 1, 0)])
def test_pass_at_k_that_is_not_defined_is_refused(num_samples: int, num_passed: int, k: int):
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(num_samples, num_passed, k)


def test_reported_ks_are_powers_of_two_and_all_samples():
    assert powers_up_to(0) == ()
    assert powers_up_to(1) == (1,)
    assert powers_up_to(6) == (1, 2, 4, 6)
    assert powers_up_to(8) == (1, 2, 4, 8)


def test_partial_credit_does_not_pass_and_short_tasks_are_left_out_of_larger_ks():
    found = pass_estimates([[1.0, 0.9], [1.0], [0.0, 0.0]], samples=2)
    assert found[1].mean == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert found[2].mean == pytest.approx(0.5)  # of the tasks with two good samples
    assert pass_estimates([[1.0]], samples=2).keys() == {1}
    assert pass_estimates([], samples=2) == {}


def test_the_interval_of_single_samples_is_wilsons():
    found = estimate([1.0] * 8 + [0.0] * 2, num_draws=10)
    assert found.mean == pytest.approx(0.8)
    assert (found.low, found.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))


def test_an_interval_keeps_a_width_where_all_tasks_agree():
    assert estimate([1.0] * 16, num_draws=16).low == pytest.approx(16 / (16 + 1.96**2), abs=1e-4)
    assert estimate([0.0] * 16, num_draws=64).high < 0.2


def test_more_samples_a_task_narrow_the_interval_but_no_more_than_independent_draws():
    single = estimate([1.0, 0.0] * 8, num_draws=16)
    averaged = estimate([0.5] * 16, num_draws=64)
    assert averaged.high - averaged.low < single.high - single.low
    assert averaged == estimate([1.0, 0.0] * 32, num_draws=64)


def test_scores_outside_0_to_1_get_a_normal_interval():
    found = estimate([2.0, 4.0], num_draws=2)
    assert found == Estimate(3.0, pytest.approx(3 - 1.96, abs=1e-3), pytest.approx(3 + 1.96, abs=1e-3))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=40), st.integers(1, 8))
def test_an_interval_holds_its_mean_and_stays_within_0_and_1(values: list[float], samples: int):
    found = estimate(values, num_draws=len(values) * samples)
    assert 0 <= found.low <= found.mean <= found.high <= 1


def test_an_estimate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one task"):
        estimate([], num_draws=0)


@pytest.mark.parametrize(
    ("score", "is_passed"), [(1.0, True), (0.7 + 0.2 + 0.1, True), (1.5, True), (0.99, False), (0.5, False)]
)
def test_a_sample_passes_if_a_workflow_takes_its_answer_for_right(score: float, *, is_passed: bool) -> None:
    assert is_right(score) is is_passed
    assert pass_estimates([[score]], samples=1)[1].mean == float(is_passed)

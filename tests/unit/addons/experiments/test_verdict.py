"""Verdicts: which variant is ahead, and whether chance explains its lead."""

import pytest

from astraflow.addons.experiments.verdict import Standing, differences, verdict

FIGURE = "actor on heldout"
LOW = Standing("low", (0.50, 0.52, 0.54))
HIGH = Standing("high", (0.80, 0.82, 0.84))


def test_a_lead_beyond_the_spread_of_seeds_matters() -> None:
    found = verdict([LOW, HIGH], FIGURE)
    assert (found.best, found.other, found.outcome, found.basis) == ("high", "low", "matters", "seeds")
    assert found.gap is not None
    assert found.gap.mean == pytest.approx(0.3)
    assert found.text == (
        "high is ahead of low by 0.300 for actor on heldout, and chance does not explain it. "
        "The interval of the difference is +0.255 to +0.345."
    )


def test_a_lead_within_the_spread_of_seeds_may_be_chance() -> None:
    found = verdict([Standing("a", (0.2, 0.8)), Standing("b", (0.3, 0.8))], FIGURE)
    assert (found.best, found.outcome) == ("b", "chance")
    assert "may be chance" in found.headline


def test_of_three_variants_the_best_two_are_judged_and_all_pairs_widen_the_interval() -> None:
    near = Standing("near", (0.81, 0.83, 0.85))
    found = verdict([LOW, HIGH, near], FIGURE)
    assert (found.best, found.other, found.outcome) == ("near", "high", "chance")
    assert "near exceeds 1 of the 2 others by more than chance explains." in found.text
    alone = verdict([HIGH, near], FIGURE)
    assert found.gap is not None
    assert alone.gap is not None
    assert (found.gap.high or 0) > (alone.gap.high or 0)


def test_one_run_each_is_judged_over_the_tasks_that_both_answered() -> None:
    found = verdict([Standing("a", (0.5,), 0.03), Standing("b", (0.9,), 0.04)], FIGURE)
    assert (found.best, found.outcome, found.basis) == ("b", "matters", "tasks")
    assert found.gap is not None
    assert found.gap.low == pytest.approx(0.4 - 1.96 * 0.05, abs=1e-4)
    assert "the two models differ (interval +0.302 to +0.498). Run more seeds" in found.text


def test_one_asynchronous_run_each_differs_by_more_than_repetitions_of_one_run_do() -> None:
    low, high = Standing("a", (0.7,), 0.01, is_async=True), Standing("b", (0.8,), 0.01, is_async=True)
    found = verdict([low, high], FIGURE)
    assert found.outcome == "chance"  # without the repetitions, 0.1 would be 7 standard errors
    assert "(interval -0.041 to +0.241, with 0.05 for how much repetitions" in found.text
    far = verdict([low, Standing("b", (0.9,), 0.01, is_async=True)], FIGURE)
    assert "differ by more than repetitions do" in far.text


@pytest.mark.parametrize(
    "sides",
    [
        (Standing("a", (0.5,)), Standing("b", (0.9,))),
        (Standing("a", (0.5,), 0.0), Standing("b", (0.9,), 0.0)),  # a single task has no spread
        (Standing("a", (0.5,), 0.1), HIGH),
    ],
)
def test_without_a_spread_nothing_is_judged(sides: tuple[Standing, Standing]) -> None:
    found = verdict(sides, FIGURE)
    assert (found.outcome, found.basis) == ("unknown", "none")
    assert found.detail == "Run more seeds."


def test_a_single_variant_has_nobody_to_lead() -> None:
    found = verdict([LOW], FIGURE)
    assert (found.other, found.gap, found.outcome) == ("", None, "alone")
    assert found.headline.startswith("3 runs of the same recipe reach 0.520 for actor on heldout")
    assert verdict([Standing("a", (0.5,))], FIGURE).headline.startswith("There is only one run")


def test_equal_variants_are_said_to_be_equal() -> None:
    for sides in (
        [Standing("a", (0.5,)), Standing("b", (0.5,))],
        [Standing("a", (0.4, 0.6)), Standing("b", (0.3, 0.7))],
    ):
        found = verdict(sides, FIGURE)
        assert found.outcome == "equal"
        assert found.headline.startswith("a and b are equal")


def test_unfinished_runs_are_judged_so_far() -> None:
    assert verdict([LOW, HIGH], FIGURE, is_final=False).headline.startswith("So far: high is ahead")


def test_one_variant_differs_from_nothing() -> None:
    assert differences([LOW], FIGURE) == []


def test_one_side_with_a_single_run_is_enough_to_leave_the_difference_open() -> None:
    (text,) = differences([Standing("a", (0.1, 0.2, 0.3)), Standing("b", (0.5,))], FIGURE)
    assert "A single run of a variant can't tell this from chance" in text

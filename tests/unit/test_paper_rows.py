"""The rows of `make paper`: their recipes, how results are kept, and how they are judged."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import paper
from arms import Arm, Found, reached
from astraflow.errors import Error
from paper_rows import ROWS, Row


def result(*points: tuple[float, float], **figures: float) -> dict[str, Any]:
    """A result with (spent, score) points."""
    return {
        "points": [{"set": "heldout", "rollouts": spent, "step": spent, "score": s} for spent, s in points],
        "figures": figures,
        "others_load": 0.0,
    }


def row(*arms: str) -> Row:
    """A row whose arms can't run, because there is no such recipe."""
    made = tuple(Arm(name=name, recipe="none/such", changes={}) for name in arms)
    return Row(name="some", title="Some", text="Text.", minutes=1, arms=made, judge=lambda _: ("half", "it"))


def write(folder: Path, seed: int, names: Sequence[str]) -> None:
    own = {name: result((0, 0.1), (10, 0.5)) for name in names}
    paper.write(paper.path_of(folder, row(), seed), {"arms": own})


@pytest.mark.parametrize("name", [each.name for each in ROWS if each.arms])
def test_every_arm_is_a_valid_recipe(name: str) -> None:
    (found,) = [each for each in ROWS if each.name == name]
    names = [arm.name for arm in found.arms]
    assert len({*names}) == len(names) > 1
    for arm in found.arms:
        recipe = arm.recipe_of(3, 2)
        assert recipe.seed == 3
        assert {policy.train.steps for policy in recipe.trained.values()} == {2}


def test_arms_that_have_a_result_are_not_run_again_and_those_without_are(tmp_path: Path) -> None:
    write(tmp_path, 0, ["a", "b"])
    paper.run_arms(row("a", "b"), 0, tmp_path, (), 0)
    with pytest.raises((Error, OSError), match="such"):
        paper.run_arms(row("a", "c"), 0, tmp_path, (), 0)
    with pytest.raises((Error, OSError), match="such"):
        paper.run_arms(row("a", "b"), 1, tmp_path, (), 0)


def test_a_row_is_judged_by_the_seeds_that_have_every_arm(tmp_path: Path) -> None:
    assert paper.verdict_of(row("a", "b"), tmp_path) == "**Not run yet**"
    write(tmp_path, 0, ["a"])
    assert paper.verdict_of(row("a", "b"), tmp_path) == "**Not run yet**"
    write(tmp_path, 0, ["a", "b"])
    assert paper.verdict_of(row("a", "b"), tmp_path) == "**Half shown** (1 of 3 seeds): it"
    for seed in (1, 2):
        write(tmp_path, seed, ["a", "b"])
    assert paper.verdict_of(row("a", "b"), tmp_path) == "**Half shown**: it"


def test_a_score_is_reached_at_the_second_evaluation_in_a_row() -> None:
    assert reached([(0, 0.1), (10, 0.5), (20, 0.3), (30, 0.5), (40, 0.6)], 0.5) == 40
    assert reached([(0, 0.1), (10, 0.5)], 0.5) == math.inf


def test_arms_are_compared_at_equal_budgets() -> None:
    found = Found({
        "slow": [result((0, 0.2), (10, 0.4), (20, 0.8))],
        "quick": [result((0, 0.2), (40, 1.0)), result((0, 0.2), (40, 0.6))],
    })  # fmt: skip
    assert found.least("rollouts", ["slow", "quick"]) == 20
    assert found.after("slow", "rollouts", 15) == pytest.approx(0.6)
    assert found.after("quick", "rollouts", 20) == pytest.approx((0.6 + 0.4) / 2)
    assert found.final("quick") == pytest.approx(0.8)

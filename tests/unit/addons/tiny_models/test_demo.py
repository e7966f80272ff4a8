"""What the demo says about its result and about what it needs; whole demos are system tests."""

from pathlib import Path

import pytest

from astraflow.addons.tiny_models import demo


@pytest.mark.parametrize(
    ("after", "has_risen", "begin"),
    [
        (0.88, True, "reward rose from 0.33 to 0.88 on 512 sums"),
        (0.44, False, "reward did not rise (from 0.33 to 0.44"),  # less than chance may give
        (0.20, False, "reward did not rise (from 0.33 to 0.20"),
    ],
)
def test_the_last_line_says_whether_the_reward_rose(after: float, has_risen: bool, begin: str) -> None:
    told, line = demo.verdict(0.33, after, 512)
    assert told is has_risen
    assert line.startswith(begin)


def test_the_demo_is_the_quickstart_in_its_own_folder(tmp_path: Path) -> None:
    recipe = demo.demo_recipe(tmp_path / "my demo", ["seed=3", "policies.actor.train.steps=7"])
    assert (recipe.name, recipe.seed) == ("demo", 3)
    assert recipe.policies["actor"].model == str(tmp_path / "my demo" / "model")
    assert recipe.policies["actor"].train.steps == 7
    assert recipe.eval.sets["heldout"].num_tasks == 512

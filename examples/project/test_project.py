"""Tests of the reward and of a whole episode. Run them in this folder: python -m pytest"""

import asyncio
from pathlib import Path

import pytest

from astraflow import load_recipe, try_episode
from astraflow.addons.tiny_models.spec import load_spec
from astraflow.addons.tiny_models.tiny import init_model
from astraflow.types import Task
from reward import share_of_digits

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("text", "reward"), [("125", 1.0), (" 125 ", 1.0), ("115", 1 / 3), ("25", 1 / 3), ("", 0.0)]
)
def test_the_reward_counts_digits_from_the_last_one(text: str, reward: float) -> None:
    task = Task(id="1", source="test", prompt="Calculate 58 + 67.", answer="125")
    assert share_of_digits(task, text, bonus=0.5) == pytest.approx(reward)


def test_an_episode_of_the_recipe_is_scored(tmp_path: Path) -> None:
    """Uses the real workflow, reward, and engine with a barely trained model; takes seconds."""
    model = init_model(load_spec(HERE / "model.yaml", ["warm_start.steps=10"]), tmp_path / "model")
    recipe = load_recipe(HERE / "recipe.yaml", {"policies.actor.model": str(model)})
    trial = asyncio.run(try_episode(recipe, task=1))
    assert 0.0 <= trial.episode.score <= 1.0
    (trajectory,) = trial.episode.trajectories
    assert 1 <= len(trajectory.turns) <= 2

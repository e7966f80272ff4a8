"""The policy that a command means, by its name or without one."""

import asyncio
from pathlib import Path

import pytest

from astraflow.errors import ConfigError
from astraflow.processes.trainer_process import run_policy_trainer
from astraflow.recipe.run_folder import RunFolder
from drivers.recipe_builders import make_digit_recipe


def test_the_option_names_a_policy_or_means_the_first_trained_one(tmp_path: Path) -> None:
    recipe = make_digit_recipe(tmp_path, tmp_path)
    assert (recipe.choose_policy(""), recipe.choose_policy("actor")) == ("actor", "actor")
    with pytest.raises(ConfigError, match='--policy acto: no such policy; did you mean "actor"'):
        recipe.choose_policy("acto")


async def test_a_trainer_of_a_policy_that_is_not_trained_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.save_recipe(make_digit_recipe(tmp_path, tmp_path))
    with pytest.raises(ConfigError, match='has no trainer; did you mean "actor"'):
        await run_policy_trainer(
            asyncio.Event(), folder.path, policy="actr", url="http://127.0.0.1:9", publisher_url="", token=""
        )

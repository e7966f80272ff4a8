"""A run from Python: `launch`, `run.steps`, leaving early, and going on."""

import os
from pathlib import Path

import pytest

from astraflow.addons.one_process.trial import try_episode
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import load_recipe
from astraflow.recipe.run_folder import RunFolder
from astraflow.run.run import launch
from drivers.system_driver import Runs, wait_gone

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("timed"), pytest.mark.timeout(600)]


@pytest.mark.long
async def test_a_run_is_left_early_and_goes_on(runs: Runs, tmp_path: Path) -> None:
    recipe = load_recipe(runs.recipe(steps=6))
    seen: list[int] = []
    async with launch(recipe, tmp_path / "run") as run:
        with pytest.raises(ConfigError, match="'critic' has no trainer"):
            run.steps("critic")
        async for step in run.steps("actor"):
            seen.append(step.step)
            if len(seen) == 2:
                break
    folder = RunFolder(tmp_path / "run")
    assert folder.load_record().state == "stopped"
    assert folder.load_record().launcher_pid == os.getpid()
    assert wait_gone([s.pid for s in folder.load_record().services if s.pid], timeout_s=1) == []
    async with launch(recipe, tmp_path / "run") as run:
        seen += [step.step async for step in run.steps("actor")]
        assert await run.wait() == "finished"
    assert sorted(set(seen)) == list(range(6))
    with pytest.raises(ConfigError, match="holds a finished run"):
        async with launch(recipe, tmp_path / "run"):
            pass


async def test_an_error_of_the_callers_own_ends_the_services_and_passes(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with launch(load_recipe(runs.recipe()), tmp_path / "run"):
            raise ZeroDivisionError
    record = RunFolder(tmp_path / "run").load_record()
    assert wait_gone([s.pid for s in record.services if s.pid], timeout_s=1) == []


async def test_an_episode_is_tried_without_services(runs: Runs) -> None:
    trial = await try_episode(load_recipe(runs.recipe()), task=3, seed=1)
    assert trial.task.prompt.startswith("Calculate")
    (trajectory,) = trial.episode.trajectories
    assert trajectory.policy == "actor"
    assert [message.role for message in trial.episode.messages] == ["user", "assistant"]

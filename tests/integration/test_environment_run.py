"""The example of an environment in a whole run: real engine, real trainer, one step, and its evaluation."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from astraflow.addons.one_process.in_process import run_in_process
from astraflow.addons.one_process.trial import try_episode
from astraflow.config import load_attr
from astraflow.dataflow.audit import audit
from astraflow.protocols import InteractiveEnvironment, Observation
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.preflight import check_recipe
from astraflow.trainer.backend_factory import make_learner
from astraflow.types import Task
from drivers.recipe_builders import make_digit_model

EXAMPLES = Path(__file__).parents[2] / "examples"
OPENED: list["WatchedTotal"] = []


class WatchedTotal(InteractiveEnvironment):
    """The example, and what the service asked of it."""

    def __init__(self, **args: Any) -> None:
        self._example: InteractiveEnvironment = load_attr(
            "examples.02_own_environment:RunningTotal", where="use"
        )(**args)
        self.calls: list[str] = []

    def tasks(self, split: str) -> Any:
        return self._example.tasks(split)

    def open(self) -> None:
        OPENED.append(self)
        self.calls.append("open")

    def reset(self, task: Task, seed: int) -> Any:
        self.calls.append("reset")
        return self._example.reset(task, seed)

    def step(self, state: Any, reply: str) -> Observation:
        self.calls.append("step")
        observation = self._example.step(state, reply)
        assert isinstance(observation, Observation)
        return observation

    def end(self, state: Any) -> None:
        self.calls.append("end")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("model") / "digits")


def recipe_with(model: Path, *overrides: str) -> Recipe:
    small = (
        f"policies.actor.model={model}",
        "policies.actor.sampling.max_tokens=8",
        "policies.actor.table.group_size=2",
        "policies.actor.table.groups_per_batch=2",
        "policies.actor.train.steps=1",
        "rollout.services=1",
        "rollout.max_episodes=8",
        "rollout.engine.num_slots=8",
        "eval.sets.heldout.num_tasks=4",
    )
    return load_recipe(EXAMPLES / "02_own_environment.yaml", [*small, *overrides])


@pytest.mark.timeout(60)
async def test_a_policy_trains_on_an_environment_of_the_users_own(model: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recipe = recipe_with(model, f"tasks.environments.totals.use={__name__}:WatchedTotal")
    actor = recipe.policies["actor"]
    backend = make_learner(actor.train, model_dir=actor.model_dir, seed=recipe.seed)
    await run_in_process(
        recipe, check_recipe(recipe).sources, {"actor": backend}, folder=tmp_path, stop=asyncio.Event()
    )
    report = audit(tmp_path / "journal")
    assert report.ok
    (policy,) = report.policies
    assert policy.fates.trained == 2
    (environment,) = OPENED
    assert environment.calls[0] == "open"
    assert environment.calls[-1] == "close"
    assert environment.calls.count("reset") == environment.calls.count("end") >= 4
    assert environment.calls.count("step") >= 2 * 4


@pytest.mark.timeout(60)
async def test_one_episode_of_it_has_a_reward_for_each_turn(model: Path) -> None:
    torch.set_num_threads(1)
    trial = await try_episode(recipe_with(model), task=1)
    (trajectory,) = trial.episode.trajectories
    assert len(trajectory.turns) == 2
    assert trial.episode.score == sum(turn.reward for turn in trajectory.turns)
    assert msgspec.json.decode(trial.task.spec)["environment"] == "totals"

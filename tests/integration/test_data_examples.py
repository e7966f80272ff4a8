"""The examples with data and rewards as other libraries have them, in runs with a real engine and trainer."""

import asyncio
import runpy
import sys
from pathlib import Path

import pytest
import torch

from astraflow.addons.one_process.in_process import run_in_process
from astraflow.addons.one_process.trial import try_episode
from astraflow.dataflow.audit import audit
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.preflight import check_recipe
from astraflow.trainer.backend_factory import make_learner
from drivers.recipe_builders import make_digit_model

EXAMPLES = Path(__file__).parents[2] / "examples"
DATA = {"chat_sums": "chat_sums.jsonl", "verl_sums": "verl_sums.parquet"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("model") / "digits")


@pytest.fixture(params=list(DATA))
def recipe(
    request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Recipe:
    """An example's recipe, small, with the data that its script writes."""
    name: str = request.param
    data = tmp_path / DATA[name]
    monkeypatch.setattr(sys, "argv", [name, str(data)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    small = (
        f"tasks.sources.sums.path={data}",
        f"policies.actor.model={model}",
        "policies.actor.sampling.max_tokens=8",
        "policies.actor.table.group_size=2",
        "policies.actor.table.groups_per_batch=2",
        "policies.actor.train.steps=1",
        "rollout.services=1",
        "rollout.max_episodes=8",
        "rollout.engine.num_slots=8",
    )
    return load_recipe(EXAMPLES / f"{name}.yaml", small)


@pytest.mark.timeout(120)
async def test_a_policy_trains_on_the_example(recipe: Recipe, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    actor = recipe.policies["actor"]
    backend = make_learner(actor.train, model_dir=actor.model_dir, seed=recipe.seed)
    await run_in_process(
        recipe,
        check_recipe(recipe).sources,
        {"actor": backend},
        folder=tmp_path / "run",
        stop=asyncio.Event(),
    )
    report = audit(tmp_path / "run" / "journal")
    assert report.ok
    (policy,) = report.policies
    assert (policy.fates.trained, policy.fates.failed) == (2, 0)


@pytest.mark.timeout(120)
async def test_an_episode_of_the_example_reports_the_parts_of_its_reward(recipe: Recipe) -> None:
    torch.set_num_threads(1)
    trial = await try_episode(recipe, task=1)
    assert trial.task.prompt == "Calculate 11 + 17."
    assert trial.task.answer == "28"
    parts = {item.name: item.value for item in trial.episode.metrics if item.name.startswith("reward/")}
    if recipe.name == "verl-sums":
        assert set(parts) == {"reward/answered"}
        return
    assert set(parts) == {"reward/right", "reward/brief"}
    assert parts["reward/brief"] == 1.0
    assert trial.episode.score == pytest.approx(parts["reward/right"] + 0.2 * parts["reward/brief"])
    assert [message.role for message in trial.episode.messages] == ["system", "user", "assistant"]


@pytest.mark.parametrize("name", DATA)
def test_the_recipe_of_the_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()) < 30

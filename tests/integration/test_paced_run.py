"""Whole runs in one process in which nothing is emulated but the models."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from astraflow.addons.one_process.in_process import run_in_process
from astraflow.dataflow.audit import AuditReport, audit
from astraflow.errors import ConfigError
from astraflow.recipe.recipe import Recipe, load_recipe
from astraflow.run.preflight import check_recipe
from astraflow.trainer.backend_factory import make_learner
from drivers.recipe_builders import make_digit_model

pytestmark = pytest.mark.timeout(120)

SCALE = 500.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_digit_model(tmp_path_factory.mktemp("models") / "digits")


def make_recipe(folder: Path, model: Path, **changes: Any) -> Recipe:
    """Two policies, each with a trainer, 3 steps of 4 groups of 2 episodes."""
    (folder / "tasks.jsonl").write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 8)
    policy = {
        "model": str(model),
        "sampling": {"max_tokens": 400},
        "table": {"group_size": 2, "groups_per_batch": 4, "max_staleness": 1},
        "train": {
            "steps": 3,
            "checkpoint_every": 2,
            "backend": {"name": "paced", "step_s": 5.0, "time_scale": SCALE},
        },
    }
    content = {
        "name": "paced",
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": str(folder / "tasks.jsonl")}}},
        "workflow": {"name": "paced", "turns": 2, "env_s": 1.0, "time_scale": SCALE},
        "policies": {"actor": policy, "judge": policy},
        "rollout": {
            "max_episodes": 16,
            "engine": {
                "name": "paced",
                "num_slots": 8,
                "mean_tokens": 100.0,
                "update_s": 0.5,
                "time_scale": SCALE,
            },
        },
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return load_recipe(path)


async def run(recipe: Recipe, folder: Path) -> AuditReport:
    backends = {
        name: make_learner(policy.train, model_dir=policy.model_dir, seed=recipe.seed)
        for name, policy in recipe.trained.items()
    }
    await run_in_process(recipe, check_recipe(recipe).sources, backends, folder=folder, stop=asyncio.Event())
    return audit(folder / "journal")


async def test_a_run_without_models_is_a_run(model: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, model)
    assert recipe.time_scale == SCALE
    report = await run(recipe, tmp_path / "run")
    assert report.ok, report.problems
    assert {policy.name: policy.steps for policy in report.policies} == {"actor": 3, "judge": 3}


async def test_a_run_whose_cache_holds_a_few_requests_preempts_and_goes_on(
    model: Path, tmp_path: Path
) -> None:
    recipe = make_recipe(tmp_path, model)
    engine = recipe.rollout.engine.model_copy(update={"kv_tokens": 500, "prefill_cost": 0.5})
    rollout = recipe.rollout.model_copy(update={"engine": engine})
    report = await run(recipe.model_copy(update={"rollout": rollout}), tmp_path / "run")
    assert report.ok, report.problems
    assert {policy.name: policy.steps for policy in report.policies} == {"actor": 3, "judge": 3}


async def test_parts_of_one_recipe_run_at_one_speed(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="time_scale must be the same"):
        make_recipe(tmp_path, model, workflow={"name": "paced", "time_scale": 2.0})


async def test_weights_of_no_model_go_to_no_model(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="publishes weights of no model"):
        make_recipe(tmp_path, model, workflow={"name": "single_turn"}, rollout={"engine": {"name": "torch"}})

from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.addons.lending.sharing import SideBySide, check_lending, make_lending_pool
from astraflow.errors import ConfigError
from astraflow.processes.supervisor import Supervisor
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from drivers.cluster_recipes import make_cluster_recipe
from drivers.launcher_fakes import FakeLauncher
from drivers.run_snapshots import make_snapshot


def make_recipe(**sections: Any) -> Recipe:
    content = make_cluster_recipe(**{"cluster": {"lend": True}, "rollout": {"services": 2}, **sections})
    return Recipe.model_validate_json(msgspec.json.encode(content))


EMULATED = {
    "policies": {"actor": {"model": "/models/actor", "train": {"backend": {"name": "paced"}}}},
    "rollout": {"services": 2, "engine": {"name": "paced"}},
    "workflow": {"name": "paced"},
}


async def test_emulated_devices_are_used_in_turns(tmp_path: Path) -> None:
    pool = make_lending_pool(make_recipe(**EMULATED), RunFolder(tmp_path), ())
    assert not isinstance(pool, SideBySide)
    pool.close()


def test_cpu_cores_are_used_side_by_side_and_the_run_says_so_once(tmp_path: Path) -> None:
    recipe = make_recipe()
    check_lending(recipe)
    pool = make_lending_pool(recipe, RunFolder(tmp_path), ())
    assert "side by side" in pool.text
    status = make_snapshot().status
    assert status is not None
    supervisor = Supervisor(FakeLauncher(), ())
    assert "side by side" in pool.look(status, supervisor).note
    assert not pool.look(status, supervisor).note


def actor(**train: object) -> dict[str, object]:
    return {"policies": {"actor": {"model": "/models/actor", "train": train}}}


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"launcher": {"name": "slurm"}}, "use the launcher `local`"),
        ({"cluster": {"lend": True, "max_services": 2}}, "fixed number of rollout services"),
        ({"rollout": {"services": 0}}, "a device has two tenants, so 1 trainers need as many"),
        (
            {"policies": {name: {"model": "/models/actor"} for name in ("actor", "critic", "judge")}},
            "3 trainers need as many rollout services",
        ),
        (actor(backend={"name": "torch", "device": "cuda"}), "can't free its devices"),
        (actor(ranks=2), "train.ranks = 2"),
        ({"rollout": {"services": 2, "engine": {"name": "torch", "device": "cuda"}}}, "can't free a GPU"),
        ({"rollout": {"services": 2, "gpus": ["0"]}}, "can't free a GPU"),
        ({"rollout": {"services": 2, "engine": {"name": "vllm"}}}, "can't free a GPU"),
    ],
)
def test_devices_that_cannot_be_lent_are_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_lending(make_recipe(**sections))


def test_a_recipe_without_lending_is_not_checked() -> None:
    check_lending(make_recipe(cluster={}, rollout={"services": 0}))

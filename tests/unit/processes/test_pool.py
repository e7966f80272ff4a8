"""The pool of a run whose number of rollout services stays the same."""

import time
from pathlib import Path

import msgspec

from astraflow.processes.pool import Look, Pool, make_pool
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder
from drivers.cluster_recipes import make_cluster_recipe
from drivers.launcher_fakes import FakeLauncher
from drivers.run_snapshots import make_snapshot


def make_fixed(folder: Path) -> Pool:
    mapping = make_cluster_recipe(cluster={"max_services": 0}, rollout={"services": 2})
    recipe = Recipe.model_validate_json(msgspec.json.encode(mapping))
    names = ("dataflow", "rollout-0", "rollout-1")
    specs = [ProcessSpec(name, ("x",), {}, folder / f"{name}.log") for name in names]
    return make_pool(recipe, RunFolder(folder), specs, time.time)


def test_a_pool_of_a_fixed_size_starts_all_processes_and_decides_nothing(tmp_path: Path) -> None:
    pool = make_fixed(tmp_path)
    assert [spec.name for spec in pool.first_specs] == ["dataflow", "rollout-0", "rollout-1"]
    status = make_snapshot().status
    assert status is not None
    assert pool.look(status, Supervisor(FakeLauncher(), pool.first_specs)) == Look()
    assert not pool.text

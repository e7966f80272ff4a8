from pathlib import Path
from typing import Any

import msgspec
import pytest

from astraflow.addons.lending.pairs import keep_fracs, pairs_of, takes_turns
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


GPU = {
    "policies": {
        "actor": {"model": "/models/actor", "train": {"backend": {"name": "torch", "device": "cuda:0"}}}
    },
    "rollout": {"services": 1, "engine": {"name": "torch", "device": "cuda:0", "gpu_share": 0.6}},
}
VLLM = {"name": "vllm", "args": ["--gpu-memory-utilization", "0.6", "--enable-sleep-mode"]}
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


def test_cpu_cores_are_used_in_turns_if_the_recipe_says_so() -> None:
    recipe = make_recipe(cluster={"lend": True, "lending": {"turns": "always"}})
    check_lending(recipe)
    assert takes_turns(recipe)
    assert keep_fracs(recipe) == {"trainer": 1.0, "rollout": 1.0}


@pytest.mark.parametrize("engine", [GPU["rollout"]["engine"], VLLM])
def test_a_gpu_is_used_in_turns_and_each_tenant_keeps_what_the_other_does_not_take(engine: object) -> None:
    rollout = {"services": 1, "gpus": ["0"], "engine": engine}
    recipe = make_recipe(
        **GPU | {"rollout": rollout, "cluster": {"lend": True, "lending": {"train_share": 0.9}}}
    )
    check_lending(recipe)
    assert takes_turns(recipe)
    assert pairs_of(recipe) == [("actor", "rollout-0")]
    assert keep_fracs(recipe) == pytest.approx({"trainer": 0.4, "rollout": 0.1})


def test_shares_that_leave_room_for_both_free_nothing() -> None:
    recipe = make_recipe(**GPU, cluster={"lend": True, "lending": {"train_share": 0.4}})
    assert keep_fracs(recipe) == {"trainer": 1.0, "rollout": 1.0}


def test_a_recipe_says_who_shares_a_device() -> None:
    recipe = make_recipe(cluster=sharing(["actor", "rollout-0"]))
    check_lending(recipe)
    assert pairs_of(recipe) == [("actor", "rollout-0")]


def sharing(*pairs: list[str]) -> dict[str, object]:
    return {"lend": True, "lending": {"share": pairs}}


def on_gpu(**sections: Any) -> dict[str, Any]:
    return {**GPU, **sections}


def engine_of(**engine: object) -> dict[str, Any]:
    return on_gpu(rollout={"services": 1, "gpus": ["0"], "engine": engine})


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
        (actor(ranks=2), "train.ranks = 2"),
        (actor(backend={"name": "torch", "device": "cuda"}), "uses GPU 0 and rollout-1 uses no GPU"),
        (
            {"rollout": {"services": 2, "engine": {"name": "torch", "device": "cuda:1"}}},
            "rollout-1 uses GPU 1",
        ),
        (
            on_gpu(
                **actor(backend={"name": "own_loop", "loop": {"use": "x:y"}, "torch": {"device": "cuda:0"}})
            ),
            "its backend is own_loop",
        ),
        (
            on_gpu(policies={**GPU["policies"], "judge": {"model": "/m", "role": "frozen"}}),
            r"take 1\.2 of their GPU's memory; state a share above 0 and at most 1",
        ),
        (engine_of(name="vllm", args=["--enable-sleep-mode"]), "take 0 of their GPU's memory; state a share"),
        (engine_of(name="vllm", args=["--gpu-memory-utilization=0.7"]), "add --enable-sleep-mode to"),
        (
            engine_of(name="sglang", args=["--mem-fraction-static", "0.7"]),
            "the engine sglang can't free a GPU between two turns; use torch or vllm",
        ),
        ({"cluster": {"lending": {"train_share": 0.5}}}, "set cluster.lend: true, too"),
        ({"cluster": sharing(["actor", "rollout-0", "rollout-1"])}, "has 3 tenants, but a device has two"),
        ({"cluster": sharing(["actor", "rollout-0"], ["actor", "rollout-1"])}, "actor is in 2 pairs"),
        ({"cluster": sharing(["actr", "rollout-0"])}, "no trained policy is called 'actr'; did you mean"),
        ({"cluster": sharing(["actor", "rollout-2"])}, "'rollout-2' is not one of the 2 rollout services"),
        (
            {
                "policies": {"actor": {"model": "/m"}, "judge": {"model": "/m", "role": "frozen"}},
                "cluster": sharing(["judge", "rollout-0"]),
            },
            "policy judge is frozen, so it has no trainer",
        ),
    ],
)
def test_devices_that_cannot_be_lent_are_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check_lending(make_recipe(**sections))


def test_a_recipe_without_lending_is_not_checked() -> None:
    check_lending(make_recipe(cluster={}, rollout={"services": 0}))

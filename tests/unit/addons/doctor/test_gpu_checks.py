"""The GPUs of a recipe are checked before anything is loaded: who uses which, on this machine."""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from astraflow.addons.doctor.gpu_checks import check_devices, check_shared_memory, check_shares, gpu_users
from astraflow.addons.doctor.memory import gpu_memory_finding
from astraflow.errors import ConfigError
from astraflow.recipe.launcher_variant import LauncherVariant
from astraflow.recipe.recipe import Recipe, load_recipe
from drivers.engine_models import make_random_model
from drivers.gpu_recipes import gpu_recipe
from drivers.small_disks import mounted
from drivers.system_driver import ROOT


class Elsewhere(LauncherVariant):
    """Starts rollout services on other machines."""

    name: Literal["elsewhere"] = "elsewhere"


class InContainers(LauncherVariant):
    """Starts rollout services on this machine, in containers."""

    spans_machines: ClassVar[bool] = False
    name: Literal["containers"] = "containers"


def launched_by(launcher: LauncherVariant) -> Recipe:
    """A recipe whose engine is on a GPU that no machine has."""
    mapping = {
        "name": "small",
        "tasks": {"sources": {"sums": {"name": "jsonl", "path": "tasks.jsonl"}}},
        "policies": {"actor": {"model": "models/actor"}},
        "rollout": {"engine": {"name": "torch", "device": "cuda:999"}},
    }
    return Recipe.model_validate_json(json.dumps(mapping)).model_copy(update={"launcher": launcher})


def test_devices_of_services_on_other_machines_are_not_checked_here() -> None:
    check_devices(launched_by(Elsewhere()))


def test_devices_of_services_that_an_installed_launcher_starts_here_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.engine\.device = 'cuda:999' needs a GPU"):
        check_devices(launched_by(InContainers()))


@pytest.mark.parametrize(
    ("engine", "gpus", "services", "ranks", "problem"),
    [
        ({"device": "cuda:0"}, ["0"], 1, 1, "not all state which share"),  # the trainer's, too
        ({"device": "cuda:0"}, [], 1, 1, "not all state which share"),
        ({"device": "cuda:0", "gpu_share": 0.4}, ["0"], 2, 1, ""),
        ({"device": "cuda:0", "gpu_share": 0.5}, ["0"], 2, 1, "add up to 1, which leaves nothing for the"),
        ({"device": "cuda:0", "gpu_share": 0.5}, ["4"], 2, 1, ""),
        ({"device": "cuda:0", "gpu_share": 0.4}, ["4"], 3, 1, r"add up to 1\.2, more than it has"),
        ({"device": "cuda:0"}, ["4", "5"], 2, 4, ""),
        ({"device": "cuda:0"}, ["3", "4"], 2, 4, "GPU 3 is used by 2 programs of trainer-actor, rollout-0"),
        ({"device": "cuda:0"}, ["4"], 2, 1, "not all state which share"),
        ({"device": "cuda:1"}, [], 1, 1, ""),
        ({"device": "cpu"}, [], 4, 2, ""),
        ({"name": "vllm"}, ["1"], 1, 1, ""),
        ({"name": "vllm"}, ["0"], 1, 1, "not all state which share"),
        ({"name": "vllm", "args": ["--gpu-memory-utilization", "0.45"]}, ["0"], 1, 1, ""),
        ({"name": "vllm", "args": ["--gpu-memory-utilization=0.45"]}, ["0"], 2, 1, ""),
        ({"name": "sglang", "args": ["--mem-fraction-static", "0.6"]}, ["0"], 2, 1, r"add up to 1\.2"),
        ({"name": "vllm", "attach": {"url": "http://10.0.0.1:1"}}, ["0"], 1, 1, ""),
    ],
)
def test_programs_share_a_gpu_by_stated_shares_only(
    tmp_path: Path, engine: dict[str, Any], gpus: list[str], services: int, ranks: int, problem: str
) -> None:
    rollout = {"engine": {"name": "torch", **engine}, "gpus": gpus, "services": services}
    users = gpu_users(gpu_recipe(tmp_path, ranks, rollout=rollout))
    if not problem:
        check_shares(users)
        return
    with pytest.raises(ConfigError, match=problem):
        check_shares(users)


def test_trainers_share_a_gpu_by_what_they_need(tmp_path: Path) -> None:
    recipe = gpu_recipe(tmp_path)
    both = recipe.model_copy(update={"policies": dict.fromkeys(("a", "b"), recipe.policies["actor"])})
    check_shares(users := gpu_users(both))
    num = sum(parameter.numel() for parameter in make_random_model().parameters())
    assert [user.num_bytes for user in users["0"]] == [16 * num] * 2


def test_a_backend_that_replicates_gradients_needs_more(tmp_path: Path) -> None:
    recipe = gpu_recipe(tmp_path, 4, name="megatron")
    num = sum(parameter.numel() for parameter in make_random_model().parameters())
    assert [user.num_bytes for user in gpu_users(recipe)["0"]] == [(4 + 4 + 8 / 4) * num]
    (finding,) = (gpu_memory_finding(name, policy, 0) for name, policy in recipe.trained.items())
    assert finding.detail.startswith("each of 4 ranks needs about")


def test_gpus_with_the_same_name_are_the_same_whoever_lists_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8f2a, GPU-31c0")
    engine = {"name": "torch", "device": "cuda:0"}
    recipe = gpu_recipe(tmp_path, rollout={"engine": engine, "gpus": ["GPU-8f2a"], "services": 1})
    with pytest.raises(ConfigError, match="GPU GPU-8f2a is used by 2 programs"):
        check_shares(gpu_users(recipe))


def test_servers_for_evaluation_need_a_share_too(tmp_path: Path) -> None:
    recipe = gpu_recipe(tmp_path, rollout={"engine": {"name": "vllm"}, "gpus": ["1"], "services": 1})
    heldout = recipe.eval.model_copy(update={"sets": {"heldout": recipe.tasks.sources["sums"]}})
    with pytest.raises(ConfigError, match="GPU 1 is used by 2 programs of rollout-0, and not all state"):
        check_shares(gpu_users(recipe.model_copy(update={"eval": heldout})))


@pytest.mark.parametrize("name", ["math/1.7b", "math/8b", "math-multi-agent/8b", "code-multi-agent/1.7b"])
def test_the_recipes_state_their_shares(name: str) -> None:
    recipe = load_recipe(ROOT / "recipes" / f"{name}.yaml")
    check_shares(gpu_users(recipe))


def test_ranks_need_more_shared_memory_than_a_container_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "shm", "64m") as folder:
        with pytest.raises(
            ConfigError, match=r"train.ranks = 2: .*/shm has only 64 MiB, in which NCCL may hang"
        ):
            check_shared_memory("train.ranks = 2", 2, folder)
        monkeypatch.setenv("NCCL_SHM_DISABLE", "1")
        check_shared_memory("train.ranks = 2", 2, folder)
    check_shared_memory("train.ranks = 2", 2, tmp_path)

"""The doctor computes what the ranks of a trainer need on their GPUs, without GPUs or weights."""

from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.doctor.gpu_memory import gpu_memory_finding, rank_need, share_finding
from astraflow.recipe.recipe import PolicyConfig, Recipe, load_recipe
from astraflow.rollout.engine_config import TorchEngineConfig
from drivers.engine_models import make_model_folder, make_random_model


def recipe(folder: Path, ranks: int = 1, **backend: Any) -> Recipe:
    make_model_folder(folder / "model")
    path = folder / "recipe.yaml"
    path.write_text(
        "name: demo\n"
        "tasks: {sources: {sums: {name: jsonl, path: tasks.jsonl}}}\n"
        f"model: {folder / 'model'}\n"
    )
    fields = {"name": "torch", "device": "cuda:0", **backend}
    return load_recipe(path, {"train.backend": fields, "train.ranks": ranks})


def policy(folder: Path, ranks: int = 1, **backend: Any) -> PolicyConfig:
    return recipe(folder, ranks, **backend).policies["actor"]


def num_weights() -> int:
    return sum(parameter.numel() for parameter in make_random_model().parameters())


@pytest.mark.parametrize("ranks", [1, 8])
def test_each_rank_needs_its_part(tmp_path: Path, ranks: int) -> None:
    need = rank_need(policy(tmp_path, ranks))
    assert need.lasting["weights"] == need.lasting["gradients"] == 4 * num_weights() / ranks


def test_adapters_need_no_gradients_of_the_model(tmp_path: Path) -> None:
    assert rank_need(policy(tmp_path, lora={"rank": 1})).lasting["gradients"] < num_weights()


def test_the_finding_tells_the_need_and_two_settings_that_would_help(tmp_path: Path) -> None:
    finding = gpu_memory_finding("actor", policy(tmp_path, 4), 0)
    assert finding.level == "ok"
    assert finding.detail.startswith("each of 4 ranks needs about 0.1 GiB: ")
    assert "to save most, set train." in finding.detail
    assert " or train." in finding.detail


@pytest.mark.parametrize(
    ("engine", "gpus", "services", "ranks", "level"),
    [
        ({"device": "cuda:0"}, ["0"], 1, 1, "fail"),  # the trainer's, too
        ({"device": "cuda:0", "gpu_share": 0.4}, ["0"], 2, 1, "ok"),
        ({"device": "cuda:0", "gpu_share": 0.4}, ["0"], 3, 1, "fail"),
        ({"device": "cuda:0"}, ["4", "5"], 2, 4, "ok"),
        ({"device": "cuda:0"}, ["3", "4"], 2, 4, "fail"),
        ({"device": "cuda:0"}, ["4"], 2, 1, "fail"),
        ({"device": "cuda:1"}, [], 1, 1, "ok"),
        ({"device": "cpu"}, [], 4, 2, "ok"),
    ],
)
def test_processes_share_a_gpu_by_stated_shares_only(
    tmp_path: Path, engine: dict[str, Any], gpus: list[str], services: int, ranks: int, level: str
) -> None:
    chosen = recipe(tmp_path, ranks)
    rollout = chosen.rollout.model_copy(
        update={"gpus": tuple(gpus), "services": services, "engine": TorchEngineConfig(**engine)}
    )
    finding = share_finding(chosen.model_copy(update={"rollout": rollout}))
    assert finding.level == level, finding.detail
    assert "trainer-actor" in finding.detail or level == "fail"

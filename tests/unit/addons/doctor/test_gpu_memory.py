"""The doctor computes what the ranks of a trainer need on their GPUs, without GPUs or weights."""

from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.doctor.memory import gpu_memory_finding, rank_need
from astraflow.recipe.recipe import PolicyConfig
from drivers.engine_models import make_random_model
from drivers.gpu_recipes import gpu_recipe


def policy(folder: Path, ranks: int = 1, **backend: Any) -> PolicyConfig:
    return gpu_recipe(folder, ranks, **backend).policies["actor"]


def num_weights() -> int:
    return sum(parameter.numel() for parameter in make_random_model().parameters())


@pytest.mark.parametrize("ranks", [1, 8])
def test_each_rank_needs_its_part(tmp_path: Path, ranks: int) -> None:
    need = rank_need(policy(tmp_path, ranks))
    assert need is not None
    assert need.lasting["weights"] == need.lasting["gradients"] == 4 * num_weights() / ranks


def test_adapters_need_no_gradients_of_the_model(tmp_path: Path) -> None:
    need = rank_need(policy(tmp_path, lora={"rank": 1}))
    assert need is not None
    assert need.lasting["gradients"] < num_weights()


def test_the_finding_tells_the_need_and_two_settings_that_would_help(tmp_path: Path) -> None:
    finding = gpu_memory_finding("actor", policy(tmp_path, 4), 0)
    assert finding.level == "ok"
    assert finding.detail.startswith("each of 4 ranks needs about 0.1 GiB: ")
    assert "to save most, set train." in finding.detail
    assert " or train." in finding.detail

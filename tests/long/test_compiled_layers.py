"""Compiled layers: the steps of layers that are not compiled, and no new code for new lengths."""

import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import PreTrainedModel

from astraflow.trainer.ranks import ALONE
from drivers.rank_pool import RankPool
from drivers.rank_runs import CASES, assert_same_run, make_experts, train_on_ranks
from drivers.trainer_builders import make_tiny_model

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # torch's compiler warns of what it does itself
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler (g++)"),
]

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "tied": partial(make_tiny_model, tie_word_embeddings=True),
    "experts": make_experts,
}


@pytest.fixture(autouse=True)
def _fresh_code() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def compiled(settings: dict[str, Any]) -> dict[str, Any]:
    """The same settings with compiled layers."""
    return {**settings, "backend": {"name": "torch", **settings.get("backend", {}), "compile_layers": True}}


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        ("tied", "grpo"),
        ("tied", "lora"),
        ("tied", "lean optimizer, layers again"),
        ("tied", "critic and split groups"),
        ("experts", "m2po over microbatches"),
    ],
)
def test_compiled_layers_train_as_the_others_do(tmp_path: Path, kind: str, case: str) -> None:
    folder = tmp_path / "model"
    MODELS[kind]().save_pretrained(folder)
    expected = train_on_ranks(ALONE, folder, CASES[case], range(2))
    assert not counters["stats"]["unique_graphs"]
    assert_same_run(train_on_ranks(ALONE, folder, compiled(CASES[case]), range(2)), expected)
    assert counters["stats"]["unique_graphs"]


def test_new_lengths_need_no_new_code(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model().save_pretrained(folder)
    train_on_ranks(ALONE, folder, compiled(CASES["m2po over microbatches"]), range(2))
    num_graphs = counters["stats"]["unique_graphs"]
    train_on_ranks(ALONE, folder, compiled(CASES["m2po over microbatches"]), range(8))
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_layers_that_are_split_over_ranks_are_compiled_too(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model().save_pretrained(folder)
    expected = train_on_ranks(ALONE, folder, CASES["grpo"], range(2))
    with RankPool(2, answer_s=600.0) as pool:
        for found in pool.run(2, train_on_ranks, folder, compiled(CASES["grpo"]), range(2)):
            assert_same_run(found, expected)

"""Eight ranks load and resume a stand-in of 2 GB, each with memory for its part and one tensor."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from astraflow.trainer.config import ShardConfig
from astraflow.trainer.ranks import Ranks
from drivers.rank_pool import RankPool
from drivers.rank_runs import load_weights
from drivers.trainer_builders import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WORLD = 8
VOCAB, WIDTH = 32_768, 2048
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 8192,
    "num_hidden_layers": 15,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


def save_stand_in(_: Ranks, folder: Path) -> int:
    """Saves a model with random weights in bfloat16. Returns its number of parameters."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = make_tiny_model(**SHAPE)
    finally:
        torch.set_default_dtype(torch.float32)
    model.save_pretrained(folder, max_shard_size="100GB")
    return model.num_parameters()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD, answer_s=600.0) as pool:
        yield pool


def test_no_rank_holds_more_than_its_part_and_one_tensor(pool: RankPool, tmp_path: Path) -> None:
    (num_parameters,) = pool.run(1, save_stand_in, tmp_path)
    weights = tmp_path / "model.safetensors"
    assert weights.stat().st_size > 2e9
    loaded = pool.run(WORLD, load_weights, tmp_path, ShardConfig(), weights)
    largest = 4 * VOCAB * WIDTH  # in float32
    assert sum(part for _, part in loaded) >= 0.99 * 4 * num_parameters
    for growth, part in loaded:
        assert part < 1.05 * 4 * num_parameters / WORLD
        assert growth < 1.1 * part + largest

"""Eight ranks load and resume a stand-in of 2 GB, with its optimizer, each with memory for its part and one
tensor."""

import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from astraflow.models.loading import empty_causal_lm
from astraflow.trainer.config import ShardConfig
from astraflow.trainer.ranks import Ranks
from astraflow.trainer.torch.optimizer_files import AVERAGES
from drivers.rank_pool import RankPool
from drivers.rank_runs import load_weights, resume_optimizer
from drivers.trainer_builders import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
WORLD = 8
SAVED_BY = 4
"""Ranks that wrote the checkpoint. Those that read it need half of each part."""
VOCAB, WIDTH = 32_768, 2048
LARGEST = 4 * VOCAB * WIDTH
"""Bytes of the largest tensor in float32."""
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


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]], about: dict[str, str]) -> None:
    """Writes tensors in float32 whose last element is 1 and all others 0, which take no disk space."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **about}}
    end = 0
    for name, shape in shapes.items():
        begin = end
        end += 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # as safetensors does, so that tensors are aligned
    first = 8 + len(encoded)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        for name in shapes:
            file.seek(first + header[name]["data_offsets"][1] - 4)
            file.write(struct.pack("<f", 1.0))


def write_checkpoint(folder: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes weights and averages as `SAVED_BY` ranks do."""
    write_sparse(folder / "model.safetensors", shapes, {})
    for rank in range(SAVED_BY):
        own: dict[str, tuple[int, ...]] = {}
        rows: dict[str, int] = {}
        for name, (num_rows, *others) in shapes.items():
            size = -(-num_rows // SAVED_BY)
            rows[name] = rank * size
            own |= {f"{name}.{average}": (size, *others) for average in AVERAGES}
        about = {"rows": rows, "columns": {}, "steps": dict.fromkeys(shapes, 3.0)}
        path = folder / f"optimizer-{rank + 1:05d}-of-{SAVED_BY:05d}.safetensors"
        write_sparse(path, own, {key: json.dumps(value) for key, value in about.items()})


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD, answer_s=600.0) as pool:
        yield pool


def test_no_rank_holds_more_than_its_part_and_one_tensor(pool: RankPool, tmp_path: Path) -> None:
    (num_parameters,) = pool.run(1, save_stand_in, tmp_path)
    weights = tmp_path / "model.safetensors"
    assert weights.stat().st_size > 2e9
    loaded = pool.run(WORLD, load_weights, tmp_path, ShardConfig(), weights)
    assert sum(part for _, part in loaded) >= 0.99 * 4 * num_parameters
    for growth, part in loaded:
        assert part < 1.05 * 4 * num_parameters / WORLD
        assert growth < 1.1 * part + LARGEST


def test_no_rank_resumes_more_than_its_part_of_the_optimizer_and_one_tensor(
    pool: RankPool, tmp_path: Path
) -> None:
    (num_parameters,) = pool.run(1, save_stand_in, tmp_path)
    model = empty_causal_lm(tmp_path, device="meta")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert all(num_rows % WORLD == 0 for num_rows, *_ in shapes.values())
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    write_checkpoint(checkpoint, shapes)
    resumed = pool.run(WORLD, resume_optimizer, tmp_path, checkpoint)
    assert sum(part for _, part, _ in resumed) >= 0.99 * 12 * num_parameters
    assert sum(total for _, _, total in resumed) == len(shapes) * (1 + 2 * SAVED_BY + WORLD * 3)
    for growth, part, _ in resumed:
        assert part < 1.05 * 12 * num_parameters / WORLD
        assert growth < 1.1 * part + LARGEST

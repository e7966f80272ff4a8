"""Four ranks of a trainer, each with a GPU of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from drivers.rank_gpus import begin, join_on_first_gpu, step_on_gpu
from drivers.rank_pool import RankPool
from drivers.rank_runs import make_experts, train_on_ranks
from drivers.trainer_builders import save_model

pytestmark = pytest.mark.timeout(200)
WORLD = 4
GPU: dict[str, Any] = {"name": "torch", "device": "cuda:0"}
SHAPES: dict[str, dict[str, Any]] = {
    "4 shards": {},
    "4 shards, bfloat16": {"backend": {**GPU, "dtype": "bfloat16"}},
    "2 replicas of 2 shards": {"shard": {"replicate": 2}},
    "2 shards x tensor 2": {"shard": {"tensor": 2}},
    "2 shards x context 2": {"shard": {"context": 2}},
    "lora": {"backend": {**GPU, "lora": {"rank": 2}}},
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(WORLD, begin=begin, answer_s=150.0) as pool:
        yield pool


def check_places(found: list[dict[str, Any]]) -> None:
    assert [rank["gpu"] for rank in found] == [f"Posing GPU {idx}" for idx in range(WORLD)]
    assert {name for rank in found for name in rank["devices"]} == {"cuda:0"}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_rank_holds_its_part_on_its_own_gpu(
    pool: RankPool, tmp_path_factory: pytest.TempPathFactory, shape: str
) -> None:
    folder = save_model(tmp_path_factory.mktemp("model"))
    found = pool.run(WORLD, step_on_gpu, folder, {"backend": GPU, **SHAPES[shape]})
    check_places(found)
    num_parts = 4 if shape.startswith(("4", "lora")) else 2
    assert max(rank["num_held"] for rank in found) < 1.3 * found[0]["num_whole"] / num_parts


def test_ranks_on_gpus_go_on_from_what_they_saved(pool: RankPool, tmp_path: Path) -> None:
    folder, saved = save_model(tmp_path / "model"), tmp_path / "saved"
    saved.mkdir()
    settings = {"backend": GPU}
    whole = pool.run(WORLD, train_on_ranks, folder, settings, range(2))
    pool.run(WORLD, train_on_ranks, folder, settings, range(1), saved)
    resumed = pool.run(WORLD, train_on_ranks, folder, settings, range(1, 2), None, saved)
    assert resumed[0][1] == whole[0][1]


def test_experts_are_divided_among_gpus(pool: RankPool, tmp_path: Path) -> None:
    make_experts().save_pretrained(tmp_path)
    check_places(
        pool.run(WORLD, step_on_gpu, tmp_path, {"backend": GPU, "shard": {"tensor": 2, "expert": 2}})
    )


def test_two_ranks_on_one_gpu_are_refused(pool: RankPool) -> None:
    found = pool.run(2, join_on_first_gpu)
    assert "Duplicate GPU detected" in found[1]

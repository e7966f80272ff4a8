"""Every loss and every kind of model at every shape of two and four ranks: as one rank."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from drivers.rank_pool import RankPool
from drivers.rank_runs import CASES, assert_same_run, make_experts, train_on_ranks
from drivers.trainer_builders import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "dense": make_tiny_model,
    "tied": partial(make_tiny_model, tie_word_embeddings=True),
    "experts": make_experts,
}
SHAPES: list[tuple[int, dict[str, int]]] = [
    (2, {}),
    (2, {"tensor": 2}),
    (2, {"replicate": 2}),
    (4, {}),
    (4, {"tensor": 2}),
    (4, {"replicate": 2}),
    (4, {"replicate": 4}),
    (4, {"replicate": 2, "tensor": 2}),
]
CONTEXT_SHAPES: list[tuple[int, dict[str, int]]] = [
    (2, {"context": 2}),
    (4, {"context": 2}),
    (4, {"replicate": 2, "context": 2}),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("case", CASES)
def test_all_shapes_find_what_one_rank_finds(pool: RankPool, tmp_path: Path, kind: str, case: str) -> None:
    folder = tmp_path / "model"
    MODELS[kind]().save_pretrained(folder)
    shapes = [*SHAPES, *(() if kind == "experts" else CONTEXT_SHAPES)]
    shapes = [(world, shard) for world, shard in shapes if case != "lora" or "tensor" not in shard]
    if kind == "experts" and case != "lora":
        shapes += [(2, {"tensor": 2, "expert": 2}), (4, {"tensor": 2, "expert": 2})]
    (alone,) = pool.run(1, train_on_ranks, folder, CASES[case], range(2))
    for world, shard in shapes:
        for found in pool.run(world, train_on_ranks, folder, {**CASES[case], "shard": shard}, range(2)):
            assert_same_run(found, alone)

"""Any number of ranks computes the same: losses, gradients, versions, and how a checkpoint goes on."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from astraflow.errors import DataError
from astraflow.trainer.config import ShardConfig
from astraflow.trainer.ranks import Ranks
from astraflow.weights.delta.encoder import HEADER_BYTES
from astraflow.weights.ranges import RangeJob, RangeWriter, WrittenRange, part_path
from drivers.model_gallery import save_hub_folder
from drivers.rank_pool import RankPool
from drivers.rank_runs import (
    CASES,
    assert_same_run,
    gathered_dtypes,
    judge_errors,
    load_weights,
    make_experts,
    make_learner,
    resume_on_ranks,
    train_on_ranks,
)
from drivers.trainer_builders import make_tiny_model, save_model

WORLDS = (1, 2, 4)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_metrics_are_those_of_one_rank(
    pool: RankPool, model_dir: Path, case: str
) -> None:
    """`test_cuts_of_a_batch.py` has two ranks."""
    alone, four = (pool.run(world, train_on_ranks, model_dir, CASES[case], range(2)) for world in (1, 4))
    for found in four:
        assert_same_run(found, alone[0])


SHAPES = {
    "2 x tensor 2": (4, {"tensor": 2}),
    "2 x tensor 2, experts too": (4, {"tensor": 2, "expert": 2}),
    "replicate 2 x tensor 2": (4, {"replicate": 2, "tensor": 2}),
    "replicate 2": (4, {"replicate": 2}),
    "2 x context 2": (4, {"context": 2}),
}
AGAIN = {**CASES["kl and two minibatches"], "backend": {"name": "torch", "activations": "recompute"}}


@pytest.mark.parametrize(
    ("model", "case", "shapes"),
    [
        (partial(make_tiny_model, tie_word_embeddings=True), AGAIN, ["2 x tensor 2", "2 x context 2"]),
        (make_experts, CASES["critic and split groups"], ["2 x tensor 2, experts too", "replicate 2"]),
    ],
    ids=["tied", "experts"],
)
def test_ranks_in_any_shape_find_what_one_finds_and_resume_in_another(
    pool: RankPool,
    tmp_path: Path,
    model: Callable[[], PreTrainedModel],
    case: dict[str, Any],
    shapes: list[str],
) -> None:
    folder = tmp_path / "model"
    model().save_pretrained(folder)
    (alone,) = pool.run(1, train_on_ranks, folder, case, range(4))
    for name, other in zip(shapes, reversed(shapes), strict=True):
        saved = tmp_path / name
        saved.mkdir()
        world, shard = SHAPES[name]
        first = pool.run(world, train_on_ranks, folder, {**case, "shard": shard}, range(2), saved)
        others = SHAPES[other][1]
        resumed = pool.run(world, train_on_ranks, folder, {**case, "shard": others}, range(2, 4), None, saved)
        for begun, ended in zip(first, resumed, strict=True):
            assert_same_run((begun[0] + ended[0], ended[1]), alone)
        (loaded,) = pool.run(1, train_on_ranks, folder, case, range(2, 2), None, saved)
        assert loaded[1] == first[0][1]


@pytest.mark.parametrize("model_type", ["llama4", "gemma3"])
def test_ranks_train_a_folder_with_a_vision_tower_as_one_does(
    pool: RankPool, tmp_path: Path, model_type: str
) -> None:
    folder = save_hub_folder(model_type, tmp_path / "model")
    case = CASES["kl and two minibatches"]
    (alone,) = pool.run(1, train_on_ranks, folder, case, range(2))
    saved = tmp_path / "saved"
    saved.mkdir()
    first = pool.run(2, train_on_ranks, folder, case, range(1), saved)
    resumed = pool.run(4, train_on_ranks, folder, case, range(1, 2), None, saved)
    for ended in resumed:
        assert_same_run((first[0][0] + ended[0], ended[1]), alone)


@pytest.mark.parametrize("case", ["lora", "lean optimizer, layers again", "critic and split groups"])
def test_what_four_ranks_saved_two_and_one_load_to_the_same_bytes_and_go_on(
    pool: RankPool, model_dir: Path, tmp_path: Path, case: str
) -> None:
    settings = CASES[case]
    _, version = pool.run(4, train_on_ranks, model_dir, settings, range(2), tmp_path)[0]
    steps = {}
    for world in WORLDS:
        loaded, (steps[world], _) = pool.run(
            world, resume_on_ranks, model_dir, settings, range(2, 4), tmp_path
        )[0]
        assert loaded == version
    for world in (1, 2):
        for mine, theirs in zip(steps[world], steps[4], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


@pytest.mark.parametrize("tensor", [1, 4])
def test_a_rank_loads_and_resumes_without_memory_for_more_than_its_part(
    pool: RankPool, tmp_path: Path, tensor: int
) -> None:
    sizes = {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    model = make_tiny_model(**sizes, num_key_value_heads=4).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    whole, largest = 4 * model.num_parameters(), 4 * 4096 * 512  # in float32
    weights = tmp_path / "model.safetensors"
    loaded = pool.run(4, load_weights, tmp_path, ShardConfig(tensor=tensor), weights)
    for growth, part in loaded:
        # Ranks that compute the same batch have all of the embeddings and of the head.
        assert part < 0.3 * whole + 2 * largest * (tensor - 1) / 4
        assert growth < 1.1 * part + largest + 8e6  # what Python itself takes
    assert sum(part for _, part in loaded) >= 0.99 * whole


def test_layers_are_gathered_in_the_dtype_in_which_they_compute(pool: RankPool, model_dir: Path) -> None:
    for dtype in ("float32", "bfloat16"):
        found = pool.run(2, gathered_dtypes, model_dir, dtype)
        assert found == [(f"torch.{dtype}", "torch.float32", "torch.float32")] * 2


def load_other(ranks: Ranks, model_dir: Path, folder: Path) -> str:
    try:
        make_learner(ranks, model_dir, {}).load(folder)
    except DataError as err:
        return str(err)
    return "it loads"


def test_a_checkpoint_of_another_model_is_refused_at_any_number_of_ranks(
    pool: RankPool, model_dir: Path, tmp_path: Path
) -> None:
    other = save_model(tmp_path / "other", num_hidden_layers=1)
    saved = tmp_path / "saved"
    saved.mkdir()
    pool.run(1, train_on_ranks, model_dir, {}, range(1), saved)
    for world in (1, 2):
        for answer in pool.run(world, load_other, other, saved):
            assert answer.startswith("checkpoint")
            assert "do not fit the model" in answer


# --- versions ---------------------------------------------------------------------------------------

MANY = {"vocab_size": 70_000, "hidden_size": 64}
"""The embeddings alone have more elements than a block of a delta."""


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "dense": partial(make_tiny_model, **MANY),
    "tied, merged adapters": partial(make_tiny_model, **MANY, tie_word_embeddings=True),
    "tied experts": partial(make_experts, **MANY, initializer_range=0.02),
    "adapters": partial(make_tiny_model, hidden_size=512, intermediate_size=1024),
}
BACKENDS: dict[str, dict[str, Any]] = {
    "tied, merged adapters": {"lora": {"rank": 2, "publish": "merged"}},
    "adapters": {"lora": {"rank": 512, "publish": "adapters"}},  # more factors than a block holds
}

CUT = {"dense": ["replicate 2 x tensor 2"], "tied experts": ["2 x tensor 2, experts too"]}
"""Shapes that versions are published in, besides FSDP2 alone."""


def save_two_states(folder: Path, model: PreTrainedModel) -> list[Path]:
    """Model folders that differ in some elements of each weight."""
    saved = [folder / "before", folder / "after"]
    model.save_pretrained(saved[0])
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 0.1 * (torch.rand_like(weight) < 0.02))
    model.save_pretrained(saved[1])
    return saved


def publish_two(
    ranks: Ranks, states: list[Path], backend: dict[str, Any], shard: dict[str, int], out: Path
) -> tuple[list[WrittenRange], list[int]]:
    """Writes this rank's range of both states. Returns: what it wrote, and the bytes that it held."""
    writer = RangeWriter(delta=True, rank=ranks.rank, world=ranks.world)
    results = []
    held = []
    for version, state in enumerate(states):
        settings = {"backend": {"name": "torch", "publish_dtype": "bfloat16", **backend}, "shard": shard}
        learner = make_learner(ranks, state, settings)
        tensors = tuple(learner.export())
        held.append(sum(tensor.data.nbytes for tensor in tensors))
        job = RangeJob("actor", version, str(out / ("delta" if version else "full")))
        if version:
            (written,) = writer.write_delta(job, tensors, 0)
        else:
            (written,) = writer.write_full(job, tensors, is_copied=False)
        results.append(written)
    return results, held


@pytest.mark.parametrize("kind", MODELS)
def test_one_state_gives_the_same_version_and_delta_at_any_number_of_ranks(
    pool: RankPool, tmp_path: Path, kind: str
) -> None:
    states = save_two_states(tmp_path, MODELS[kind]())
    found: dict[str | int, Any] = {}
    worlds = WORLDS if kind == "dense" else (1, 4)
    shapes: dict[str | int, tuple[int, dict[str, int]]] = {world: (world, {}) for world in worlds}
    shapes |= {shape: SHAPES[shape] for shape in CUT.get(kind, ())}
    for shape, (world, shard) in shapes.items():
        out = tmp_path / str(shape)
        out.mkdir()
        (out / "full").touch()
        answers = pool.run(world, publish_two, states, BACKENDS.get(kind, {}), shard, out)
        blocks = [Path(part_path(str(out / "delta"), rank)).read_bytes() for rank in range(world)]
        blocks[0] = blocks[0][HEADER_BYTES:]
        full = (out / "full").read_bytes()
        hashes = ["".join(results[version].hashes for results, _ in answers) for version in range(2)]
        found[shape] = (full, b"".join(blocks), hashes)
        num_sharing = sum(results[0].num_bytes > 0 for results, _ in answers)
        assert num_sharing == min(world, 3 if kind == "dense" else 2)
        if kind == "dense" and world > 2:
            assert max(max(held) for _, held in answers) < 0.5 * len(full)
    assert all(one == found[1] for one in found.values())
    assert len(found[1][1]) < len(found[1][0]), "it is a delta"


def test_errors_of_collectives_count_as_lost_contact_and_those_of_computations_do_not(
    pool: RankPool,
) -> None:
    judged, _ = pool.run(2, judge_errors)
    assert judged == {
        "gather": True,
        "gather of a sharded weight": True,
        "sum in a backward pass": True,
        "shapes": False,
        "shapes of sharded weights": False,
        "user's": False,
    }

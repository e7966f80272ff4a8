"""Any number of ranks computes the same: losses, gradients, versions, and how a checkpoint goes on."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from astraflow.dataflow.batch_slices import slice_indices
from astraflow.errors import DataError
from astraflow.trainer.backends.torch_backend import TorchBackend
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.ranks import Ranks
from astraflow.types import Batch
from astraflow.weights.codec.encoder import HEADER_BYTES
from astraflow.weights.ranges import RangeJob, RangeWriter, Written, part_path
from rank_pool import RankPool
from trainer_builders import make_batch, make_model, make_samples, save_model

WORLDS = (1, 2, 4)
SMALL = {"token_budget": 40}
"""Microbatches of a few samples, so that ranks have unequal numbers of them."""
KL = {"auxiliary": {"kl": {"coef": 0.1, "estimator": "k3", "place": "loss"}}}
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "m2po over microbatches": {"loss": {"name": "m2po"}, **SMALL},
    "gspo with sequence means": {"loss": {"name": "gspo"}, "denominator": "sequence_means", **SMALL},
    "kl and two minibatches": {**KL, "minibatches": 2, **SMALL},
    "lora": {"backend": {"name": "torch", "lora": {"rank": 2}}, "minibatches": 2},
    "lean optimizer, layers again": {
        "backend": {"name": "torch", "optimizer_state": "bfloat16", "activations": "recompute"},
        **SMALL,
    },
    "critic and split groups": {
        "auxiliary": {"critic": {"name": "value_model", "whiten": True}},
        "optimizer": {"split_groups": True},
        "minibatches": 2,
    },
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def make_learner(ranks: Ranks, model_dir: Path, settings: dict[str, Any]) -> LossLearner:
    config = TrainConfig.model_validate_json(msgspec.json.encode({"lr": 1e-2, "steps": 10, **settings}))
    return LossLearner(
        config, TorchBackend(config, model_dir=model_dir, seed=3, ranks=ranks), seed=3, ranks=ranks
    )


def slice_of(step: int, ranks: Ranks) -> Batch:
    """What the dataflow sends to a rank."""
    whole = make_batch(make_samples(seed=step, num_groups=5), step=step)
    sizes = [len(sample.trajectory.mask) for sample in whole.samples]
    groups = [sample.group_id for sample in whole.samples]
    chosen = slice_indices(sizes, ranks.world, groups)[ranks.rank]
    samples = tuple(whole.samples[idx] for idx in chosen)
    return msgspec.structs.replace(whole, rank=ranks.rank, world=ranks.world, samples=samples)


def train(
    ranks: Ranks,
    model_dir: Path,
    settings: dict[str, Any],
    steps: range,
    saved: Path | None = None,
    loaded: Path | None = None,
) -> tuple[list[dict[str, float]], dict[str, bytes]]:
    """The metrics of each step, and what this rank has of the version after the last: rank 0 all of it, since
    it is smaller than a segment."""
    learner = make_learner(ranks, model_dir, settings)
    if loaded is not None:
        learner.load(loaded)
    found = []
    for step in steps:
        result = learner.train_step(slice_of(step, ranks))
        found.append({item.name: item.value for item in result.metrics if not item.name.endswith("_s")})
    version = {tensor.name: tensor.data.tobytes() for tensor in learner.export()}
    if saved is not None:
        learner.save(saved)()
    return found, version


@pytest.mark.parametrize("case", CASES)
def test_losses_gradients_and_metrics_are_those_of_one_rank(
    pool: RankPool, model_dir: Path, case: str
) -> None:
    alone, two, four = (pool.run(world, train, model_dir, CASES[case], range(2)) for world in WORLDS)
    expected = alone[0][0]
    for found in (*two, *four):
        for mine, theirs in zip(found[0], expected, strict=True):
            assert mine.keys() == theirs.keys()
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
            for name in mine.keys() - {"computed_frac"}:
                assert mine[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-6), name
    for found in (two[0], four[0]):
        for name, data in found[1].items():
            near = np.frombuffer(data, "f4") - np.frombuffer(alone[0][1][name], "f4")
            assert np.abs(near).max() < 1e-4, name


@pytest.mark.parametrize("case", ["lora", "lean optimizer, layers again", "critic and split groups"])
def test_what_four_ranks_saved_two_and_one_load_to_the_same_bytes_and_go_on(
    pool: RankPool, model_dir: Path, tmp_path: Path, case: str
) -> None:
    settings = CASES[case]
    _, version = pool.run(4, train, model_dir, settings, range(2), tmp_path)[0]
    steps = {}
    for world in WORLDS:
        _, loaded = pool.run(world, train, model_dir, settings, range(2, 2), None, tmp_path)[0]
        assert loaded == version
        steps[world], _ = pool.run(world, train, model_dir, settings, range(2, 4), None, tmp_path)[0]
    for world in (1, 2):
        for mine, theirs in zip(steps[world], steps[4], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


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
    pool.run(1, train, model_dir, {}, range(1), saved)
    for world in (1, 2):
        for answer in pool.run(world, load_other, other, saved):
            assert answer.startswith("checkpoint")
            assert "do not fit the model" in answer


# --- versions ---------------------------------------------------------------------------------------

MANY = {"vocab_size": 70_000, "hidden_size": 64}
"""The embeddings alone have more elements than a block of a delta."""


def make_experts() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {
        **MANY, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": True,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape)).eval()


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "dense": partial(make_model, **MANY),
    "tied, merged adapters": partial(make_model, **MANY, tie_word_embeddings=True),
    "tied experts": make_experts,
    "adapters": make_model,
}
BACKENDS: dict[str, dict[str, Any]] = {
    "tied, merged adapters": {"lora": {"rank": 2}},
    "adapters": {"lora": {"rank": 2, "publish": "adapters"}},
}


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
    ranks: Ranks, states: list[Path], backend: dict[str, Any], out: Path
) -> tuple[list[Written], list[int]]:
    """Writes this rank's range of both states. Returns: what it wrote, and the bytes that it held."""
    writer = RangeWriter(delta=True, rank=ranks.rank, world=ranks.world)
    results = []
    held = []
    for version, state in enumerate(states):
        settings = {"backend": {"name": "torch", "publish_dtype": "bfloat16", **backend}}
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
    found = {}
    for world in WORLDS:
        out = tmp_path / str(world)
        out.mkdir()
        (out / "full").touch()
        answers = pool.run(world, publish_two, states, BACKENDS.get(kind, {}), out)
        blocks = [Path(part_path(str(out / "delta"), rank)).read_bytes() for rank in range(world)]
        blocks[0] = blocks[0][HEADER_BYTES:]
        full = (out / "full").read_bytes()
        hashes = ["".join(results[version].hashes for results, _ in answers) for version in range(2)]
        found[world] = (full, b"".join(blocks), hashes)
        num_sharing = sum(results[0].num_bytes > 0 for results, _ in answers)
        assert num_sharing == min(world, 3 if kind == "dense" else 2)
        if kind == "dense" and world > 2:
            assert max(max(held) for _, held in answers) < 0.5 * len(full)
    assert found[2] == found[1]
    assert found[4] == found[1]
    assert len(found[1][1]) < len(found[1][0]), "it is a delta"

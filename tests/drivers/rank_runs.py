"""What tests of ranks run on each of them: steps of a tiny model, as a trainer's process would."""

import fcntl
import gc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from astraflow.dataflow.service.batch_slices import slice_indices
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import ShardConfig, TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.ranks import Ranks
from astraflow.trainer.torch.forward import ForwardEntryPoint, TrainerForward
from astraflow.trainer.torch.parallel.grid import make_grid
from astraflow.trainer.torch.parallel.sharding import ModelWeights, local_part
from astraflow.trainer.torch.side_models import vocab_size_of
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.trainer.torch.torch_files import file_tensors, load_model, open_model
from astraflow.trainer.torch.trained_model import TrainedModel
from astraflow.types import Batch
from drivers.trainer_builders import VOCAB_SIZE, make_batch, make_samples
from own_memory import OwnMemory

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


def make_experts(**overrides: object) -> PreTrainedModel:
    """A random mixture of four experts, of which each token gets two."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_experts": 4, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 256, "tie_word_embeddings": True, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**shape, **overrides})).eval()


def make_learner(ranks: Ranks, model_dir: Path, settings: dict[str, Any]) -> LossLearner:
    """The learner of one rank."""
    whole = {"lr": 1e-2, "steps": 10, "ranks": ranks.world, **settings}
    config = TrainConfig.model_validate_json(msgspec.json.encode(whole))
    backend = TorchBackend(config, model_dir=model_dir, seed=3, ranks=ranks)
    return LossLearner(config, backend, seed=3, ranks=backend.data_ranks)


def slice_of(step: int, ranks: Ranks) -> Batch:
    """What the dataflow sends to a rank; `ranks`: one of each slice."""
    whole = make_batch(make_samples(seed=step, num_groups=5), step=step)
    sizes = [len(sample.trajectory.mask) for sample in whole.samples]
    groups = [sample.group_id for sample in whole.samples]
    chosen = slice_indices(sizes, ranks.world, groups)[ranks.rank]
    samples = tuple(whole.samples[idx] for idx in chosen)
    return msgspec.structs.replace(whole, rank=ranks.rank, world=ranks.world, samples=samples)


def train_on_ranks(
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
        assert isinstance(learner.backend, TorchBackend)
        result = learner.train_step(slice_of(step, learner.backend.data_ranks))
        found.append({item.name: item.value for item in result.metrics if not item.name.endswith("_s")})
    version = {tensor.name: tensor.data.tobytes() for tensor in learner.export()}
    if saved is not None:
        learner.save(saved)()
    return found, version


OF_COMPUTED = {"computed_frac", "router_balance_loss", "router_entropy", "expert_load_max"}
"""Metrics over computed tokens. Those of a prompt are computed once for all its samples in a microbatch, so
their number depends on how samples are distributed over ranks."""
RankRun = tuple[list[dict[str, float]], dict[str, bytes]]
"""What `train_on_ranks` returns."""


def assert_same_run(found: RankRun, expected: RankRun) -> None:
    """Two runs of the same steps differ by rounding alone: loss, gradient and all other metrics; and weights,
    where a rank has all of them."""
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine.keys() == theirs.keys()
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for name in mine.keys() - OF_COMPUTED:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-4, abs=2e-6), name
    for name, data in found[1].items():
        if data:
            near = np.frombuffer(data, "f4") - np.frombuffer(expected[1][name], "f4")
            assert np.abs(near).max() < 1e-4, name


def load_weights(ranks: Ranks, model_dir: Path, shard: ShardConfig, checkpoint: Path) -> tuple[int, int]:
    """Opens, splits and fills a model, and then reads a checkpoint. Returns: by how many bytes this process's
    own memory grew at most, and those of its part."""
    grid = make_grid(ranks, shard, device="cpu")
    with OwnMemory() as memory:
        model, source = open_model(model_dir, grid)
        weights = ModelWeights(model, grid, source=source)
        weights.split(ForwardEntryPoint(model))
        weights.install(file_tensors([checkpoint]))
    return memory.growth, weights.held_bytes


def resume_optimizer(ranks: Ranks, model_dir: Path, checkpoint: Path) -> tuple[int, int, float]:
    """Resumes weights and optimizer, as a trainer does, one rank after the other: together, they hold all.

    Returns: by how many bytes this process's own memory grew at most, those of its part, and the
    sum of the last elements of its tensors.
    """
    config = TrainConfig.model_validate_json(msgspec.json.encode({"lr": 1e-3, "ranks": ranks.world}))
    assert isinstance(config.backend, TorchBackendConfig)
    grid = make_grid(ranks, config.shard, device="cpu")
    with (checkpoint / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with OwnMemory() as memory:
            model, source = open_model(model_dir, grid)
            weights = ModelWeights(model, grid, source=source)
            forward = TrainerForward(model, vocab_size=vocab_size_of(model), config=config.backend)
            forward.try_layouts = lambda: None  # type: ignore[method-assign] - a pass needs all ranks
            trained = TrainedModel(forward, config, weights=weights)
            load_model(checkpoint, trained, "model", None)
        parts = [local_part(parameter) for parameter in model.parameters()]
        total = sum(float(tensor.reshape(-1)[-1]) for tensor in (*parts, *trained.averages))
        num_bytes = trained.held_bytes
        del model, source, weights, forward, trained, parts
        gc.collect()
    return memory.growth, num_bytes, total


def gathered_dtypes(ranks: Ranks, model_dir: Path, dtype: str) -> tuple[str, str, str]:
    """The dtypes of a layer's weight and of the embeddings during a pass, and of the weight afterwards."""
    learner = make_learner(ranks, model_dir, {"backend": {"name": "torch", "dtype": dtype}})
    backend = learner.backend
    assert isinstance(backend, TorchBackend)
    model: Any = backend._model
    seen: list[str] = []
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda module, _: seen.append(str(module.mlp.up_proj.weight.dtype)))
    model.model.norm.register_forward_pre_hook(
        lambda module, _: seen.append(str(model.model.embed_tokens.weight.dtype))
    )
    learner.train_step(slice_of(0, backend.data_ranks))
    return seen[0], seen[1], str(layer.mlp.up_proj.weight.dtype)

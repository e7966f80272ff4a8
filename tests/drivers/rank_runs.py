"""What tests of ranks run on each of them: steps of a tiny model, as a trainer's process would."""

import fcntl
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from astraflow.dataflow.service.batch_slices import slice_indices
from astraflow.losses.policy import LossInputs
from astraflow.models.loading import file_tensors
from astraflow.protocols import AdamStep
from astraflow.trainer.backend_config import TorchBackendConfig
from astraflow.trainer.config import ShardConfig, TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.ranks import Ranks, is_lost_contact
from astraflow.trainer.torch.forward import ForwardEntryPoint, TrainerForward
from astraflow.trainer.torch.parallel.grid import make_grid
from astraflow.trainer.torch.parallel.sharding import ModelWeights, local_part
from astraflow.trainer.torch.side_models import vocab_size_of
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.trainer.torch.torch_files import load_model, open_model
from astraflow.trainer.torch.trained_model import TrainedModel
from astraflow.types import Batch, Sample
from drivers.trainer_builders import VOCAB_SIZE, make_batch, make_samples
from harness import OwnMemory

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


RankRun = tuple[list[dict[str, float]], dict[str, bytes]]
"""The metrics of each step, and what this rank has of the version after the last: rank 0 all of it, since it
is smaller than a segment."""


def train_on_ranks(
    ranks: Ranks,
    model_dir: Path,
    settings: dict[str, Any],
    steps: range,
    saved: Path | None = None,
    loaded: Path | None = None,
) -> RankRun:
    """Trains some steps, from a checkpoint if one is to be loaded."""
    learner = make_learner(ranks, model_dir, settings)
    if loaded is not None:
        learner.load(loaded)
    found = _train(learner, steps)
    if saved is not None:
        learner.save(saved)()
    return found


def resume_on_ranks(
    ranks: Ranks, model_dir: Path, settings: dict[str, Any], steps: range, loaded: Path
) -> tuple[dict[str, bytes], RankRun]:
    """Does the same from a checkpoint. Returns: the version that it holds, and the run."""
    learner = make_learner(ranks, model_dir, settings)
    learner.load(loaded)
    return _train(learner, range(0))[1], _train(learner, steps)


def _train(learner: LossLearner, steps: range) -> RankRun:
    found = []
    for step in steps:
        assert isinstance(learner.backend, TorchBackend)
        result = learner.train_step(slice_of(step, learner.backend.data_ranks))
        found.append({item.name: item.value for item in result.metrics if not item.name.endswith("_s")})
    return found, {tensor.name: tensor.data.tobytes() for tensor in learner.export()}


OF_COMPUTED = {"computed_frac", "router_balance_loss", "router_entropy", "expert_load_max"}
"""Metrics over computed tokens. Those of a prompt are computed once for all its samples in a microbatch, so
their number depends on how samples are distributed over ranks."""


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


@dataclass(frozen=True)
class CutStep:
    """What one rank computed in a step of several minibatches."""

    num_parts: list[int]
    """Microbatches of each minibatch on this rank."""
    gradients: list[np.ndarray]
    """The whole policy's gradient of each minibatch, before clipping."""
    statistics: list[dict[str, float]]
    metrics: dict[str, float]


class WatchedBackend(TorchBackend):
    """Notes the microbatches and the gradient of each optimizer step."""

    def __init__(self, config: TrainConfig, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.num_parts: list[int] = []
        self.gradients: list[np.ndarray] = []

    def forward_backward(self, columns: Any, parts: Any, objective: Any, *, model: Any = "policy") -> int:
        self.num_parts.append(len(parts))
        return super().forward_backward(columns, parts, objective, model=model)

    def optim_step(self, step: AdamStep, *, model: Any = "policy") -> float:
        gradients = [parameter.grad for parameter in self._model.parameters()]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in gradients if g is not None]
        self.gradients.append(torch.cat([g.flatten() for g in whole]).numpy().copy())
        return super().optim_step(step, model=model)


def train_in_cuts(
    ranks: Ranks, model_dir: Path, cases: Sequence[dict[str, Any]], samples: Sequence[Sample]
) -> list[CutStep]:
    """One step on the samples with each of several settings."""
    return [_train_cut(ranks, model_dir, case, samples) for case in cases]


def _train_cut(ranks: Ranks, model_dir: Path, settings: dict[str, Any], samples: Sequence[Sample]) -> CutStep:
    # With a large epsilon, a step is proportional to the gradient, so that it does not amplify rounding.
    optimizer = {"eps": 1.0, "max_grad_norm": 1e9}
    whole = {"lr": 0.05, "steps": 10, "ranks": ranks.world, "optimizer": optimizer, **settings}
    config = TrainConfig.model_validate_json(msgspec.json.encode(whole))
    backend = WatchedBackend(config, model_dir=model_dir, seed=3, ranks=ranks)
    learner = LossLearner(config, backend, seed=3, ranks=backend.data_ranks)
    statistics: list[dict[str, float]] = []
    inner = learner._loss.statistics
    if inner is not None:

        def noted(inputs: LossInputs) -> Any:
            found = inner(inputs)
            statistics.append({name: float(value) for name, value in found.items()})
            return found

        learner._loss = replace(learner._loss, statistics=noted)
    batch = make_batch(samples, trainer_version=2)
    sizes = [len(sample.trajectory.mask) for sample in samples]
    chosen = slice_indices(sizes, ranks.world, [sample.group_id for sample in samples])[ranks.rank]
    own = tuple(samples[idx] for idx in chosen)
    result = learner.train_step(
        msgspec.structs.replace(batch, rank=ranks.rank, world=ranks.world, samples=own)
    )
    metrics = {item.name: item.value for item in result.metrics if not item.name.endswith("_s")}
    return CutStep(backend.num_parts, backend.gradients, statistics, metrics)


class _SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(grad)
        return grad


def judge_errors(ranks: Ranks) -> dict[str, bool]:
    """Returns whether each error of rank 0, whose peer leaves, counts as lost contact."""
    weight = distribute_tensor(torch.ones(4, 2), init_device_mesh("cpu", (2,)), [Shard(0)])
    if ranks.rank:
        return {}
    value = torch.ones(2, requires_grad=True)

    def fail() -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")

    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: ranks.gather_values(1),
        "gather of a sharded weight": weight.full_tensor,
        "sum in a backward pass": lambda: _SummedGradient.apply(value).sum().backward(),
        "shapes": lambda: torch.ones(2) @ torch.ones(3),
        "shapes of sharded weights": lambda: weight @ weight,
        "user's": fail,
    }
    judged = {}
    for name, call in calls.items():
        with pytest.raises(RuntimeError) as caught:
            call()
        assert type(caught.value) is RuntimeError
        judged[name] = is_lost_contact(caught.value)
    return judged

"""What tests of the backend `megatron` run on each rank."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from astraflow.service.progress_bars import progress_bars_off
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.ranks import Ranks, SlicesBatches
from drivers.rank_runs import slice_of
from drivers.trainer_builders import VOCAB_SIZE

RankRun = tuple[list[dict[str, float]], dict[str, bytes]]


def make_decoder(family: str, folder: Path, **overrides: object) -> Path:
    """Writes a random model with 4 query heads, 2 key heads and 4 layers."""
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}
    shape = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "tie_word_embeddings": True, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": 1,
        "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{names[family]}Config")(**{**shape, **overrides})
    model = getattr(transformers, f"{names[family]}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:  # norms are all 1, and biases all 0
                weight.copy_(torch.linspace(0.5, 1.5, len(weight)) * (0.3 if "bias" in name else 1))
    with progress_bars_off():
        model.save_pretrained(folder)
    return folder


def learner_of(ranks: Ranks, model_dir: Path, settings: dict[str, Any]) -> LossLearner:
    """The learner of one rank, made as a trainer's process makes it."""
    whole = {"lr": 3e-4, "steps": 40, "ranks": ranks.world, **settings}
    config = TrainConfig.model_validate_json(msgspec.json.encode(whole))
    learner = make_learner(config, model_dir=model_dir, seed=3, ranks=ranks)
    assert isinstance(learner, LossLearner)
    return learner


def train(
    ranks: Ranks,
    model_dir: Path,
    settings: dict[str, Any],
    steps: range,
    saved: Path | None = None,
    loaded: Path | None = None,
) -> RankRun:
    """The metrics of each step, and what this rank has of the version after the last."""
    learner = learner_of(ranks, model_dir, settings)
    if loaded is not None:
        learner.load(loaded)
    assert isinstance(learner.backend, SlicesBatches)
    found = []
    for step in steps:
        result = learner.train_step(slice_of(step, learner.backend.data_ranks))
        found.append({item.name: item.value for item in result.metrics if not item.name.endswith("_s")})
    version = {
        f"{tensor.name} {tensor.shape} {tensor.dtype}": tensor.data.tobytes() for tensor in learner.export()
    }
    if saved is not None:
        learner.save(saved)()
    return found, version


def refusal(ranks: Ranks, model_dir: Path, settings: dict[str, Any], loaded: Path | None = None) -> str:
    """The error of a learner that can't be made, or can't load a checkpoint."""
    from astraflow.errors import Error

    try:
        learner = learner_of(ranks, model_dir, settings)
        if loaded is not None:
            learner.load(loaded)
    except Error as err:
        return f"{type(err).__name__}: {err}"
    return "none"


def scores(ranks: Ranks, model_dir: Path, settings: dict[str, Any]) -> np.ndarray:
    """The logprobs of a batch."""
    from astraflow.trainer.columns import columns_from_samples

    learner = learner_of(ranks, model_dir, settings)
    assert isinstance(learner.backend, SlicesBatches)
    batch = slice_of(0, learner.backend.data_ranks)
    columns = columns_from_samples(batch.samples, vocab_size=VOCAB_SIZE, is_slice=True)
    parts = learner.backend.cut(columns, np.arange(len(columns.lengths)))
    return learner.backend.logprobs(columns, parts)


def held(ranks: Ranks, model_dir: Path, settings: dict[str, Any]) -> tuple[dict[str, int], dict[str, float]]:
    """The bytes that megatron-core's buffers and optimizer hold after a step, and what was expected."""
    from astraflow.addons.megatron.memory import rank_need

    learner = learner_of(ranks, model_dir, settings)
    backend: Any = learner.backend
    learner.train_step(slice_of(0, backend.data_ranks))
    policy = backend.trained_model("policy")
    states = policy._optimizer.optimizer.state.values()
    masters = [shard for group in policy._optimizer.shard_fp32_from_float16_groups for shard in group]
    averages = [value for state in states for value in state.values() if value.ndim]
    actual = {
        "weights": sum(weight.nbytes for weight in policy.model.parameters()),
        "gradients": sum(buffer.grad_data.nbytes for buffer in policy.module.buffers),
        "optimizer": sum(tensor.nbytes for tensor in (*masters, *averages)),
    }
    return actual, dict(rank_need(backend._config, model_dir).lasting)

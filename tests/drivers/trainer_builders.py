"""Builders for tests of trainer and losses."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from astraflow import wire
from astraflow.losses.config import ValueModelConfig
from astraflow.protocols import AdamStep, TrainerBackend
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.objective import ValueObjective
from astraflow.types import AdvantageSpan, Batch, BatchTotals, Sample, Trajectory, VersionSpan
from astraflow.types.token_columns import Columns

VOCAB_SIZE = 24


def make_tiny_model(seed: int = 0, **overrides: object) -> Qwen3ForCausalLM:
    """A random model of two layers, with weights large enough that attention matters."""
    torch.set_num_threads(1)  # more threads than free cores slow tiny models down by an order of magnitude
    torch.manual_seed(seed)
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
        "tie_word_embeddings": False, "initializer_range": 0.3,
        "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    return Qwen3ForCausalLM(Qwen3Config(**{**settings, **overrides})).eval()


def save_model(folder: Path, **overrides: object) -> Path:
    """A model folder."""
    make_tiny_model(**overrides).save_pretrained(folder)
    return folder


def make_sample(
    prompt: Sequence[int] = (2, 3, 4),
    sampled: Sequence[int] = (5, 6),
    *,
    group_id: int = 0,
    episode_idx: int = 0,
    advantage: float = 1.0,
    behavior: Sequence[float] | None = None,
    version: int = 0,
    temperature: float = 1.0,
) -> Sample:
    """A sample of one turn."""
    ids, num = [*prompt, *sampled], len(prompt)
    logprobs = [0.0] * num + list(behavior if behavior is not None else [-1.0] * len(sampled))
    trajectory = Trajectory(
        policy="actor",
        role="actor",
        token_ids=wire.column(ids, "int32"),
        mask=wire.column([0] * num + [1] * len(sampled), "uint8"),
        behavior_logprobs=wire.column(logprobs, "float32"),
        versions=(VersionSpan(num, len(sampled), version),),
        temperature=temperature,
        finish_reason="stop",
        turns=(),
        reward=0.0,
    )
    return Sample(
        group_id=group_id,
        episode_idx=episode_idx,
        task_id=f"t/{group_id}",
        trajectory=trajectory,
        advantages=(AdvantageSpan(num, len(ids), advantage),),
    )


def make_samples(seed: int = 0, num_groups: int = 4, group_size: int = 4, **settings: object) -> list[Sample]:
    """Groups with a shared prompt and random completions, advantages and behavior logprobs."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for group in range(num_groups):
        prompt = rng.integers(2, VOCAB_SIZE, int(rng.integers(3, 10))).tolist()
        for episode in range(group_size):
            sampled = rng.integers(2, VOCAB_SIZE, int(rng.integers(1, 8))).tolist()
            samples.append(
                make_sample(
                    prompt,
                    sampled,
                    group_id=group,
                    episode_idx=episode,
                    advantage=float(rng.normal()),
                    behavior=(-3 + rng.normal(0, 0.3, len(sampled))).tolist(),
                    **settings,  # type: ignore[arg-type]
                )
            )
    return samples


def make_batch(samples: Sequence[Sample], *, step: int = 0, trainer_version: int | None = None) -> Batch:
    """The only rank's batch of a step."""
    totals = BatchTotals(
        num_groups=len({s.group_id for s in samples}), num_samples=len(samples), num_tokens=0,
        num_trained_tokens=0, advantage_sum=0.0, advantage_square_sum=0.0, reward_sum=0.0,
    )  # fmt: skip
    return Batch(
        policy="actor", step=step, rank=0, world=1, samples=tuple(samples), totals=totals,
        trainer_version=step if trainer_version is None else trainer_version,
        staleness_mean=0.0, staleness_max=0,
    )  # fmt: skip


def logprobs_alone(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Logprobs of a sample's trained tokens, from a forward pass of nothing else."""
    ids = torch.tensor(wire.array(sample.trajectory.token_ids, "int32").astype(np.int64))
    mask = torch.tensor(wire.array(sample.trajectory.mask, "uint8").astype(bool))
    with torch.no_grad():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1] / sample.trajectory.temperature
    return torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0][mask[1:]]


def first_moments(checkpoint: Path) -> torch.Tensor:
    """AdamW's averages of the gradient in a checkpoint, joined."""
    from safetensors.torch import load_file

    files = [load_file(path) for path in sorted(checkpoint.glob("optimizer-*.safetensors"))]
    names = sorted({name for file in files for name in file if name.endswith(".exp_avg")})
    return torch.cat([file[name].flatten() for name in names for file in files if name in file])


def values_of(backend: TrainerBackend, columns: Columns) -> np.ndarray:
    """The critic's values of all samples."""
    everything = np.arange(len(columns.lengths))
    return backend.values(columns, backend.cut(columns, everything, model="critic"))


def fit_critic(backend: TrainerBackend, config: TrainConfig, columns: Columns, returns: np.ndarray) -> None:
    """One optimizer step of the critic on all samples, by the settings of a recipe."""
    critic, optimizer = config.auxiliary.critic, config.optimizer
    assert isinstance(critic, ValueModelConfig)
    parts = backend.cut(columns, np.arange(len(columns.lengths)), model="critic")
    objective = ValueObjective(values_of(backend, columns), returns, critic.clip, len(returns))
    backend.forward_backward(columns, parts, objective, model="critic")
    step = AdamStep(
        lr=critic.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
    )  # fmt: skip
    backend.optim_step(step, model="critic")

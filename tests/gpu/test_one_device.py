"""What only a GPU has, beside what a CPU computes: `make test-gpu` runs it.

`ASTRAFLOW_TEST_DEVICE=cpu` runs the same tests on a CPU, so that they stay right where there is no GPU.
"""

import asyncio
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from astraflow.models.export import begin_export
from astraflow.models.loading import load_causal_lm, torch_tensor
from astraflow.trainer.columns import columns_from_samples
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.step import entropies, token_logprobs
from astraflow.trainer.torch.head import chunked_logprobs
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.trainer.torch.varlen import find_varlen
from astraflow.types import GenerateRequest, Sampling
from drivers.engine_models import make_engine_on, snapshot_of
from drivers.trainer_builders import make_batch, make_sample, make_samples, save_model

DEVICE = os.environ.get("ASTRAFLOW_TEST_DEVICE", "cuda:0")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(DEVICE != "cpu" and not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPE = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 512}
"""Kernels for variable lengths need heads of 32 or more."""
BF16_NATS = 0.15
"""Rounding of this model, whose logits are large, is 0.06 on a CPU; a wrong formula is off by more than 1."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), **SHAPE)


def make_learner(model_dir: Path, device: str = DEVICE, **backend: object) -> LossLearner:
    fields = {"lr": 1e-3, "backend": {"name": "torch", "device": device, **backend}}
    config = TrainConfig.model_validate_json(msgspec.json.encode(fields))
    return LossLearner(config, TorchBackend(config, model_dir=model_dir))


def logprobs_of(learner: LossLearner) -> np.ndarray:
    samples = make_samples(5, num_groups=3)
    columns = columns_from_samples(samples, vocab_size=learner.backend.vocab_size)
    return learner.backend.logprobs(columns, learner.backend.cut(columns, np.arange(len(samples))))


def test_weights_are_on_the_device_in_float32_and_are_published_in_bfloat16(model_dir: Path) -> None:
    learner = make_learner(model_dir, dtype="bfloat16", publish_dtype="bfloat16")
    learner.train_step(make_batch(make_samples()))
    assert isinstance(learner.backend, TorchBackend)
    parameters = list(learner.backend._model.parameters())
    assert {parameter.device for parameter in parameters} == {torch.device(DEVICE)}
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    assert {tensor.dtype for tensor in learner.export()} == {"bfloat16"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_logprobs_are_those_of_a_cpu(model_dir: Path, dtype: str, activations: str) -> None:
    expected = logprobs_of(make_learner(model_dir, "cpu"))
    found = logprobs_of(make_learner(model_dir, dtype=dtype, activations=activations))
    assert np.abs(found - expected).max() < (1e-4 if dtype == "float32" else BF16_NATS)


def test_a_gpu_has_attention_for_sequences_of_any_length() -> None:
    assert (find_varlen(DEVICE) is not None) == DEVICE.startswith("cuda")


@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_the_chunked_head_is_the_plain_one(entropy: str) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(700, 32, generator=generator).to(DEVICE).requires_grad_()
    weight = torch.randn(9_000, 32, generator=generator).mul(0.1).to(DEVICE).requires_grad_()
    ids = torch.randint(0, 9_000, (700,), generator=generator).to(DEVICE)
    plain = hidden @ weight.t()
    wanted = (token_logprobs(plain, ids), entropies(plain))
    found = chunked_logprobs(hidden, weight, ids, entropy=entropy)  # type: ignore[arg-type]
    parts = 2 if entropy == "gradient" else 1
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine is not None
        assert torch.allclose(mine, theirs, atol=1e-4)
    both = [
        torch.autograd.grad(sum(p.sum() for p in some[:parts]), (hidden, weight), retain_graph=True)  # type: ignore[union-attr, arg-type]
        for some in (found, wanted)
    ]
    for mine, theirs in zip(*both, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3, rtol=1e-3)


def test_a_version_is_that_of_its_export_whatever_training_does_meanwhile() -> None:
    weight = torch.arange(1 << 20, dtype=torch.float32, device=DEVICE)
    expected = weight.to("cpu", torch.bfloat16)
    version = begin_export([("w", weight)], "bfloat16", elements={"w": (0, weight.numel())})
    weight.zero_()
    (tensor,) = version
    assert torch.equal(torch_tensor(tensor), expected)


def test_engine_and_trainer_agree(model_dir: Path) -> None:
    async def generate() -> tuple[tuple[int, ...], tuple[float, ...]]:
        snapshot = snapshot_of(load_causal_lm(model_dir), model_dir)
        engine = make_engine_on(snapshot, device=DEVICE)
        done = await engine.generate(
            GenerateRequest(token_ids=(5, 9, 3), sampling=Sampling(max_tokens=40, seed=1))
        )
        await engine.close()
        return done.token_ids, done.logprobs

    sampled, behavior = asyncio.run(generate())
    sample = make_sample((5, 9, 3), sampled, behavior=behavior)
    metrics = make_learner(model_dir).train_step(make_batch([sample])).metrics
    assert {item.name: item.value for item in metrics}["behavior_gap_max"] < 1e-4


def test_offloaded_averages_train_as_those_on_the_device_do(model_dir: Path) -> None:
    versions = []
    for settings in ({}, {"offload_optimizer": True}):
        learner = make_learner(model_dir, **settings)
        for step in range(3):
            learner.train_step(make_batch(make_samples(seed=step), step=step))
        versions.append([torch_tensor(tensor) for tensor in learner.export()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*versions, strict=True))

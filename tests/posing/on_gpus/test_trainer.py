"""A trainer on one GPU: places, kernels, waits, copies, checkpoints, and too little memory."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from astraflow.errors import ConfigError, TrainingError
from astraflow.models.loading import torch_tensor
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch import memory
from astraflow.trainer.torch.head import chunked_logprobs
from astraflow.trainer.torch.lean_adam import LeanAdamW
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.trainer.torch.varlen import find_varlen
from drivers.rank_runs import CASES, make_experts
from drivers.trainer_builders import make_batch, make_samples, make_tiny_model, save_model
from posing import gpus

GPU = "cuda:2"
"""Not the first, so that a tensor on the default GPU is noticed."""
SHAPE = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 512}
EXPERT_CASES: dict[str, dict[str, Any]] = {
    "experts": {},
    "experts with lora": {
        "backend": {"name": "torch", "lora": {"rank": 2, "targets": ["gate_proj", "up_proj", "down_proj"]}}
    },
}
ALL_CASES = {**CASES, **EXPERT_CASES, "recompute": {"backend": {"name": "torch", "activations": "recompute"}}}


def learner_on(device: str, folder: Path, settings: dict[str, Any]) -> LossLearner:
    backend = {"name": "torch", **settings.get("backend", {}), "device": device}
    fields = {"lr": 1e-3, "steps": 10, **settings, "backend": backend}
    config = TrainConfig.model_validate_json(msgspec.json.encode(fields))
    return LossLearner(config, TorchBackend(config, model_dir=folder, seed=3), seed=3)


def model_of(learner: LossLearner) -> Any:
    assert isinstance(learner.backend, TorchBackend)
    return learner.backend._model


def version_of(learner: LossLearner) -> list[np.ndarray]:
    return [torch_tensor(tensor).float().numpy() for tensor in learner.export()]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("dense"), **SHAPE)


@pytest.mark.parametrize("case", ALL_CASES)
def test_two_steps_on_a_gpu_are_those_on_a_cpu(dense: Path, tmp_path: Path, case: str) -> None:
    folder = dense
    if case in EXPERT_CASES:
        folder = tmp_path
        make_experts().save_pretrained(folder)
    runs = []
    for device in ("cpu", GPU):
        learner = learner_on(device, folder, ALL_CASES[case])
        metrics = [
            learner.train_step(make_batch(make_samples(seed=step), step=step)).metrics for step in (0, 1)
        ]
        assert {str(parameter.device) for parameter in model_of(learner).parameters()} == {device}
        runs.append(([{m.name: m.value for m in step} for step in metrics], version_of(learner)))
    for on_cpu, on_gpu in zip(runs[0][0], runs[1][0], strict=True):
        assert on_gpu["loss"] == pytest.approx(on_cpu["loss"], abs=1e-5)
        assert on_gpu["grad_norm"] == pytest.approx(on_cpu["grad_norm"], rel=1e-3)
    assert all(np.allclose(a, b, atol=2e-3) for a, b in zip(runs[0][1], runs[1][1], strict=True))


@pytest.mark.parametrize("make", [make_tiny_model, make_experts])
def test_the_kernel_for_sequences_of_any_length_computes_each_layer(
    tmp_path: Path, make: Callable[..., Any]
) -> None:
    make(**SHAPE).save_pretrained(tmp_path)
    learner = learner_on(GPU, tmp_path, {"backend": {"dtype": "bfloat16"}})
    before = gpus.varlen_attn.calls  # type: ignore[attr-defined]
    learner.train_step(make_batch(make_samples()))
    num_layers = model_of(learner).config.num_hidden_layers
    assert gpus.varlen_attn.calls - before == num_layers  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_a_kernel_with_a_wrong_output_or_gradient_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(query: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        right = gpus.varlen_attn(query, *args, **options)
        return right * 2 if wrong == "output" else right * 2 - right.detach()

    assert find_varlen(GPU) is not None
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    assert find_varlen(GPU) is None


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of what it does itself
@pytest.mark.parametrize(
    ("make", "breaks", "most"),
    [
        (make_tiny_model, {"Skip calling `torch.compiler.disable()`d function"}, 6),
        (make_experts, {"Skip calling `torch.compiler.disable()`d function", "Dynamic shape operator"}, 16),
    ],
)
def test_compiled_layers_break_only_at_attention_and_where_experts_count_their_tokens(
    make: Callable[..., Any], breaks: set[str], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graphs are captured as on a GPU, and run uncompiled, because there is no Triton here."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", torch.cuda.current_device, raising=False)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda _: None)
    torch.compiler.reset()
    counters.clear()
    make(**SHAPE).save_pretrained(tmp_path)
    backend = {"dtype": "bfloat16", "compile_layers": True, "activations": "recompute"}
    learner = learner_on(GPU, tmp_path, {"backend": backend})
    for step in range(2):
        learner.train_step(make_batch(make_samples(seed=step), step=step))
    assert {reason.partition("\n")[0] for reason in counters["graph_break"]} == breaks
    assert sum(counters["graph_break"].values()) <= most  # in the code that all layers share


def test_the_host_waits_for_no_pass(dense: Path) -> None:
    """A step of many passes has no more waits than one of few, so that the host prepares the next pass."""
    waits = []
    for budget in (1000, 40):
        learner = learner_on(GPU, dense, {"token_budget": budget, "backend": {"dtype": "bfloat16"}})
        learner.train_step(make_batch(make_samples(seed=0)))
        gpus.reset_counters()
        learner.train_step(make_batch(make_samples(seed=1), step=1))
        waits.append({name: num for name, num in gpus.counters().items() if name.startswith("wait:")})
    assert waits[1] == waits[0]


def test_a_version_leaves_the_gpu_through_pinned_memory_without_a_wait(dense: Path) -> None:
    learner = learner_on(GPU, dense, {})
    learner.train_step(make_batch(make_samples()))
    gpus.reset_counters()
    num_tensors = len(list(learner.export()))
    found = gpus.counters()
    assert found["copy_to_host"] == found["pinned_allocation"] == num_tensors
    assert "wait:copy_to_host" not in found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_offloaded_averages_travel_in_slices_without_a_wait(dtype: str) -> None:
    """Slices of 1,000 of 2,500 and 900 values: four slices, each with two averages, there and back."""
    found: list[torch.Tensor] = []
    for device in ("cpu", GPU):
        weights = [nn.Parameter(torch.linspace(-1, 1, num).to(device)) for num in (2500, 900)]
        optimizer = LeanAdamW(weights, dtype=getattr(torch, dtype), offload=True, slice_size=1000)
        for step in range(3):
            for weight in weights:
                weight.grad = torch.full_like(weight, step - 0.5)
            gpus.reset_counters()
            optimizer.step()
            counters = gpus.counters()
        found.append(torch.cat([weight.detach().cpu() for weight in weights]))
    assert torch.equal(found[0], found[1])
    assert counters["copy_to_device"] >= 8
    assert counters["copy_to_host"] >= 8
    assert not any(name.startswith("wait:copy") for name in counters), counters


@pytest.mark.parametrize("case", ["grpo", "lora", "lean optimizer, layers again", "critic and split groups"])
def test_a_checkpoint_moves_between_gpu_and_cpu(dense: Path, tmp_path: Path, case: str) -> None:
    whole = learner_on(GPU, dense, CASES[case])
    whole.train_step(make_batch(make_samples(seed=0)))
    whole.save(tmp_path)()
    saved = version_of(whole)
    for device in ("cpu", "cuda:5"):
        resumed = learner_on(device, dense, CASES[case])
        resumed.load(tmp_path)
        assert all(np.array_equal(a, b) for a, b in zip(version_of(resumed), saved, strict=True))
        resumed.train_step(make_batch(make_samples(seed=1), step=1))
        assert {str(parameter.device) for parameter in model_of(resumed).parameters()} == {device}


def test_a_gpu_that_is_too_small_or_taken_is_refused_with_what_would_help(dense: Path) -> None:
    assert memory.free_bytes(GPU) == (80 << 30) - gpus.used_bytes(2)
    gpus.set_capacity(gpus.used_bytes(2) + 1_000_000)
    try:
        with pytest.raises(
            ConfigError, match=r"does not fit: .* need .* are free: .*; to save most, set .* or "
        ):
            learner_on(GPU, dense, {})
    finally:
        gpus.set_capacity(80 << 30)


def test_a_step_that_runs_out_of_memory_says_what_was_expected(dense: Path) -> None:
    learner = learner_on(GPU, dense, {})
    learner.train_step(make_batch(make_samples()))
    gpus.set_capacity(gpus.used_bytes(2) + 10_000)
    try:
        with pytest.raises(TrainingError, match=r"cuda:2 is out of memory .* the estimate before"):
            learner.train_step(make_batch(make_samples(), step=1))
    finally:
        gpus.set_capacity(80 << 30)


def test_a_float32_head_multiplies_16_bit_numbers_without_rounding_the_logits() -> None:
    hidden = (4 * torch.randn(600, 64, generator=torch.Generator().manual_seed(0))).bfloat16()
    weight = torch.randn(9_000, 64, generator=torch.Generator().manual_seed(1))
    found: list[tuple[torch.Tensor, ...]] = []
    for device in ("cpu", GPU):
        given = hidden.to(device).requires_grad_()
        head = weight.to(device).requires_grad_()
        ids = torch.arange(600, device=device)
        logprobs, entropies = chunked_logprobs(given, head, ids, entropy="gradient", is_wide=True)
        assert entropies is not None
        loss = logprobs.mean() + entropies.mean()
        found.append((logprobs, entropies, *torch.autograd.grad(loss, (given, head))))
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert on_gpu.dtype == on_cpu.dtype
        assert float((on_gpu.cpu() - on_cpu).detach().norm() / on_cpu.detach().norm()) < 1e-2
    assert float((found[0][0] - found[1][0].cpu()).detach().abs().max()) < 1e-4

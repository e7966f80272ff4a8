"""AdamW with narrow averages against torch's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from astraflow.trainer.ranks import ALONE
from astraflow.trainer.torch.lean_adam import LeanAdamW
from astraflow.trainer.torch.optimizer_files import OptimizerPart, read_optimizer
from astraflow.trainer.torch.parallel.sharding import TrainedPart

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def make(dtype: torch.dtype, *, offload: bool = True) -> tuple[nn.Parameter, LeanAdamW]:
    parameter = nn.Parameter(torch.linspace(-1, 1, 64))
    optimizer = LeanAdamW([parameter], dtype=dtype, offload=offload)
    optimizer.param_groups[0].update(SETTINGS)
    return parameter, optimizer


def train(parameter: nn.Parameter, optimizer: torch.optim.Optimizer, steps: range) -> torch.Tensor:
    for step in steps:
        parameter.grad = torch.randn(64, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return parameter.detach().clone()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-3)])
def test_steps_are_those_of_adamw(dtype: torch.dtype, tolerance: float) -> None:
    plain = nn.Parameter(torch.linspace(-1, 1, 64))
    expected = train(plain, torch.optim.AdamW([plain], **SETTINGS), range(20))
    parameter, optimizer = make(dtype)
    assert (train(parameter, optimizer, range(20)) - expected).abs().max() < tolerance
    assert {optimizer.state[parameter][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_a_weight_are_updated_like_the_whole(dtype: torch.dtype) -> None:
    found: list[torch.Tensor] = []
    for slice_size in (64, 10):
        parameter = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
        transposed = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8).t())  # stays whole
        optimizer = LeanAdamW([parameter, transposed], dtype=dtype, offload=True, slice_size=slice_size)
        optimizer.param_groups[0].update(SETTINGS)
        for step in range(3):
            for each in (parameter, transposed):
                each.grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            optimizer.step()
        found += [parameter.detach(), transposed.detach()]
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def test_a_resume_goes_on_bit_for_bit_with_averages_as_narrow_as_before(tmp_path: Path) -> None:
    straight = train(*make(torch.bfloat16), range(6))
    first, optimizer = make(torch.bfloat16)
    train(first, optimizer, range(3))
    second, resumed = make(torch.bfloat16)
    second.data.copy_(first.data)
    OptimizerPart.of(optimizer, {"w": TrainedPart(first, first)}, ALONE, prefix="o").write(tmp_path)
    parts = {"w": TrainedPart(second, second)}
    read_optimizer(tmp_path, resumed, parts, prefix="o", zeros=resumed.make_average)
    assert resumed.state[second]["exp_avg"].dtype == torch.bfloat16
    assert torch.equal(train(second, resumed, range(3, 6)), straight)


# As `bfloat16` in the docstring of the module and in docs/large_models.md states.
@pytest.mark.parametrize(
    ("betas", "noise", "expected", "tolerance"),
    [
        ((0.9, 0.95), 0.0, 1.003, 0.005),
        ((0.9, 0.99), 0.0, 1.10, 0.02),  # the betas of the full-size recipes
        ((0.9, 0.999), 0.0, 1.23, 0.03),  # which a recipe can't have
        ((0.9, 0.99), 1.0, 1.0, 0.01),
    ],
)
def test_what_averages_in_bfloat16_cost_is_as_stated(
    betas: tuple[float, float], noise: float, expected: float, tolerance: float
) -> None:
    assert _mean_step(torch.bfloat16, betas, noise) / _mean_step(
        torch.float32, betas, noise
    ) == pytest.approx(expected, abs=tolerance)


def _mean_step(dtype: torch.dtype, betas: tuple[float, float], noise: float) -> float:
    """Mean size of the last 100 of 600 updates, for gradients with noise of a share of their signal."""
    torch.manual_seed(1)
    weight = torch.nn.Parameter(torch.zeros(2000))
    optimizer = LeanAdamW([weight], dtype=dtype, offload=False)
    optimizer.param_groups[0].update(lr=1e-6, betas=betas, eps=1e-8, weight_decay=0.0)
    signal = torch.rand(2000) * 1.5 + 0.5
    total = 0.0
    for step in range(600):
        weight.grad = signal * (1 + noise * torch.randn(2000))
        before = weight.detach().clone()
        optimizer.step()
        if step >= 500:
            total += float((weight.detach() - before).abs().mean())
    return total

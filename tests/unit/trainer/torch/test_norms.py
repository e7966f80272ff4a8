"""Norms with a backward pass of their own, against autograd through the models' way of writing them."""

import torch
from torch import Tensor, nn

from astraflow.trainer.torch.norms import replace_norms, rms_norm


class PlainRMSNorm(nn.Module):
    """As Llama and Qwen3 have it."""

    def __init__(self, size: int, eps: float = 1e-3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, generator=torch.Generator().manual_seed(0)))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        hidden = hidden_states.float()
        hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden.to(dtype)


class ShiftedRMSNorm(PlainRMSNorm):
    """As Gemma has it: the weight is counted from 1."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) / self.weight * (1 + self.weight)


def test_value_and_gradients_are_those_of_autograd() -> None:
    norm = PlainRMSNorm(8)
    for shape in ((5, 8), (2, 3, 4, 8)):
        hidden = torch.randn(shape, generator=torch.Generator().manual_seed(1), requires_grad=True)
        out, ours = norm(hidden), rms_norm(hidden, norm.weight, norm.variance_epsilon)
        torch.testing.assert_close(ours, out)
        towards = torch.randn(shape, generator=torch.Generator().manual_seed(2))
        expected = torch.autograd.grad(out, (hidden, norm.weight), towards)
        found = torch.autograd.grad(ours, (hidden, norm.weight), towards)
        torch.testing.assert_close(found, expected)


def test_the_gradient_is_that_of_finite_differences() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(3, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-3), (hidden, weight))


def test_only_norms_that_compute_the_same_are_replaced() -> None:
    model = nn.Sequential(PlainRMSNorm(8), ShiftedRMSNorm(8), nn.LayerNorm(8), PlainRMSNorm(8))
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(4))
    before = model(hidden)
    assert replace_norms(model) == 2
    torch.testing.assert_close(model(hidden), before)


def test_other_dtypes_take_the_models_own_way() -> None:
    norm = PlainRMSNorm(8)
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    before = norm(hidden)
    replace_norms(norm)
    assert torch.equal(norm(hidden), before)

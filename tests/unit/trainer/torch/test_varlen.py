"""Attention by a variable-length kernel, as three versions of torch have it, against plain attention."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from astraflow.trainer.torch.varlen import VarlenKernel, VarlenRows, find_varlen

LENGTHS = (4, 1, 3)


def kernel(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, **options: Any) -> Tensor:
    """What torch's kernel computes, one sequence at a time."""
    assert longest == max(LENGTHS)
    parts: list[Tensor] = []
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        heads = [x[first:last].transpose(0, 1)[None] for x in (query, key, value)]
        out = scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True, **options)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def torch_2_10(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    assert is_causal
    return kernel(query, key, value, cu_seq_q, max_q)


def torch_2_11(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1),
) -> Tensor:  # fmt: skip
    assert window_size == (-1, 0)
    return kernel(query, key, value, cu_seq_q, max_q, scale=scale)


def torch_2_12(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
    *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    assert window_size == (-1, 0)
    return kernel(query, key, value, cu_seq_q, max_q, scale=scale, enable_gqa=enable_gqa)


@pytest.mark.parametrize("function", [torch_2_10, torch_2_11, torch_2_12])
@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("num_key_heads", [2, 4])
def test_each_sequence_attends_to_its_own_past_whatever_the_version(
    function: Callable[..., Tensor], scaling: float | None, num_key_heads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, num_heads, sum(LENGTHS), 8, generator=generator)
        for num_heads in (4, num_key_heads, num_key_heads)
    )
    positions = np.concatenate([np.arange(length) for length in LENGTHS])
    rows = VarlenRows.of(VarlenKernel.of(function), positions, "cpu")
    found = rows.attend(query, key, value, scaling)
    whole = [x.squeeze(0).transpose(0, 1) for x in (query, key, value)]
    ends = torch.tensor([0, 4, 5, 8])
    expected = kernel(whole[0], whole[1], whole[2], ends, 4, scale=scaling, enable_gqa=True)
    torch.testing.assert_close(found, expected[None], rtol=1e-5, atol=1e-5)


def test_there_is_no_kernel_for_a_cpu() -> None:
    assert find_varlen("cpu") is None

"""Causal attention within packed sequences with torch's variable-length kernel, on CUDA.

The kernel (`torch.nn.attention.varlen`) needs no padding and no mask, and computes in bfloat16 or float16.
Its arguments differ between versions of torch: before 2.11 it takes `is_causal` and no scale; before 2.12 it
does not support grouped keys. A trial at load shows whether the installed one works.

Legend: N tokens, H query heads, K key heads, D dimension of a head.
"""

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["VarlenKernel", "VarlenRows", "find_varlen"]

_log = logging.getLogger(__name__)
_DTYPES = (torch.bfloat16, torch.float16)
_TOLERANCE = 0.05
"""Largest error of the probe's outputs, which are of size 1; bfloat16 rounds them by 0.004."""


@dataclass(frozen=True, slots=True)
class VarlenKernel:
    """A function like `torch.nn.attention.varlen.varlen_attn`, of any version."""

    function: Callable[..., Any]
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "VarlenKernel":
        """Reads the function's signature."""
        return cls(function, inspect.signature(function).parameters)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, rows: "VarlenRows", scaling: float | None
    ) -> Tensor:
        """[N, H, D] of query [N, H, D], key and value [N, K, D]."""
        options: dict[str, Any] = {}
        if "window_size" in self.parameters:
            options["window_size"] = (-1, 0)  # the whole past and none of the future
        else:
            options["is_causal"] = True
        if scaling is not None and "scale" in self.parameters:
            options["scale"] = scaling
        elif scaling is not None:
            query = query * (scaling * query.shape[-1] ** 0.5)  # the kernel divides by this root
        num_groups = query.shape[1] // key.shape[1]
        if num_groups > 1 and "enable_gqa" in self.parameters:
            options["enable_gqa"] = True
        elif num_groups > 1:
            key = key.repeat_interleave(num_groups, dim=1)
            value = value.repeat_interleave(num_groups, dim=1)
        ends = rows.ends
        return self.function(query, key, value, ends, ends, rows.longest, rows.longest, **options)


@dataclass(frozen=True, slots=True)
class VarlenRows:
    """Concatenated sequences, and the kernel that computes attention within them."""

    kernel: VarlenKernel
    ends: Tensor
    """int32 [rows + 1]: 0, then where each sequence ends."""
    longest: int

    @classmethod
    def of(cls, kernel: VarlenKernel, position_ids: NDArray[np.int64], device: str) -> "VarlenRows":
        """`position_ids` [N] start at 0 in each sequence."""
        ends = np.append(np.flatnonzero(position_ids == 0), len(position_ids)).astype(np.int32)
        on_device = torch.from_numpy(ends).to(device, non_blocking=True)
        return cls(kernel, on_device, int(np.diff(ends).max()))

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the kernel supports this dtype."""
        return dtype in _DTYPES

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
        """[1, N, H, D] of query [1, H, N, D], key and value [1, K, N, D]."""
        flat = [heads.squeeze(0).transpose(0, 1) for heads in (query, key, value)]
        return self.kernel(flat[0], flat[1], flat[2], self, scaling).unsqueeze(0)


def find_varlen(device: str) -> VarlenKernel | None:
    """The kernel, if it is installed and computes attention on this device; else None."""
    if torch.device(device).type != "cuda":
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn  # pyright: ignore[reportUnknownVariableType]
    except ImportError:
        _log.info("no variable-length attention in torch %s; attention rows are padded", torch.__version__)
        return None
    kernel = VarlenKernel.of(varlen_attn)
    try:
        is_right = _is_right(kernel, device)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as err:
        _log.warning("variable-length attention does not run here (%s); attention rows are padded", err)
        return None
    if not is_right:
        _log.warning("variable-length attention gives wrong results here; attention rows are padded")
    return kernel if is_right else None


def _split(heads: Tensor, lengths: tuple[int, ...]) -> list[Tensor]:
    """[1, H, N, D] -> one [1, H, n, D] per sequence."""
    ends = np.cumsum(lengths).tolist()
    return [heads[:, :, end - length : end] for end, length in zip(ends, lengths, strict=True)]


@torch.enable_grad()
def _is_right(kernel: VarlenKernel, device: str) -> bool:
    """Compares the kernel and its gradients with plain attention on two sequences."""
    lengths = (5, 3)
    generator = torch.Generator().manual_seed(0)
    heads = [
        torch.randn(1, num, sum(lengths), 64, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for num in (4, 2, 2)
    ]
    positions = np.concatenate([np.arange(length) for length in lengths])
    output = VarlenRows.of(kernel, positions, device).attend(heads[0], heads[1], heads[2], 0.2)
    parts = zip(*(_split(each, lengths) for each in heads), strict=True)
    expected = torch.cat(
        [
            scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.2, enable_gqa=True).transpose(1, 2)
            for q, k, v in parts
        ],
        dim=1,
    )
    slopes = [torch.autograd.grad(out.float().square().sum(), heads) for out in (output, expected)]
    pairs = [(output, expected), *zip(*slopes, strict=True)]
    return all(torch.allclose(a.float(), b.float(), rtol=_TOLERANCE, atol=_TOLERANCE) for a, b in pairs)

"""The tokens of a layout on the device, and attention within its rows, which no sequence leaves.

Legend: H heads, D dimension of a head; others as in `trainer.packing`.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from astraflow.models.vision import ImageInputs
from astraflow.trainer.packing import Layout
from astraflow.trainer.torch.parallel.context_parallel import TokenPart
from astraflow.trainer.torch.varlen import VarlenKernel, VarlenRows

__all__ = ["LayoutTensors", "all_values", "attend", "layout_tensors", "own_part"]


@dataclass(frozen=True, slots=True)
class LayoutTensors:
    """A layout on the model's device, with index arrays flattened for `index_select`."""

    token_ids: Tensor
    position_ids: Tensor
    causal_idx: Tensor
    causal_shape: tuple[int, int]
    tail_idx: Tensor
    tail_shape: tuple[int, int]
    key_idx: Tensor
    key_bias: Tensor
    """float32 [Q, 1, Tq, Tp + Tq]: 0 where a tail may attend, -inf elsewhere."""
    row_idx: Tensor
    predict_idx: Tensor
    target_ids: Tensor
    trained: NDArray[np.int64]
    num_computed: int
    """Tokens that the model computes, padding included."""
    num_sample_tokens: int
    varlen: VarlenRows | None
    """If set, its kernel computes attention in the dtypes that it supports."""
    images: ImageInputs | None = None
    """The images of the causal rows, if there are any."""
    part: TokenPart | None = None
    """If set, this rank computes only this part of the tokens, and `token_ids`, `position_ids`, `predict_idx`
    and `target_ids` refer to the part."""


def layout_tensors(
    layout: Layout, *, device: str, varlen: VarlenKernel | None = None, is_packed: bool = True
) -> LayoutTensors:
    """The layout on the device. Copies to it are staged, so that the host doesn't wait for passes.

    `is_packed`: whether the model computes all tokens in one row, instead of one padded row per sample.
    """

    def move(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values.reshape(-1)).to(device, non_blocking=True)

    bias = np.where(layout.key_mask, np.float32(0), np.float32(-np.inf))
    return LayoutTensors(
        token_ids=move(layout.token_ids),
        position_ids=move(layout.position_ids),
        causal_idx=move(layout.causal_idx),
        causal_shape=(layout.causal_idx.shape[0], layout.causal_idx.shape[1]),
        tail_idx=move(layout.tail_idx),
        tail_shape=(layout.tail_idx.shape[0], layout.tail_idx.shape[1]),
        key_idx=move(layout.key_idx),
        key_bias=torch.from_numpy(bias[:, None]).to(device, non_blocking=True),
        row_idx=move(layout.row_idx),
        predict_idx=move(layout.predict_idx),
        target_ids=move(layout.target_ids),
        trained=layout.trained,
        num_computed=len(layout.token_ids) if is_packed else layout.causal_idx.size,
        num_sample_tokens=layout.num_sample_tokens,
        varlen=None if varlen is None else VarlenRows.of(varlen, layout.position_ids, device),
    )


def own_part(packed: LayoutTensors, *, rank: int, world: int, group: Any) -> tuple[LayoutTensors, Tensor]:
    """The part of the tokens that one of `world` ranks computes, and the indices of the trained tokens that
    it predicts."""
    part = TokenPart(rank, world, group, len(packed.token_ids))
    chosen = part.chosen(packed.predict_idx)
    own = replace(
        packed,
        token_ids=part.own(packed.token_ids),
        position_ids=part.own(packed.position_ids),
        predict_idx=packed.predict_idx[chosen] % part.size,
        target_ids=packed.target_ids[chosen],
        part=part,
    )
    return own, chosen


def all_values(values: Tensor, own: LayoutTensors, chosen: Tensor | None, num_values: int) -> Tensor:
    """The values of all trained tokens, only some of which this rank may have computed."""
    if own.part is None or chosen is None:
        return values
    return own.part.all_values(values, chosen, num_values)


def attend(
    packed: LayoutTensors, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None
) -> Tensor:
    """Attention within causal rows, and of tails to their prefix and themselves; [1, H, N, D] in,
    [1, N, H, D] out. With `packed.part`, N are this rank's tokens."""
    if packed.part is not None:
        heads = (packed.part.heads(states) for states in (query, key, value))
        return packed.part.tokens(attend(replace(packed, part=None), *heads, scaling=scaling))
    kind = query.device.type
    # Under autocast, norms and rotary embeddings leave queries and keys in float32.
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    if packed.varlen is not None and packed.varlen.takes(dtype):
        return packed.varlen.attend(query.to(dtype), key.to(dtype), value.to(dtype), scaling)
    if query.device.type != "cpu":
        return _padded_attention(packed, query, key, value, scaling)
    # On CPUs, the backward pass of torch's attention takes five times as long in bfloat16 as in float32.
    with torch.autocast("cpu", enabled=False):
        return _padded_attention(packed, query.float(), key.float(), value.float(), scaling)


def _padded_attention(
    packed: LayoutTensors, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
) -> Tensor:
    causal = scaled_dot_product_attention(
        _rows(query, packed.causal_idx, packed.causal_shape[0]),
        _rows(key, packed.causal_idx, packed.causal_shape[0]),
        _rows(value, packed.causal_idx, packed.causal_shape[0]),
        is_causal=True,
        scale=scaling,
        enable_gqa=True,
    )
    outputs = [causal.transpose(1, 2).flatten(0, 1)]
    if packed.tail_shape[0]:
        tails = scaled_dot_product_attention(
            _rows(query, packed.tail_idx, packed.tail_shape[0]),
            _rows(key, packed.key_idx, packed.tail_shape[0]),
            _rows(value, packed.key_idx, packed.tail_shape[0]),
            attn_mask=packed.key_bias.to(query.dtype),
            scale=scaling,
            enable_gqa=True,
        )
        outputs.append(tails.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, packed.row_idx).unsqueeze(0)


def _rows(heads: Tensor, idx: Tensor, num_rows: int) -> Tensor:
    """[1, H, N, D] -> [rows, H, T, D] by packed position."""
    num_heads, _, dim = heads.shape[1:]
    flat = heads.squeeze(0).transpose(0, 1).reshape(-1, num_heads * dim)
    return flat.index_select(0, idx).view(num_rows, -1, num_heads, dim).transpose(1, 2)

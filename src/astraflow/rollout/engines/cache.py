"""The key/value cache of one running batch: preallocated slots, dense rows, and exact attention over them.

Row i of the running batch is in slot i. Keys and values are `[slot, head, position, dim]`. A decoding step is
bound by the memory that its attention reads. So it cuts its rows into blocks, and for each block reads only
as many positions as its longest row has. Rows are moved between slots so that the rows of a block have
similar lengths.

Positions after a row's last one have values of earlier requests. A mask hides them, but only if they are
finite: a weight of 0 times infinity is not 0. So `clear` must zero a row that failed numerically.

Legend: B rows, T positions computed in one call, L positions attended to.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = ["PAGE", "AttentionRule", "CacheShape", "KvCache", "Stretch", "causal_attention", "row_moves"]

PAGE = 8
"""Number of positions of a page."""
_MOVED_PAGES = 8192
"""Number of pages of a layer that are copied in one call, if there are several layers. The call takes as much
memory as they have."""

_BLOCK_ROWS = 16
"""Number of rows in the smallest block. A block is one attention call."""
_MIN_POSITIONS = 16
"""Shortest length of a block. Fewer positions than fit into a CPU's vector register take longer: a softmax
over 15 positions takes seven times as long as one over 16."""
_MOVE_GAIN = 1.25
"""Rows are moved between blocks if attention now reads this many times as many positions as afterwards."""
_CALL_COST = 20_000
"""Cost of one more attention call, as the number of cached values that a CPU reads in that time (5-12 us)."""
_GPU_CALL_COST = 2**24
"""The same on a GPU: six launches take 30 us, in which it reads 67 MB at 2.2 TB/s. Not measured."""
_WIDE_BYTES = 16
"""Size of the largest element that torch can index: a complex number of two doubles."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape of a model's cache."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    """Size of a head's values. In latent attention (DeepSeek), it differs from the size of the keys."""
    dtype: torch.dtype
    device: torch.device
    multiple: int = PAGE
    """A slot's number of positions is rounded up to a multiple of this, which is one of a page's."""

    def positions(self, max_context: int) -> int:
        """Number of positions of a slot for sequences of up to `max_context` tokens."""
        return -(-max_context // self.multiple) * self.multiple

    def slot_bytes(self, max_context: int) -> int:
        """Memory of one slot."""
        num_values = self.num_layers * self.num_kv_heads * (self.key_dim + self.value_dim)
        return self.positions(max_context) * num_values * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How one layer attends."""

    scale: float
    """Factor of the scores."""
    window: int = 0
    """Number of newest positions that a query sees, including its own; 0: all."""
    softcap: float = 0.0
    """Scores become `softcap * tanh(score / softcap)`; 0 leaves them as they are."""
    chunk: int = 0
    """A query sees only its own chunk of this many positions, as in Llama 4; 0: no chunks."""
    sinks: Tensor | None = None
    """[heads] the score of an extra entry per head, which takes weight but has no value, as in GPT-OSS."""

    def hides(self, held: Tensor, last: Tensor) -> Tensor:
        """Whether an entry at position `held` is hidden from a query at position `last`. Both broadcast."""
        hidden = held > last
        if self.window:
            hidden = hidden | (held <= last - self.window)
        if self.chunk:
            hidden = hidden | (held < last - last % self.chunk)
        return hidden


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows `[start, end)` of a step, which attend together to the first `length` positions."""

    start: int
    end: int
    length: int
    mask: Tensor
    """[rows, 1, length] 0 for a position that the row sees, otherwise -inf. All heads of a row share it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive positions of several rows, whose keys and values are computed in one call.

    Example: two rows with 5 and 7 positions get 3 and 2 more. Then T is 3, and the positions are `5 6 7` and
    `7 8 9`. The 9 is padding, and `reach` is 9.
    """

    rows: Tensor
    """[B] the rows in the cache."""
    positions: Tensor
    """[B, T] where each entry is stored in its row. Entries after a row's end are padding."""
    reach: int
    """Number of positions that the longest row has afterwards, without padding."""


class KvCache:
    """A cache with `num_slots` rows of at most `max_context` positions.

    A decoding step calls `begin_step(positions)` once, and then `attend` once per layer, which also stores
    the layer's keys and values. `write` stores whole prefixes. For tokens that follow a prefix,
    `write_stretch` stores the keys and values of a layer, and `attend_stretch` then computes its attention.
    `move` copies rows from slot to slot.
    """

    def __init__(self, shape: CacheShape, *, num_slots: int, max_context: int) -> None:
        heads = shape.num_kv_heads
        max_context = shape.positions(max_context)
        self._heads = heads
        self._key_dim = shape.key_dim
        self._value_dim = shape.value_dim
        self.num_slots = num_slots
        self.max_context = max_context
        """Number of positions of each slot."""
        self._device = shape.device
        self._dtype = shape.dtype
        size = (shape.num_layers, num_slots, heads, max_context)
        self._all_keys = torch.zeros((*size, shape.key_dim), dtype=shape.dtype, device=shape.device)
        self._all_values = torch.zeros((*size, shape.value_dim), dtype=shape.dtype, device=shape.device)
        self.tensors = (self._all_keys, self._all_values)
        """The memory of the cache."""
        # The views of the layers are made once. Indexing would make new ones in every layer of every step.
        self._keys = list(self._all_keys)
        self._values = list(self._all_values)
        self._wide_keys = _wide(self._all_keys)
        self._wide_values = _wide(self._all_values)
        self._pages = [_wide(each.view(*size[:3], -1, PAGE * each.shape[-1])) for each in self.tensors]
        self._base = torch.arange(num_slots * heads, device=shape.device).view(-1, heads) * max_context
        """[slots, heads] the first index of each head of each row in a layer's flattened positions."""
        self.shifts = np.zeros(num_slots, np.int64)
        """Position of a row's newest token minus its index. It isn't 0 after an image, which takes fewer
        positions than tokens. It moves with its row."""
        self.adapters = np.zeros(num_slots, np.int64)
        """The adapter with which a row is computed, if the model has any. It moves with its row."""
        self._ascending = torch.arange(max_context, device=shape.device)
        # On CPUs, batched products of small matrices are much slower in bfloat16, because torch first copies
        # their operands. Casting them to float32 also copies, but the products are then fast, and more exact.
        self._attention_dtype = torch.float32 if self._device.type == "cpu" else shape.dtype
        self._open = torch.zeros((), dtype=self._attention_dtype, device=shape.device)
        self._closed = torch.full((), -torch.inf, dtype=self._attention_dtype, device=shape.device)
        """A mask adds `_open` to the scores of visible positions, and `_closed` to those of hidden ones."""
        # The following fields belong to one step. `begin_step` sets them.
        self._positions = self._base
        self._entry_idx = self._base
        self._bounds: list[tuple[int, int, int]] = []
        self._blocks: dict[tuple[int, int], list[_Block]] = {}
        """Blocks by window and chunk. Layers that hide the same positions share their masks."""

    def begin_step(self, positions: NDArray[np.int64]) -> Tensor:
        """Prepares a step of rows 0..B-1. Each will store its entry at its own position.

        Returns: the positions [B] as a tensor on the cache's device.
        """
        on_device = torch.from_numpy(positions).to(self._device)
        self._entry_idx = (self._base[: len(positions)] + on_device[:, None]).view(-1)
        self._positions = on_device
        self._blocks.clear()
        self._bounds = self._cut(positions + 1)
        return on_device

    def _cut(self, lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """Cuts the rows into blocks. Returns the start, end, and longest length of each.

        More blocks read fewer positions, but each block is a separate call. So neighbors are joined if a call
        costs more than the positions that the shorter rows then read for nothing.
        """
        num_rows = len(lengths)
        call_cost = _CALL_COST if self._device.type == "cpu" else _GPU_CALL_COST
        min_length = min(_MIN_POSITIONS, self.max_context)
        longest = np.maximum.reduceat(lengths, np.arange(0, num_rows, _BLOCK_ROWS)).clip(min_length).tolist()
        row_size = self._heads * self._key_dim
        bounds = [(0, min(_BLOCK_ROWS, num_rows), longest[0])]
        for block in range(1, len(longest)):
            start = block * _BLOCK_ROWS
            length = longest[block]
            end = min(start + _BLOCK_ROWS, num_rows)
            last_start, last_end, last_length = bounds[-1]
            joint = max(length, last_length)
            wasted = (joint - length) * (end - start) + (joint - last_length) * (last_end - last_start)
            if wasted * row_size < call_cost:
                bounds[-1] = (last_start, end, joint)
            else:
                bounds.append((start, end, length))
        return bounds

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Stores the step's keys and values [B, kv heads, dim], then attends with `query` [B, heads, dim].

        Returns: the output of the attention [B, heads * value dim], in the dtype of the query.
        """
        num_rows, num_heads, dim = query.shape
        wide = self._attention_dtype
        # Query heads that share a key head are the rows of one matrix. So each pair of a row and a key head
        # is one entry of a batched product, and no key is repeated in memory.
        groups = num_rows * self._heads
        self._keys[layer].view(-1, dim).index_copy_(
            0, self._entry_idx, self._stored(keys.reshape(groups, dim))
        )
        width = self._value_dim
        self._values[layer].view(-1, width).index_copy_(
            0, self._entry_idx, self._stored(values.reshape(groups, width))
        )
        all_keys = self._keys[layer].view(-1, self.max_context, dim)
        all_values = self._values[layer].view(-1, self.max_context, width)
        scaled = (query.to(wide) * rule.scale).view(groups, num_heads // self._heads, dim)
        parts: list[Tensor] = []
        for block in self._masked_blocks(rule):
            start = block.start * self._heads
            end = block.end * self._heads
            seen = all_keys[start:end, : block.length].to(wide)
            scores = torch.bmm(scaled[start:end], seen.transpose(1, 2))
            if rule.softcap:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            by_head = scores.view(block.end - block.start, num_heads, block.length).add_(block.mask)
            weights = _weights(by_head, rule.sinks).view_as(scores).to(wide)
            parts.append(torch.bmm(weights, all_values[start:end, : block.length].to(wide)))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(num_rows, num_heads * width).to(query.dtype)

    def _stored(self, numbers: Tensor) -> Tensor:
        """Keys or values in the dtype of the cache."""
        return numbers.to(self._dtype)

    def _masked_blocks(self, rule: AttentionRule) -> list[_Block]:
        """The step's blocks for one rule. The first layer that hides these positions builds them."""
        kind = (rule.window, rule.chunk)
        if kind not in self._blocks:
            self._blocks[kind] = [self._block(rule, *bound) for bound in self._bounds]
        return self._blocks[kind]

    def _block(self, rule: AttentionRule, start: int, end: int, length: int) -> _Block:
        hidden = rule.hides(self._ascending[:length], self._positions[start:end, None, None])
        return _Block(start, end, length, torch.where(hidden, self._closed, self._open))

    def write(self, layer: int, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Stores keys and values [B, kv heads, T, dim] of prefixes in rows [B], from position 0 on."""
        length = keys.shape[2]
        self._wide_keys[layer, rows, :, :length] = _wide(self._stored(keys))
        self._wide_values[layer, rows, :, :length] = _wide(self._stored(values))

    def stretch(self, rows: Tensor, starts: Tensor, length: int, *, reach: int) -> Stretch:
        """Describes `length` positions of the given rows [B], which begin at each row's own start [B]."""
        positions = starts[:, None] + self._ascending[:length]
        # Padding beyond the end of the slot goes to its last position. That position never has a real entry:
        # a row ends when its newest token reaches it, and the newest token isn't in the cache yet.
        return Stretch(rows, positions.clamp_(max=self.max_context - 1), reach)

    def write_stretch(self, layer: int, keys: Tensor, values: Tensor, stretch: Stretch) -> None:
        """Stores keys and values [B, kv heads, T, dim] of a stretch."""
        rows = stretch.rows[:, None]
        # Two index tensors with a slice between them put the indexed axes first: [B, T, kv heads, dim].
        self._wide_keys[layer][rows, :, stretch.positions] = _wide(self._stored(keys)).transpose(1, 2)
        self._wide_values[layer][rows, :, stretch.positions] = _wide(self._stored(values)).transpose(1, 2)

    def attend_stretch(self, layer: int, query: Tensor, stretch: Stretch, rule: AttentionRule) -> Tensor:
        """Attends from a stretch that `write_stretch` has stored, with `query` [B, heads, T, dim].

        Each query sees its row up to its own position.
        Returns: the attention's output [B, T, heads * value dim].
        """
        keys, values = (
            wide[layer][stretch.rows, :, : stretch.reach].view(self._dtype).to(query.dtype)
            for wide in (self._wide_keys, self._wide_values)
        )
        hidden = rule.hides(self._ascending[: stretch.reach], stretch.positions[:, None, :, None])
        return _attention(query, keys, values, ~hidden, rule)

    def entries(self, layer: int, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv heads, positions, dim] of rows. For a slice, they are views."""
        return self._keys[layer][rows], self._values[layer][rows]

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64], length: int) -> None:
        """Copies the first `length` positions of rows to other slots.

        All rows are read before any is written, so rows may swap places.
        """
        self.shifts[targets] = self.shifts[sources]
        self.adapters[targets] = self.adapters[sources]
        take = torch.from_numpy(sources).to(self._device)
        put = torch.from_numpy(targets).to(self._device)
        for numbers in (self._wide_keys, self._wide_values):
            numbers[:, put, :, :length] = numbers[:, take, :, :length]

    def move_pages(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        """Copies pages, all at once. A page's number counts the pages of all slots."""
        per_slot = self.max_context // PAGE
        take = torch.from_numpy(np.stack(divmod(sources, per_slot))).to(self._device)
        put = torch.from_numpy(np.stack(divmod(targets, per_slot))).to(self._device)
        num_layers = max(1, _MOVED_PAGES // len(sources))
        for pages in self._pages:
            for start in range(0, len(pages), num_layers):
                layers = pages[start : start + num_layers]
                layers[:, put[0], :, put[1]] = layers[:, take[0], :, take[1]]

    def clear(self, row: int) -> None:
        """Zeroes a row that failed, because it may have values that are not finite, which no mask hides."""
        for numbers in self.tensors:
            numbers[:, row] = 0


_NO_MOVES = np.zeros(0, np.int64)


def _wide(numbers: Tensor) -> Tensor:
    """The same memory as 16-byte elements, if the last axis is divisible into them.

    Copies by index take time per element and not per byte, and don't depend on what the bytes mean.
    """
    is_whole = numbers.shape[-1] * numbers.element_size() % _WIDE_BYTES == 0
    return numbers.view(torch.complex128) if is_whole else numbers


def row_moves(
    lengths: NDArray[np.int64], block_rows: int = _BLOCK_ROWS
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Moves of rows (from, to) that put the longest rows into the first block, the next into the second.

    Rows that are already in the right block stay. If the blocks have little padding, there are no moves.
    Example: for lengths `9 1 8 2` and blocks of two rows, rows 1 and 2 are swapped: `9 8 | 1 2`.
    """
    blocks = np.arange(len(lengths)) // block_rows
    by_length = np.argsort(-lengths, kind="stable")
    starts = np.arange(0, len(lengths), block_rows)
    # A block costs as much as its longest row. Among sorted rows, that is the first row of the block.
    cost_now = np.maximum.reduceat(lengths, starts).sum()
    cost_sorted = lengths[by_length[starts]].sum()
    if cost_now <= _MOVE_GAIN * cost_sorted:
        return _NO_MOVES, _NO_MOVES
    wanted = np.empty_like(blocks)
    wanted[by_length] = blocks
    targets = np.flatnonzero(wanted != blocks)
    # Every block loses as many rows as it gains. So the rows that leave, sorted by their new block, match the
    # free places in ascending order.
    sources = targets[np.argsort(wanted[targets], kind="stable")]
    return sources, targets


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
    """Attention of whole sequences: query [B, heads, T, dim], keys and values [B, kv heads, T, dim].

    Padding must be on the right, where no real position sees it.
    Returns: the output of the attention [B, T, heads * value dim].
    """
    if rule.window == rule.chunk == 0:
        return _attention(query, keys, values, None, rule)
    position = torch.arange(query.shape[2], device=query.device)
    return _attention(query, keys, values, ~rule.hides(position, position[:, None]), rule)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, rule: AttentionRule
) -> Tensor:
    """Attends with a mask `seen` [..., T, L], which is true where a query sees a key.

    None: each query sees the keys up to its own position, which torch computes without a mask.
    """
    num_rows, _, length, _ = query.shape
    repeats = query.shape[1] // keys.shape[1]
    if rule.softcap == 0 and rule.sinks is None:
        # Torch's fused attention supports neither softcap nor sinks; the other branch computes these.
        out = functional.scaled_dot_product_attention(
            query, keys, values, seen, is_causal=seen is None, scale=rule.scale, enable_gqa=repeats > 1
        )
    else:
        scores = query @ keys.repeat_interleave(repeats, 1).transpose(2, 3) * rule.scale
        if rule.softcap:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        if seen is None:
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
        scores = scores.masked_fill(~seen, -torch.inf)
        sinks = None if rule.sinks is None else rule.sinks[:, None]
        out = _weights(scores, sinks).to(query.dtype) @ values.repeat_interleave(repeats, 1)
    return out.transpose(1, 2).reshape(num_rows, length, -1)


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of scores over the last axis, in float32. `sinks` have the shape of the scores without it."""
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32)
    extra = sinks[..., None].expand(*scores.shape[:-1], 1).to(scores.dtype)
    return torch.softmax(torch.cat((scores, extra), -1), -1, dtype=torch.float32)[..., :-1]

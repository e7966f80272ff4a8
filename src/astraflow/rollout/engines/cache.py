"""The key/value cache of one running batch: preallocated slots, dense rows, exact attention over them.

Row i of the running batch lives in slot i; keys and values are `[slot, head, position, dim]`. A decoding step
is bound by the memory that its attention reads. So it cuts its rows into blocks and reads, for each block,
only as many positions as the longest of its rows holds. Rows are moved between slots so that the rows of a
block have similar lengths.

Positions behind a row's last one hold remains of earlier requests. A mask hides these, but only as long as
they are finite: a weight of 0 times infinity is not 0. So `clear` must zero a row that failed numerically.

Legend: B rows, T positions computed in one call, L positions attended to.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = ["AttentionRule", "CacheShape", "KvCache", "Stretch", "causal_attention", "row_moves"]

_BLOCK_ROWS = 16
"""Number of rows of the smallest block; a block is one attention call."""
_MIN_POSITIONS = 16
"""Shortest length of a block. Fewer positions than a CPU's vectors hold cost more, not less: a softmax over
15 positions takes seven times as long as one over 16."""
_MOVE_GAIN = 1.25
"""Rows are moved between blocks if attention then reads this many times fewer positions."""
_CALL_COST = 20_000
"""Price of one more attention call: the cached numbers that a CPU reads in the same time (5-12 us)."""
_WIDE_BYTES = 16
"""Size of the largest element that torch can index by, a complex number of two doubles."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a cache must hold for a model."""

    num_layers: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    """Size of a head's values; latent attention (DeepSeek) has other sizes for keys and for values."""
    dtype: torch.dtype
    device: torch.device
    multiple: int = 1
    """A slot's number of positions is rounded up to a multiple of this."""


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How one layer attends."""

    scale: float
    """Factor of the scores."""
    window: int = 0
    """Number of newest positions that a query sees, its own included; 0: all earlier ones."""
    softcap: float = 0.0
    """Scores become `softcap * tanh(score / softcap)`; 0 leaves them as they are."""
    chunk: int = 0
    """A query sees only its own chunk of this many positions, as in Llama 4; 0: no chunks."""
    sinks: Tensor | None = None
    """[heads] the score of one more entry per head, which takes weight and adds nothing, as in GPT-OSS."""

    def hides(self, held: Tensor, last: Tensor) -> Tensor:
        """Whether a query at position `last` does not see the entry at position `held`; both broadcast."""
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
    """[rows, 1, length] 0 for a position that the row sees, else -inf; all heads of a row share it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive positions of several rows, whose keys and values are computed in one call.

    Example: two rows that hold 5 and 7 positions get 3 and 2 more. Then T is 3, the positions are `5 6 7` and
    `7 8 9`, of which the last is padding, and `reach` is 9.
    """

    rows: Tensor
    """[B] the rows in the cache."""
    positions: Tensor
    """[B, T] where each entry is stored in its row; entries behind a row's end are padding."""
    reach: int
    """Number of positions that the longest row holds afterwards, without padding."""


class KvCache:
    """Slots for `num_slots` rows of at most `max_context` positions.

    A decoding step calls `begin_step(positions)` once and then `attend` once per layer, which also stores the
    layer's keys and values. `write` stores whole prefixes. For tokens that follow a prefix, `write_stretch`
    stores the keys and values of a layer, and `attend_stretch` then computes its attention. `move` takes rows
    from slot to slot.
    """

    def __init__(self, shape: CacheShape, *, num_slots: int, max_context: int) -> None:
        heads = shape.num_kv_heads
        max_context = -(-max_context // shape.multiple) * shape.multiple
        self._heads = heads
        self._key_dim = shape.key_dim
        self._value_dim = shape.value_dim
        self._max_context = max_context
        self._device = shape.device
        self._dtype = shape.dtype
        size = (shape.num_layers, num_slots, heads, max_context)
        self._all_keys = torch.zeros((*size, shape.key_dim), dtype=shape.dtype, device=shape.device)
        self._all_values = torch.zeros((*size, shape.value_dim), dtype=shape.dtype, device=shape.device)
        # The layers' views are made once; indexing would make new ones in every layer of every step.
        self._keys = list(self._all_keys)
        self._values = list(self._all_values)
        self._wide_keys = _wide(self._all_keys)
        self._wide_values = _wide(self._all_values)
        self._base = torch.arange(num_slots * heads, device=shape.device).view(-1, heads) * max_context
        """[slots, heads] where each head of each row begins, in a layer seen as one list of positions."""
        self.shifts = np.zeros(num_slots, np.int64)
        """How far a row's newest tokens stand from their indices: an image takes fewer positions than tokens.
        It goes where its row goes."""
        self._ascending = torch.arange(max_context, device=shape.device)
        self._open = torch.zeros((), dtype=shape.dtype, device=shape.device)
        self._closed = torch.full((), -torch.inf, dtype=shape.dtype, device=shape.device)
        """A mask adds `_open` to the score of a position that is seen, and `_closed` to that of any other."""
        # What follows belongs to one step; `begin_step` sets it.
        self._positions = self._base
        self._entry_idx = self._base
        self._bounds: list[tuple[int, int, int]] = []
        self._blocks: dict[tuple[int, int], list[_Block]] = {}
        """Blocks by the layers' window and chunk: layers that hide the same positions share masks."""

    # --- one decoding step ------------------------------------------------------------------------

    def begin_step(self, positions: NDArray[np.int64]) -> Tensor:
        """Prepares a step of rows 0..B-1, each of which will store its entry at its own position.

        Returns: the positions [B] as a tensor on the cache's device.
        """
        on_device = torch.from_numpy(positions).to(self._device)
        self._entry_idx = (self._base[: len(positions)] + on_device[:, None]).view(-1)
        self._positions = on_device
        self._blocks.clear()
        self._bounds = self._cut(positions + 1)
        return on_device

    def _cut(self, lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """Cuts the rows into blocks: (start, end, longest length) of each.

        More blocks read fewer positions, but each is a call of its own. So neighbours are joined where the
        call costs more than the positions that the shorter rows then read in vain.
        """
        num_rows = len(lengths)
        if self._device.type != "cpu":
            # A GPU reads the padding of one large call in parallel; more calls would only add launches.
            return [(0, num_rows, int(lengths.max()))]
        least = min(_MIN_POSITIONS, self._max_context)
        longest = np.maximum.reduceat(lengths, np.arange(0, num_rows, _BLOCK_ROWS)).clip(least).tolist()
        row_size = self._heads * self._key_dim
        bounds = [(0, min(_BLOCK_ROWS, num_rows), longest[0])]
        for block in range(1, len(longest)):
            start = block * _BLOCK_ROWS
            length = longest[block]
            end = min(start + _BLOCK_ROWS, num_rows)
            last_start, last_end, last_length = bounds[-1]
            joint = max(length, last_length)
            wasted = (joint - length) * (end - start) + (joint - last_length) * (last_end - last_start)
            if wasted * row_size < _CALL_COST:
                bounds[-1] = (last_start, end, joint)
            else:
                bounds.append((start, end, length))
        return bounds

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
        """Stores the step's keys and values [B, kv heads, dim], then attends with `query` [B, heads, dim].

        Returns: the attention's output [B, heads * value dim].
        """
        num_rows, num_heads, dim = query.shape
        # Query heads that share a key head are the rows of one matrix, so each pair of a row and a key head
        # is one entry of a batched product, and no key is repeated in memory.
        groups = num_rows * self._heads
        self._keys[layer].view(-1, dim).index_copy_(0, self._entry_idx, keys.reshape(groups, dim))
        width = self._value_dim
        self._values[layer].view(-1, width).index_copy_(0, self._entry_idx, values.reshape(groups, width))
        all_keys = self._keys[layer].view(-1, self._max_context, dim)
        all_values = self._values[layer].view(-1, self._max_context, width)
        scaled = (query * rule.scale).view(groups, num_heads // self._heads, dim)
        parts: list[Tensor] = []
        for block in self._masked_blocks(rule):
            start = block.start * self._heads
            end = block.end * self._heads
            scores = torch.bmm(scaled[start:end], all_keys[start:end, : block.length].transpose(1, 2))
            if rule.softcap:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            by_head = scores.view(block.end - block.start, num_heads, block.length).add_(block.mask)
            weights = _weights(by_head, rule.sinks).view_as(scores).to(self._dtype)
            parts.append(torch.bmm(weights, all_values[start:end, : block.length]))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(num_rows, num_heads * width)

    def _masked_blocks(self, rule: AttentionRule) -> list[_Block]:
        """The step's blocks for one rule, built when the first layer that hides these positions asks."""
        kind = (rule.window, rule.chunk)
        if kind not in self._blocks:
            self._blocks[kind] = [self._block(rule, *bound) for bound in self._bounds]
        return self._blocks[kind]

    def _block(self, rule: AttentionRule, start: int, end: int, length: int) -> _Block:
        hidden = rule.hides(self._ascending[:length], self._positions[start:end, None, None])
        return _Block(start, end, length, torch.where(hidden, self._closed, self._open))

    # --- whole prefixes ---------------------------------------------------------------------------

    def write(self, layer: int, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Stores keys and values [B, kv heads, T, dim] of prefixes in rows [B], from position 0 on."""
        length = keys.shape[2]
        self._wide_keys[layer, rows, :, :length] = _wide(keys)
        self._wide_values[layer, rows, :, :length] = _wide(values)

    # --- what follows a prefix --------------------------------------------------------------------

    def stretch(self, rows: Tensor, starts: Tensor, length: int, *, reach: int) -> Stretch:
        """Describes `length` positions of the given rows [B], which begin at each row's own start [B]."""
        positions = starts[:, None] + self._ascending[:length]
        # Padding behind the slot's end is put on its last position. No entry that counts is there: a row ends
        # when its newest token reaches that position, and a newest token is not in the cache yet.
        return Stretch(rows, positions.clamp_(max=self._max_context - 1), reach)

    def write_stretch(self, layer: int, keys: Tensor, values: Tensor, stretch: Stretch) -> None:
        """Stores keys and values [B, kv heads, T, dim] of a stretch."""
        rows = stretch.rows[:, None]
        # Two index tensors with a slice between them put the indexed axes first: [B, T, kv heads, dim].
        self._wide_keys[layer][rows, :, stretch.positions] = _wide(keys).transpose(1, 2)
        self._wide_values[layer][rows, :, stretch.positions] = _wide(values).transpose(1, 2)

    def attend_stretch(self, layer: int, query: Tensor, stretch: Stretch, rule: AttentionRule) -> Tensor:
        """Attends from a stretch that `write_stretch` has stored, with `query` [B, heads, T, dim].

        Each query sees its row up to its own position.
        Returns: the attention's output [B, T, heads * value dim].
        """
        keys, values = (
            wide[layer][stretch.rows, :, : stretch.reach].view(self._dtype)
            for wide in (self._wide_keys, self._wide_values)
        )
        hidden = rule.hides(self._ascending[: stretch.reach], stretch.positions[:, None, :, None])
        return _attention(query, keys, values, ~hidden, rule)

    # --- whole rows -------------------------------------------------------------------------------

    def entries(self, layer: int, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Keys and values [B, kv heads, positions, dim] of rows; those of a slice are views."""
        return self._keys[layer][rows], self._values[layer][rows]

    def moves(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Moves of rows (from, to) that make later steps cheaper, as `row_moves` finds them.

        On a GPU there are none, since all rows are one block there.
        """
        if self._device.type != "cpu":
            return _NO_MOVES, _NO_MOVES
        return row_moves(positions + 1, _BLOCK_ROWS)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64], length: int) -> None:
        """Copies rows to other slots, all at once; only the first `length` positions are copied.

        All of them are read before any is written, so rows may change places.
        """
        self.shifts[targets] = self.shifts[sources]
        take = torch.from_numpy(sources).to(self._device)
        put = torch.from_numpy(targets).to(self._device)
        for numbers in (self._wide_keys, self._wide_values):
            numbers[:, put, :, :length] = numbers[:, take, :, :length]

    def clear(self, row: int) -> None:
        """Zeroes a row that failed: it may hold values that are not finite, which no mask hides."""
        self._all_keys[:, row] = 0
        self._all_values[:, row] = 0


_NO_MOVES = np.zeros(0, np.int64)


def _wide(numbers: Tensor) -> Tensor:
    """The same memory as elements of 16 bytes, where the last axis divides into such.

    Copies by index take time per element, not per byte, and they do not care what the bytes mean.
    """
    is_whole = numbers.shape[-1] * numbers.element_size() % _WIDE_BYTES == 0
    return numbers.view(torch.complex128) if is_whole else numbers


def row_moves(lengths: NDArray[np.int64], block_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Moves of rows (from, to) after which the longest rows are in the first block, and so on.

    Rows that are in the right block already stay. There are no moves at all if the blocks' padding is small.
    Example: lengths `9 1 8 2` in blocks of two rows change rows 1 and 2: `9 8 | 1 2`.
    """
    blocks = np.arange(len(lengths)) // block_rows
    by_length = np.argsort(-lengths, kind="stable")
    starts = np.arange(0, len(lengths), block_rows)
    # A block costs as much as its longest row. Of sorted rows, that is the block's first one.
    cost_now = np.maximum.reduceat(lengths, starts).sum()
    cost_sorted = lengths[by_length[starts]].sum()
    if cost_now <= _MOVE_GAIN * cost_sorted:
        return _NO_MOVES, _NO_MOVES
    wanted = np.empty_like(blocks)
    wanted[by_length] = blocks
    targets = np.flatnonzero(wanted != blocks)
    # As many rows leave a block as enter it. So the rows that leave, ordered by the block that they want, fit
    # the places that become free, in ascending order.
    sources = targets[np.argsort(wanted[targets], kind="stable")]
    return sources, targets


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
    """Attention of whole sequences: query [B, heads, T, dim], keys and values [B, kv heads, T, dim].

    Padding must be on the right, where no real position sees it.
    Returns: the attention's output [B, T, heads * value dim].
    """
    if rule.window == rule.chunk == 0:
        return _attention(query, keys, values, None, rule)
    position = torch.arange(query.shape[2], device=query.device)
    return _attention(query, keys, values, ~rule.hides(position, position[:, None]), rule)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, rule: AttentionRule
) -> Tensor:
    """Attends with a mask `seen` [..., T, L], true where a query sees a key.

    None lets each query see the keys up to its own position, which torch computes without a mask.
    """
    num_rows, _, length, _ = query.shape
    repeats = query.shape[1] // keys.shape[1]
    if rule.softcap == 0 and rule.sinks is None:
        # Torch's fused attention has neither softcap nor sinks, so the formula is written out below.
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
    """Softmax of scores over the last axis, in float32; sinks have the scores' shape without that axis."""
    if sinks is None:
        return torch.softmax(scores, -1, dtype=torch.float32)
    extra = sinks[..., None].expand(*scores.shape[:-1], 1).to(scores.dtype)
    return torch.softmax(torch.cat((scores, extra), -1), -1, dtype=torch.float32)[..., :-1]

"""The key/value cache of one running batch: preallocated slots, dense rows, exact attention over them.

Row i of the running batch lives in slot i; keys and values are `[slot, head, position, dim]`. A decoding step
is bound by the memory that its attention reads, so it reads only the positions that its rows hold, block by
block of rows, and rows are moved so that those of a block are of similar length. What lies behind a row's
last position is finite garbage that is masked; `clear` restores that after a numerical failure.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

__all__ = ["AttentionRule", "CacheShape", "KvCache", "Stretch", "causal_attention", "row_moves"]

_BLOCK_ROWS = 16
"""Finest cut of the rows into attention calls on a CPU."""
_MIN_POSITIONS = 16
"""Fewer than a CPU's vectors hold cost more: a softmax over 15 positions takes seven times one over 16."""
_MOVE_GAIN = 1.25
"""Rows are moved between blocks if attention then reads this many times fewer positions."""
_CALL_COST = 20_000
"""Cached numbers that a CPU reads in the time that one more attention call takes (5-12 us)."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a model needs of a cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How one layer attends. `window` 0 sees all earlier positions; `softcap` 0 leaves scores as they are."""

    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows `[start, end)` of a step, none of which holds more than `length` positions."""

    start: int
    end: int
    length: int
    mask: Tensor
    """[rows, 1, length], 0 or -inf; the heads of a row share it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive positions of several rows, whose keys and values are computed in one call."""

    rows: Tensor
    """[B]"""
    positions: Tensor
    """[B, T]; those past a row's last are padding."""
    reach: int
    """No row holds more positions than this afterwards, padding aside."""


class KvCache:
    """Slots for `num_slots` rows of at most `max_context` positions.

    A decoding step is `begin_step(positions)`, then `attend` once a layer, which also stores the step's keys
    and values. `write` stores whole prefixes, `write_stretch` what follows one, which `attend_stretch` then
    attends from; `move` takes rows from slot to slot.
    """

    def __init__(self, shape: CacheShape, *, num_slots: int, max_context: int) -> None:
        heads = shape.num_kv_heads
        dim = shape.head_dim
        self._heads = heads
        self._dim = dim
        self._max_context = max_context
        self._device = shape.device
        self._dtype = shape.dtype
        size = (shape.num_layers, num_slots, heads, max_context, dim)
        self._all_keys = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._all_values = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        self._keys = list(self._all_keys)
        self._values = list(self._all_values)
        self._wide_keys = _wide(self._all_keys)
        self._wide_values = _wide(self._all_values)
        self._base = torch.arange(num_slots * heads, device=shape.device).view(-1, heads) * max_context
        """[slots, heads] where each row's heads begin, in positions."""
        self._reach = torch.arange(max_context, device=shape.device)
        self._open = torch.zeros((), dtype=shape.dtype, device=shape.device)
        self._closed = torch.full((), -torch.inf, dtype=shape.dtype, device=shape.device)
        """What a mask adds to the score of a position that is seen, and of one that is not."""
        self._positions = self._entry_idx = self._base
        self._blocks: dict[int, list[_Block]] = {}
        self._bounds: list[tuple[int, int, int]] = []

    # --- one decoding step ------------------------------------------------------------------------

    def begin_step(self, positions: NDArray[np.int64]) -> Tensor:
        """Prepares a step of `len(positions)` rows, each about to store its entry at its own position.

        Returns: the positions as a tensor on the cache's device, [B].
        """
        on_device = torch.from_numpy(positions).to(self._device)
        self._entry_idx = (self._base[: len(positions)] + on_device[:, None]).view(-1)
        self._positions = on_device
        self._blocks.clear()
        self._bounds = self._cut(positions + 1)
        return on_device

    def _cut(self, lengths: NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """(start, end, longest) of blocks of rows: as few as pay for themselves; on a GPU one."""
        num_rows = len(lengths)
        if self._device.type != "cpu":
            return [(0, num_rows, int(lengths.max()))]
        least = min(_MIN_POSITIONS, self._max_context)
        longest = np.maximum.reduceat(lengths, np.arange(0, num_rows, _BLOCK_ROWS)).clip(least).tolist()
        row_size = self._heads * self._dim
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

        Returns: [B, heads * dim].
        """
        num_rows, num_heads, dim = query.shape
        groups = num_rows * self._heads
        self._keys[layer].view(-1, dim).index_copy_(0, self._entry_idx, keys.reshape(groups, dim))
        self._values[layer].view(-1, dim).index_copy_(0, self._entry_idx, values.reshape(groups, dim))
        all_keys = self._keys[layer].view(-1, self._max_context, dim)
        all_values = self._values[layer].view(-1, self._max_context, dim)
        scaled = (query * rule.scale).view(groups, num_heads // self._heads, dim)
        parts: list[Tensor] = []
        for block in self._masked_blocks(rule.window):
            start = block.start * self._heads
            end = block.end * self._heads
            scores = torch.bmm(scaled[start:end], all_keys[start:end, : block.length].transpose(1, 2))
            if rule.softcap:
                scores = torch.tanh(scores / rule.softcap) * rule.softcap
            scores.view(block.end - block.start, num_heads, block.length).add_(block.mask)
            weights = torch.softmax(scores, -1, dtype=torch.float32).to(self._dtype)
            parts.append(torch.bmm(weights, all_values[start:end, : block.length]))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.view(num_rows, num_heads * dim)

    def _masked_blocks(self, window: int) -> list[_Block]:
        """The step's blocks for one window; built by the first layer that has it, shared by the others."""
        if window not in self._blocks:
            self._blocks[window] = [self._block(window, *bound) for bound in self._bounds]
        return self._blocks[window]

    def _block(self, window: int, start: int, end: int, length: int) -> _Block:
        last = self._positions[start:end, None, None]
        reach = self._reach[:length]
        hidden = reach > last
        if window:
            hidden |= reach <= last - window
        return _Block(start, end, length, torch.where(hidden, self._closed, self._open))

    # --- whole prefixes ---------------------------------------------------------------------------

    def write(self, layer: int, keys: Tensor, values: Tensor, rows: Tensor) -> None:
        """Stores prefixes [B, kv heads, T, dim] in the given rows, from position 0."""
        length = keys.shape[2]
        self._wide_keys[layer, rows, :, :length] = _wide(keys)
        self._wide_values[layer, rows, :, :length] = _wide(values)

    # --- what follows a prefix --------------------------------------------------------------------

    def stretch(self, rows: Tensor, starts: Tensor, length: int, *, reach: int) -> Stretch:
        """`length` positions of the given rows [B], from each row's own start [B] on."""
        positions = starts[:, None] + self._reach[:length]
        return Stretch(rows, positions.clamp_(max=self._max_context - 1), reach)

    def write_stretch(self, layer: int, keys: Tensor, values: Tensor, stretch: Stretch) -> None:
        """Stores keys and values [B, kv heads, T, dim] of a stretch."""
        rows = stretch.rows[:, None]
        self._wide_keys[layer][rows, :, stretch.positions] = _wide(keys).transpose(1, 2)
        self._wide_values[layer][rows, :, stretch.positions] = _wide(values).transpose(1, 2)

    def attend_stretch(self, layer: int, query: Tensor, stretch: Stretch, rule: AttentionRule) -> Tensor:
        """Attention of a stretch that is stored, query [B, heads, T, dim], to its rows up to each position.

        Returns: [B, T, heads * dim].
        """
        keys, values = (
            wide[layer][stretch.rows, :, : stretch.reach].view(self._dtype)
            for wide in (self._wide_keys, self._wide_values)
        )
        reach = self._reach[: stretch.reach]
        last = stretch.positions[:, None, :, None]
        seen = reach <= last
        if rule.window:
            seen &= reach > last - rule.window
        return _attention(query, keys, values, seen, rule)

    # --- whole rows -------------------------------------------------------------------------------

    def moves(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Moves of rows (from, to) that make later steps cheaper; none on a GPU. `row_moves` decides."""
        if self._device.type != "cpu":
            return _NO_MOVES, _NO_MOVES
        return row_moves(positions + 1, _BLOCK_ROWS)

    def move(self, sources: NDArray[np.int64], targets: NDArray[np.int64], length: int) -> None:
        """Moves rows all at once, or copies them; the first `length` positions hold all that counts."""
        take = torch.from_numpy(sources).to(self._device)
        put = torch.from_numpy(targets).to(self._device)
        for numbers in (self._wide_keys, self._wide_values):
            numbers[:, put, :, :length] = numbers[:, take, :, :length]

    def clear(self, row: int) -> None:
        """Zeroes a row: one that failed may hold values that are not finite, which no mask hides."""
        self._all_keys[:, row] = 0
        self._all_values[:, row] = 0


_NO_MOVES = np.zeros(0, np.int64)


def _wide(numbers: Tensor) -> Tensor:
    """The same memory in elements of 16 bytes, where that goes: indexing costs by the element."""
    is_whole = numbers.shape[-1] * numbers.element_size() % 16 == 0
    return numbers.view(torch.complex128) if is_whole else numbers


def row_moves(lengths: NDArray[np.int64], block_rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Moves of rows (from, to) after which each block of rows is at least as long as the next one.

    None if the blocks' padding is small already. Rows that are in the right block stay.
    """
    blocks = np.arange(len(lengths)) // block_rows
    by_length = np.argsort(-lengths, kind="stable")
    starts = np.arange(0, len(lengths), block_rows)
    padded = np.maximum.reduceat(lengths, starts).sum()
    if padded <= _MOVE_GAIN * lengths[by_length[starts]].sum():
        return _NO_MOVES, _NO_MOVES
    wanted = np.empty_like(blocks)
    wanted[by_length] = blocks
    targets = np.flatnonzero(wanted != blocks)
    sources = targets[np.argsort(wanted[targets], kind="stable")]
    return sources, targets


def causal_attention(query: Tensor, keys: Tensor, values: Tensor, rule: AttentionRule) -> Tensor:
    """Attention of whole sequences: query [B, heads, T, dim], keys and values [B, kv heads, T, dim].

    Padding must be on the right. Returns: [B, T, heads * dim].
    """
    if rule.window == 0:
        return _attention(query, keys, values, None, rule)
    reach = torch.arange(query.shape[2], device=query.device)
    last = reach[:, None]
    return _attention(query, keys, values, (reach <= last) & (reach > last - rule.window), rule)


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, seen: Tensor | None, rule: AttentionRule
) -> Tensor:
    """`seen` [..., T, L]: where it is true a query sees a key; None: all keys up to its own place."""
    num_rows, num_heads, length, dim = query.shape
    repeats = num_heads // keys.shape[1]
    if rule.softcap == 0:
        out = functional.scaled_dot_product_attention(
            query, keys, values, seen, is_causal=seen is None, scale=rule.scale, enable_gqa=repeats > 1
        )
    else:
        scores = query @ keys.repeat_interleave(repeats, 1).transpose(2, 3) * rule.scale
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
        if seen is None:
            seen = torch.ones(length, length, dtype=torch.bool, device=query.device).tril_()
        scores = scores.masked_fill(~seen, -torch.inf)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        out = weights @ values.repeat_interleave(repeats, 1)
    return out.transpose(1, 2).reshape(num_rows, length, num_heads * dim)

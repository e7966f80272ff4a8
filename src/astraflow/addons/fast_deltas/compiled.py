"""The functions of `planes`, compiled by numba: one pass over the data, without the interpreter's lock.

`_find` processes slices that fit the first-level cache, in three loops. The first compares all elements and
writes one flag per element. The second lists the groups of eight flags in which any is set. The third visits
the flags of these groups. A single loop that compares and branches on each element would be slower: the
compiler could not vectorize it, and a mispredicted branch costs as much as ten comparisons.

Every index that comes from encoded bytes is checked before it is used.
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.weights.delta.planes import BYTE_ESCAPE, GAP_TOP, QUAD_ESCAPE, Counts, Plane, Words

__all__ = ["add_dense", "add_sparse", "all_steps", "copy_at", "find", "gap_planes", "step_planes"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Ints = NDArray[Any]
_Int = Any
"""An int inside compiled code, of one of numba's own types, which numpy's stubs do not describe."""

_SLICE = 4096
"""Elements compared at once, so that flags and both slices stay in 32 KB of first-level cache."""
_GATHERED = 512
"""Number of changed elements that are gathered, stepped and scattered together, which is twice as fast as one
by one."""
_USUAL_SHARE = 8
"""The first search has memory for one in this many of the allowed changes, because allocating all of it costs
as much as the comparison."""
_ONE = np.uint64(1)
_TOP_BYTE_SHIFT = np.uint64(56)
_BYTE_IDX = np.uint64(0x0001020304050607)
"""Multiplier that finds the position of a flag. If byte i of a word is 1 and all others are 0, the top byte
of the product is i."""


def _compile(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Compiles a function at its first call, and caches the machine code on disk for later processes."""
    return cast("Callable[_P, _R]", numba.njit(nogil=True, cache=True)(function))  # pyright: ignore[reportUnknownMemberType] (numba is partly typed)


def find(old: Words, new: Words, limit: int) -> tuple[NDArray[np.uint32], Words] | None:
    """As `planes.find`."""
    for size in (limit // _USUAL_SHARE, limit):
        positions = np.empty(size, np.uint32)
        steps = np.empty(size, old.dtype)
        count = _find(old, new, positions, steps, 8 * old.dtype.itemsize)
        if count >= 0:
            return positions[:count], steps[:count]
    return None


def all_steps(old: Words, new: Words) -> Words:
    """As `planes.all_steps`."""
    steps = np.empty_like(old)
    _all_steps(old, new, steps, 8 * old.dtype.itemsize)
    return steps


def copy_at(old: Words, new: Words, positions: NDArray[np.uint32]) -> None:
    """As `planes.copy_at`."""
    _copy_at(old, new, positions)


def gap_planes(positions: NDArray[np.uint32], gap_bytes: int) -> list[Plane]:
    """As `planes.gap_planes`."""
    top = GAP_TOP[gap_bytes]
    gaps = np.empty((gap_bytes, positions.size + int(positions[-1]) // top), np.uint8)
    return [*gaps[:, : _fill_gaps(positions, gaps, top)]]


def step_planes(steps: Words) -> list[Plane]:
    """As `planes.step_planes`."""
    byte_steps, wide_steps = _count_large(steps)
    quads = np.zeros(-(-steps.size // 4), np.uint8)
    in_byte = np.empty(byte_steps, np.uint8)
    wide = np.empty((steps.dtype.itemsize, wide_steps), np.uint8)
    _fill_steps(steps, quads, in_byte, wide)
    return [quads, in_byte, *wide]


def add_sparse(words: Words, counts: Counts, planes: Sequence[Plane]) -> None:
    """As `planes.add_sparse`."""
    gap_bytes = len(planes) - 2 - words.dtype.itemsize
    positions = np.empty(counts.steps, np.int64)
    if not _fill_positions(np.stack(planes[:gap_bytes]), positions, words.size):
        raise WeightsError("the gaps of a block do not fit its steps or the tensor")
    zigzags = _zigzags(words, counts, planes[gap_bytes:]) + words.dtype.type(1)
    _add_at(words, positions, zigzags, np.empty(_GATHERED, words.dtype))


def add_dense(words: Words, counts: Counts, planes: Sequence[Plane]) -> None:
    """As `planes.add_dense`."""
    if counts.steps != words.size:
        raise WeightsError(f"{counts.steps} steps for {words.size} elements")
    _add(words, _zigzags(words, counts, planes))


def _zigzags(words: Words, counts: Counts, planes: Sequence[Plane]) -> Words:
    """The numbers that the step planes hold, one per step.

    Raises: WeightsError if the planes do not fit each other or the counts.
    """
    zigzags = np.empty(counts.steps, words.dtype)
    quads = planes[0]
    in_byte = planes[1]
    wide = np.stack(planes[2:])
    if 4 * quads.size < counts.steps or not _fill_zigzags(quads, in_byte, wide, zigzags):
        raise WeightsError("the planes of a block do not fit each other")
    return zigzags


@_compile
def _zigzag(old: _Int, new: _Int, bits: _Int) -> _Int:
    """Like `planes._zigzag`, but computed in int64 and masked to the word size."""
    sign = 1 << (bits - 1)
    mask = (1 << bits) - 1
    before = old ^ mask if old & sign else old | sign
    after = new ^ mask if new & sign else new | sign
    step = (after - before) & mask
    return ((step << 1) ^ mask) & mask if step & sign else step << 1


@_compile
def _take_step(word: _Int, zigzag: _Int, bits: _Int) -> _Int:
    """Like `planes._take_step`, but without branches, since signs are unpredictable.

    `-(x >> (bits - 1))` has all bits set if the top bit of `x` is set, and none otherwise.
    """
    sign = 1 << (bits - 1)
    mask = (1 << bits) - 1
    ordered = word ^ (sign | (-(word >> (bits - 1)) & mask))
    ordered = (ordered + ((zigzag >> 1) ^ -(zigzag & 1))) & mask
    return ordered ^ mask ^ (-(ordered >> (bits - 1)) & (mask ^ sign))


@_compile  # size: a call in the innermost loop would cost more than the nesting
def _find(old: _Ints, new: _Ints, positions: _Ints, steps: _Ints, bits: _Int) -> _Int:
    """Fills `positions` and `steps`; returns the number of changes, or -1 if there is no room for them."""
    flags = np.zeros(_SLICE, np.uint8)
    words = flags.view(np.uint64)
    hits = np.zeros(words.size, np.int64)
    count = 0
    limit = positions.size
    for start in range(0, old.size, _SLICE):
        before = old[start : start + _SLICE]
        after = new[start : start + _SLICE]
        size = before.size
        for i in range(size):
            flags[i] = before[i] != after[i]
        flags[size:] = 0
        num_hits = 0
        for w in range((size + 7) // 8):
            # Always written, but counted only if a flag is set: this avoids a branch.
            hits[num_hits] = w
            num_hits += words[w] != 0
        for h in range(num_hits):
            w = hits[h]
            word = words[hits[h]]
            while word:
                lowest_flag = word & (~word + _ONE)
                i = 8 * w + np.int64(lowest_flag * _BYTE_IDX >> _TOP_BYTE_SHIFT)
                word &= word - _ONE  # clears the lowest flag
                if count == limit:
                    return -1
                positions[count] = start + i
                steps[count] = _zigzag(np.int64(before[i]), np.int64(after[i]), bits) - 1
                count += 1
    return count


@_compile
def _all_steps(old: _Ints, new: _Ints, steps: _Ints, bits: int) -> None:
    for i in range(old.size):
        steps[i] = _zigzag(np.int64(old[i]), np.int64(new[i]), bits)


@_compile
def _copy_at(old: _Ints, new: _Ints, positions: _Ints) -> None:
    for i in range(positions.size):
        old[positions[i]] = new[positions[i]]


@_compile
def _count_large(steps: _Ints) -> tuple[int, int]:
    """The numbers of byte steps and of wide steps."""
    byte_steps = 0
    wide_steps = 0
    for i in range(steps.size):
        byte_steps += steps[i] >= QUAD_ESCAPE
        wide_steps += steps[i] >= QUAD_ESCAPE + BYTE_ESCAPE
    return byte_steps, wide_steps


@_compile
def _fill_gaps(positions: _Ints, gaps: _Ints, top: int) -> int:
    """Writes the symbols of the gaps; returns how many there are."""
    at = 0
    previous = -1
    for i in range(positions.size):
        gap = np.int64(positions[i]) - previous - 1
        previous = np.int64(positions[i])
        while gap >= top:
            gaps[:, at] = 255  # both bytes of 65535 are 255 as well
            gap -= top
            at += 1
        gaps[0, at] = gap & 255
        if top > 255:
            gaps[1, at] = gap >> 8
        at += 1
    return at


@_compile
def _fill_steps(steps: _Ints, quads: _Ints, in_byte: _Ints, wide: _Ints) -> None:
    at = 0
    wide_at = 0
    for i in range(steps.size):
        step = np.int64(steps[i])
        quads[i >> 2] |= min(step, QUAD_ESCAPE) << (2 * (i & 3))
        if step < QUAD_ESCAPE:
            continue
        in_byte[at] = min(step - QUAD_ESCAPE, BYTE_ESCAPE)
        at += 1
        if step < QUAD_ESCAPE + BYTE_ESCAPE:
            continue
        for k in range(wide.shape[0]):
            wide[k, wide_at] = (step >> (8 * k)) & 255
        wide_at += 1


@_compile
def _fill_positions(gaps: _Ints, positions: _Ints, size: int) -> bool:
    """Writes the positions. Returns False unless the gaps give exactly `positions.size` of them, all below
    `size`."""
    top = 65535 if gaps.shape[0] == 2 else 255
    count = 0
    position = -1
    for at in range(gaps.shape[1]):
        if count == positions.size:
            return False
        symbol = np.int64(gaps[0, at])
        if top > 255:
            symbol |= np.int64(gaps[1, at]) << 8
        ends_gap = symbol != top
        position += symbol + ends_gap
        # Always written, but counted only at the end of a gap: this avoids a branch.
        positions[count] = position
        count += ends_gap
    # Positions ascend, so that the last one bounds them all.
    return count == positions.size and position < size


@_compile
def _fill_zigzags(quads: _Ints, in_byte: _Ints, wide: _Ints, zigzags: _Ints) -> bool:
    """Writes the numbers of the step planes. Returns False unless the planes hold exactly as many."""
    byte_at = 0
    wide_at = 0
    for i in range(zigzags.size):
        step = (np.int64(quads[i >> 2]) >> (2 * (i & 3))) & 3
        if step == QUAD_ESCAPE:
            if byte_at == in_byte.size:
                return False
            step = np.int64(in_byte[byte_at]) + QUAD_ESCAPE
            byte_at += 1
        if step == QUAD_ESCAPE + BYTE_ESCAPE:
            if wide_at == wide.shape[1]:
                return False
            step = np.int64(0)
            for k in range(wide.shape[0]):
                step |= np.int64(wide[k, wide_at]) << (8 * k)
            wide_at += 1
        zigzags[i] = step
    return byte_at == in_byte.size and wide_at == wide.shape[1]


@_compile
def _add(words: _Ints, zigzags: _Ints) -> None:
    for i in range(words.size):
        words[i] = _take_step(np.int64(words[i]), np.int64(zigzags[i]), 8 * words.itemsize)


@_compile
def _add_at(words: _Ints, positions: _Ints, zigzags: _Ints, some: _Ints) -> None:
    """Gathers elements into `some`, steps them with vector instructions, and scatters them back."""
    for start in range(0, positions.size, some.size):
        places = positions[start : start + some.size]
        for i in range(places.size):
            some[i] = words[np.uint64(places[i])]
        _add(some[: places.size], zigzags[start : start + some.size])
        for i in range(places.size):
            words[np.uint64(places[i])] = some[i]

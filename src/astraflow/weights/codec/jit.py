"""The functions of `planes`, compiled by numba: one pass over the data, without the interpreter's lock.

The comparison runs over a slice that fits the first-level cache, into flags that are then scanned eight at a
time: comparing element by element would stop the compiler from using vector instructions. Every index that
comes from encoded bytes is checked before it is used.
"""

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.weights.codec.planes import BYTE_ESCAPE, GAP_TOP, QUAD_ESCAPE, Counts, Plane, Words

__all__ = ["add_dense", "add_sparse", "all_steps", "find", "gap_planes", "step_planes"]

_P = ParamSpec("_P")
_R = TypeVar("_R")
_Ints = NDArray[Any]
_Int = Any
"""An int inside compiled code: numba's own types, which numpy's stubs do not describe."""

_SLICE = 4096
"""Elements compared at once: flags and both slices stay in 32 KB of first-level cache."""
_USUAL_SHARE = 8
"""Room for this part of the limit is tried first: fresh memory costs as much as the comparison."""
_ONE, _SHIFT = np.uint64(1), np.uint64(56)
_BYTE_IDX = np.uint64(0x0001020304050607)
"""Times a word of one flag: the top byte says which of its eight bytes that is."""


def _compiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
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


def gap_planes(positions: NDArray[np.uint32], gap_bytes: int) -> list[Plane]:
    """As `planes.gap_planes`."""
    top = GAP_TOP[gap_bytes]
    gaps = np.empty((gap_bytes, _count_symbols(positions, top)), np.uint8)
    _fill_gaps(positions, gaps, top)
    return [*gaps]


def step_planes(steps: Words) -> list[Plane]:
    """As `planes.step_planes`."""
    byte_steps, wide_steps = _count_large(steps)
    quads = np.zeros(-(-steps.size // 4), np.uint8)
    in_byte = np.empty(byte_steps, np.uint8)
    wide = np.empty((steps.dtype.itemsize, wide_steps), np.uint8)
    _fill_steps(steps, quads, in_byte, wide)
    return [quads, in_byte, *wide]


def add_sparse(words: Words, counts: Counts, planes: Sequence[Plane]) -> None:
    """As `planes.add_sparse`, except that on an error some elements may have been changed."""
    gap_bytes = len(planes) - 2 - words.dtype.itemsize
    _patch(words, counts, np.stack(planes[:gap_bytes]), planes[gap_bytes:])


def add_dense(words: Words, counts: Counts, planes: Sequence[Plane]) -> None:
    """As `planes.add_dense`, except that on an error some elements may have been changed."""
    _patch(words, counts, np.zeros((0, 0), np.uint8), planes)


def _patch(words: Words, counts: Counts, gaps: Plane, planes: Sequence[Plane]) -> None:
    quads, in_byte, wide = planes[0], planes[1], np.stack(planes[2:])
    bits = 8 * words.dtype.itemsize
    if 4 * quads.size < counts.steps or not _add(words, counts.steps, gaps, quads, in_byte, wide, bits):
        raise WeightsError("the planes of a block do not fit each other or the tensor")


@_compiled
def _zigzag(old: _Int, new: _Int, bits: _Int) -> _Int:
    sign, mask = 1 << (bits - 1), (1 << bits) - 1
    before = old ^ mask if old & sign else old | sign
    after = new ^ mask if new & sign else new | sign
    step = (after - before) & mask
    return ((step << 1) ^ mask) & mask if step & sign else step << 1


@_compiled
def _stepped(word: _Int, zigzag: _Int, bits: _Int) -> _Int:
    sign, mask = 1 << (bits - 1), (1 << bits) - 1
    ordered = word ^ mask if word & sign else word | sign
    step = (zigzag >> 1) ^ mask if zigzag & 1 else zigzag >> 1
    ordered = (ordered + step) & mask
    return ordered ^ sign if ordered & sign else ordered ^ mask


@_compiled  # size: a call in the innermost loop would cost more than the nesting
def _find(old: _Ints, new: _Ints, positions: _Ints, steps: _Ints, bits: _Int) -> _Int:
    flags = np.zeros(_SLICE, np.uint8)
    words = flags.view(np.uint64)
    count, limit = 0, positions.size
    for start in range(0, old.size, _SLICE):
        before, after = old[start : start + _SLICE], new[start : start + _SLICE]
        size = before.size
        for i in range(size):
            flags[i] = before[i] != after[i]
        flags[size:] = 0
        for w in range((size + 7) // 8):
            word = words[w]
            while word:
                i = 8 * w + np.int64((word & (~word + _ONE)) * _BYTE_IDX >> _SHIFT)
                word &= word - _ONE
                if count == limit:
                    return -1
                positions[count] = start + i
                steps[count] = _zigzag(np.int64(before[i]), np.int64(after[i]), bits) - 1
                count += 1
    return count


@_compiled
def _all_steps(old: _Ints, new: _Ints, steps: _Ints, bits: int) -> None:
    for i in range(old.size):
        steps[i] = _zigzag(np.int64(old[i]), np.int64(new[i]), bits)


@_compiled
def _count_symbols(positions: _Ints, top: int) -> _Int:
    symbols, previous = 0, -1
    for i in range(positions.size):
        symbols += (np.int64(positions[i]) - previous - 1) // top + 1
        previous = np.int64(positions[i])
    return symbols


@_compiled
def _count_large(steps: _Ints) -> tuple[int, int]:
    byte_steps, wide_steps = 0, 0
    for i in range(steps.size):
        byte_steps += steps[i] >= QUAD_ESCAPE
        wide_steps += steps[i] >= QUAD_ESCAPE + BYTE_ESCAPE
    return byte_steps, wide_steps


@_compiled
def _fill_gaps(positions: _Ints, gaps: _Ints, top: int) -> None:
    at, previous = 0, -1
    for i in range(positions.size):
        gap = np.int64(positions[i]) - previous - 1
        previous = np.int64(positions[i])
        while gap >= top:
            gaps[:, at] = 255
            gap -= top
            at += 1
        gaps[0, at] = gap & 255
        if top > 255:
            gaps[1, at] = gap >> 8
        at += 1


@_compiled
def _fill_steps(steps: _Ints, quads: _Ints, in_byte: _Ints, wide: _Ints) -> None:
    at, wide_at = 0, 0
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


@_compiled
def _add(  # noqa: PLR0917, C901 (the planes of the format in one pass over them)
    words: _Ints, num_steps: int, gaps: _Ints, quads: _Ints, in_byte: _Ints, wide: _Ints, bits: int
) -> bool:
    """Without gap planes every element has its step, which may be 0; with them it is one more than coded."""
    at, byte_at, wide_at, position = 0, 0, 0, -1
    top = 65535 if gaps.shape[0] == 2 else 255
    is_sparse = gaps.shape[0] > 0
    for i in range(num_steps):
        symbol = top if is_sparse else 0
        while symbol == top:
            if at == gaps.shape[1]:
                return False
            symbol = np.int64(gaps[0, at])
            if top > 255:
                symbol |= np.int64(gaps[1, at]) << 8
            position += symbol
            at += 1
        position += 1
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
        if position >= words.size:
            return False
        zigzag = (step + is_sparse) & ((1 << bits) - 1)
        words[position] = _stepped(np.int64(words[position]), zigzag, bits)
    return at == gaps.shape[1] and byte_at == in_byte.size and wide_at == wide.shape[1]

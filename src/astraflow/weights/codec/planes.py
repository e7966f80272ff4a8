"""The arithmetic of a delta block in numpy: which elements changed, by how many steps, as byte planes.

Elements are words of 16 or 32 bits, bfloat16, float16 and float32 alike: sign and magnitude. A word has its
place in the order of values as an unsigned integer (-0.0 is one below +0.0, NaNs lie beyond the infinities),
so that a small change of a weight is a small signed step; every step is exact, modulo the word size, for
every bit pattern. docs/DELTA.md defines the planes. Everything here is pure; `jit` has the same functions
compiled, with the same bytes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import WeightsError

__all__ = [
    "BYTE_ESCAPE",
    "GAP_TOP",
    "QUAD_ESCAPE",
    "Counts",
    "Kernel",
    "Plane",
    "Words",
    "add_dense",
    "add_sparse",
    "all_steps",
    "copy_at",
    "find",
    "gap_planes",
    "join",
    "positions_of",
    "split",
    "step_planes",
]

Words = NDArray[Any]
"""Elements of a tensor as uint16 or uint32."""
Plane = NDArray[np.uint8]
"""One byte of each symbol."""

GAP_TOP = {1: 255, 2: 65535}
"""Symbol that says "this many unchanged elements, and the gap continues", by the width of a gap symbol."""
QUAD_ESCAPE = 3
"""2-bit symbol of a step that the byte plane holds."""
BYTE_ESCAPE = 255
"""Byte of a step that the wide planes hold."""


class Counts(NamedTuple):
    """How many steps a block holds, and how many symbols its planes hold."""

    steps: int
    """Number of steps of the changed elements; in a dense block, of all elements."""
    symbols: int
    """Number of symbols of the gaps; 0 in a dense block."""
    byte_steps: int
    wide_steps: int


class Kernel(Protocol):
    """What `planes` and `jit` both are."""

    def find(self, old: Words, new: Words, limit: int) -> tuple[NDArray[np.uint32], Words] | None: ...

    def all_steps(self, old: Words, new: Words) -> Words: ...

    def copy_at(self, old: Words, new: Words, positions: NDArray[np.uint32]) -> None: ...

    def gap_planes(self, positions: NDArray[np.uint32], gap_bytes: int) -> list[Plane]: ...

    def step_planes(self, steps: Words) -> list[Plane]: ...

    def add_sparse(self, words: Words, counts: Counts, planes: Sequence[Plane]) -> None: ...

    def add_dense(self, words: Words, counts: Counts, planes: Sequence[Plane]) -> None: ...


def find(old: Words, new: Words, limit: int) -> tuple[NDArray[np.uint32], Words] | None:
    """Positions of the elements that differ, and their steps: zig-zag less one. None if there are more than
    `limit`."""
    positions = np.flatnonzero(old != new)
    if positions.size > limit:
        return None
    steps = _zigzag(old[positions], new[positions]) - old.dtype.type(1)
    return positions.astype(np.uint32), steps


def all_steps(old: Words, new: Words) -> Words:
    """The step of every element: zig-zag, 0 where nothing changed."""
    return _zigzag(old, new)


def copy_at(old: Words, new: Words, positions: NDArray[np.uint32]) -> None:
    """Writes the new elements at these positions over the old ones."""
    old[positions] = new[positions]


def gap_planes(positions: NDArray[np.uint32], gap_bytes: int) -> list[Plane]:
    """How many unchanged elements lie before each change."""
    top = GAP_TOP[gap_bytes]
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    runs = gaps // top
    ends = np.cumsum(runs + 1) - 1
    symbols = np.full(int(ends[-1]) + 1, top, dtype=f"<u{gap_bytes}")
    symbols[ends] = gaps - runs * top
    return split(symbols)


def step_planes(steps: Words) -> list[Plane]:
    """Steps as four in a byte; those that 2 bits cannot hold in a byte; those that this cannot hold in a
    plane for each byte of a word."""
    quads = np.zeros(-(-steps.size // 4) * 4, np.uint8)
    quads[: steps.size] = np.minimum(steps, QUAD_ESCAPE)
    packed = np.zeros(quads.size // 4, np.uint8)
    for k in range(4):
        packed |= quads[k::4] << np.uint8(2 * k)
    large = steps[steps >= QUAD_ESCAPE]
    in_byte = np.minimum(large - large.dtype.type(QUAD_ESCAPE), BYTE_ESCAPE).astype(np.uint8)
    return [packed, in_byte, *split(large[in_byte == BYTE_ESCAPE])]


def add_sparse(words: Words, counts: Counts, planes: Sequence[Plane]) -> None:
    """Adds steps in place. Raises: WeightsError if the planes do not fit; nothing is changed then."""
    gap_bytes = len(planes) - 2 - words.dtype.itemsize
    positions = positions_of(planes[:gap_bytes], counts.steps, words.size)
    steps = _steps(words.dtype, counts, planes[gap_bytes:])
    words[positions] = _stepped(words[positions], steps + words.dtype.type(1))


def positions_of(gaps: Sequence[Plane], num_steps: int, num_elements: int) -> NDArray[np.int64]:
    """Which elements of a block changed, ascending. Raises: WeightsError if the planes do not fit."""
    symbols = join(gaps)
    is_last = symbols != GAP_TOP[len(gaps)]
    if np.count_nonzero(is_last) != num_steps or not is_last[-1]:
        raise WeightsError("the gaps do not end with the changes")
    positions = np.cumsum(symbols, dtype=np.int64)[is_last] + np.arange(num_steps)
    if positions[-1] >= num_elements:
        raise WeightsError(f"a change at element {positions[-1]} of {num_elements}")
    return positions


def add_dense(words: Words, counts: Counts, planes: Sequence[Plane]) -> None:
    """Adds a step to every element in place. Raises as `add_sparse`."""
    words[:] = _stepped(words, _steps(words.dtype, counts, planes))


def _steps(dtype: np.dtype[Any], counts: Counts, planes: Sequence[Plane]) -> Words:
    packed = planes[0]
    in_byte = planes[1]
    wide = join(planes[2:])
    quads = np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=1).reshape(-1)[: counts.steps]
    steps = quads.astype(dtype)
    large_idx = np.flatnonzero(quads == QUAD_ESCAPE)
    if quads.size != counts.steps or large_idx.size != counts.byte_steps:
        raise WeightsError("the byte plane does not fit the 2-bit plane")
    steps[large_idx] = in_byte.astype(dtype) + dtype.type(QUAD_ESCAPE)
    wide_idx = large_idx[in_byte == BYTE_ESCAPE]
    if wide_idx.size != counts.wide_steps:
        raise WeightsError("the wide planes do not fit the byte plane")
    steps[wide_idx] = wide
    return steps


def split(words: Words) -> list[Plane]:
    """The bytes of little-endian words, lowest first, a plane each."""
    table = np.ascontiguousarray(words).view(np.uint8).reshape(words.size, words.dtype.itemsize)
    return [np.ascontiguousarray(table[:, i]) for i in range(words.dtype.itemsize)]


def join(planes: Sequence[Plane]) -> Words:
    """The words of `split`."""
    table = np.stack(planes, axis=1)
    return table.reshape(-1).view(f"<u{len(planes)}")


def _zigzag(old: Words, new: Words) -> Words:
    """Signed step from old to new as 0, -1, 1, -2, 2... -> 0, 1, 2, 3, 4..., modulo the word size."""
    step = _ordered(new) - _ordered(old)
    top = old.dtype.type(8 * old.dtype.itemsize - 1)
    return (step << old.dtype.type(1)) ^ np.negative(step >> top)


def _stepped(words: Words, zigzags: Words) -> Words:
    one = words.dtype.type(1)
    step = (zigzags >> one) ^ np.negative(zigzags & one)
    ordered = _ordered(words) + step
    sign = _sign(words)
    return cast("Words", np.where(ordered & sign, ordered ^ sign, ~ordered))


def _ordered(words: Words) -> Words:
    sign = _sign(words)
    return np.where(words & sign, ~words, words | sign)


def _sign(words: Words) -> Any:
    return words.dtype.type(1 << (8 * words.dtype.itemsize - 1))

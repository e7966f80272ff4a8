"""Computes delta blocks in numpy: which elements changed and by how many steps, stored as byte planes.

An element is a word of 16 or 32 bits. Its top bit is the sign and the other bits are the magnitude, in
bfloat16, float16 and float32 alike. Each word is mapped to its rank in the order of values, an unsigned
integer: -0.0 is one below +0.0, and NaNs lie beyond the infinities. A step is the difference between two
ranks, so a small change of a weight is a small signed step. Steps are computed modulo 2^W for words of W
bits, so they are exact for every bit pattern.

docs/protocol/delta.md defines the planes. Everything here is pure. The add-on `fast_deltas` has the same
functions in compiled form, which produce the same bytes.
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
"""Largest gap symbol, by width in bytes. It means that many unchanged elements, and the gap continues."""
QUAD_ESCAPE = 3
"""2-bit symbol for a step that is stored in the byte plane."""
BYTE_ESCAPE = 255
"""Byte for a step that is stored in the wide planes."""


class Counts(NamedTuple):
    """The numbers of steps and of plane symbols in a block."""

    steps: int
    """Number of steps of the changed elements; in a dense block, of all elements."""
    symbols: int
    """Number of symbols of the gaps; 0 in a dense block."""
    byte_steps: int
    """Number of steps too large for 2 bits."""
    wide_steps: int
    """Number of steps too large for a byte as well."""


class Kernel(Protocol):
    """The functions of `planes`, which has their docstrings, and of the add-on `fast_deltas`."""

    def find(self, old: Words, new: Words, limit: int) -> tuple[NDArray[np.uint32], Words] | None: ...

    def all_steps(self, old: Words, new: Words) -> Words: ...

    def copy_at(self, old: Words, new: Words, positions: NDArray[np.uint32]) -> None: ...

    def gap_planes(self, positions: NDArray[np.uint32], gap_bytes: int) -> list[Plane]: ...

    def step_planes(self, steps: Words) -> list[Plane]: ...

    def add_sparse(self, words: Words, counts: Counts, planes: Sequence[Plane]) -> None: ...

    def add_dense(self, words: Words, counts: Counts, planes: Sequence[Plane]) -> None: ...


def find(old: Words, new: Words, limit: int) -> tuple[NDArray[np.uint32], Words] | None:
    """Positions and steps of the elements that differ; None if there are more than `limit`.

    A step is stored as its zig-zag number minus one, because 0 ("unchanged") cannot occur here.
    """
    positions = np.flatnonzero(old != new)
    if positions.size > limit:
        return None
    steps = _zigzag(old[positions], new[positions]) - old.dtype.type(1)
    return positions.astype(np.uint32), steps


def all_steps(old: Words, new: Words) -> Words:
    """The steps of all elements as zig-zag numbers; 0 where nothing changed."""
    return _zigzag(old, new)


def copy_at(old: Words, new: Words, positions: NDArray[np.uint32]) -> None:
    """Overwrites the old elements at these positions with the new ones."""
    old[positions] = new[positions]


def gap_planes(positions: NDArray[np.uint32], gap_bytes: int) -> list[Plane]:
    """The gaps before the changes, as planes of symbols. A gap is a number of unchanged elements.

    `positions` holds the ascending positions of at least one change. `gap_bytes` is the width of a symbol.
    """
    top = GAP_TOP[gap_bytes]
    gaps = np.diff(positions.astype(np.int64), prepend=-1) - 1
    # A gap is written as one `top` per `top` elements, then a smaller symbol that ends the gap.
    num_tops = gaps // top
    ends = np.cumsum(num_tops + 1) - 1
    symbols = np.full(int(ends[-1]) + 1, top, dtype=f"<u{gap_bytes}")
    symbols[ends] = gaps - num_tops * top
    return split(symbols)


def step_planes(steps: Words) -> list[Plane]:
    """Steps as planes: small steps, four per byte; then byte steps; then wide steps, one plane for each byte
    of a word."""
    quads = np.zeros(-(-steps.size // 4) * 4, np.uint8)
    quads[: steps.size] = np.minimum(steps, QUAD_ESCAPE)
    packed = np.zeros(quads.size // 4, np.uint8)
    for k in range(4):
        packed |= quads[k::4] << np.uint8(2 * k)
    large = steps[steps >= QUAD_ESCAPE]
    in_byte = np.minimum(large - large.dtype.type(QUAD_ESCAPE), BYTE_ESCAPE).astype(np.uint8)
    return [packed, in_byte, *split(large[in_byte == BYTE_ESCAPE])]


def add_sparse(words: Words, counts: Counts, planes: Sequence[Plane]) -> None:
    """Adds the steps of a sparse block to the changed elements, in place.

    Raises: WeightsError if the planes do not fit; nothing has been changed then.
    """
    # After the gaps come the small steps, the byte steps, and one plane for each byte of a word.
    gap_bytes = len(planes) - 2 - words.dtype.itemsize
    positions = positions_of(planes[:gap_bytes], counts.steps, words.size)
    steps = _steps(words.dtype, counts, planes[gap_bytes:])
    # A sparse block stores zig-zag numbers minus one.
    words[positions] = _take_steps(words[positions], steps + words.dtype.type(1))


def positions_of(gaps: Sequence[Plane], num_steps: int, num_elements: int) -> NDArray[np.int64]:
    """The ascending positions of the changed elements of a block.

    Raises: WeightsError if the planes do not fit.
    """
    symbols = join(gaps)
    ends_gap = symbols != GAP_TOP[len(gaps)]
    if np.count_nonzero(ends_gap) != num_steps or not ends_gap[-1]:
        raise WeightsError("the gaps do not match the number of changes")
    # A change comes after the unchanged elements of all gaps so far, and after the earlier changes.
    positions = np.cumsum(symbols, dtype=np.int64)[ends_gap] + np.arange(num_steps)
    if positions[-1] >= num_elements:
        raise WeightsError(f"a change at element {positions[-1]} of {num_elements}")
    return positions


def add_dense(words: Words, counts: Counts, planes: Sequence[Plane]) -> None:
    """Adds the steps of a dense block to all elements, in place.

    Raises: WeightsError if the planes do not fit; nothing has been changed then.
    """
    words[:] = _take_steps(words, _steps(words.dtype, counts, planes))


def _steps(dtype: np.dtype[Any], counts: Counts, planes: Sequence[Plane]) -> Words:
    """The steps stored in planes, the inverse of `step_planes`.

    Raises: WeightsError if the planes do not fit each other or the counts.
    """
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
    """One plane for each byte of little-endian words, the lowest byte first."""
    table = np.ascontiguousarray(words).view(np.uint8).reshape(words.size, words.dtype.itemsize)
    return [np.ascontiguousarray(table[:, i]) for i in range(words.dtype.itemsize)]


def join(planes: Sequence[Plane]) -> Words:
    """The words whose bytes `split` separated."""
    table = np.stack(planes, axis=1)
    return table.reshape(-1).view(f"<u{len(planes)}")


def _zigzag(old: Words, new: Words) -> Words:
    """The steps from old to new as zig-zag numbers: steps 0, -1, 1, -2, 2... become 0, 1, 2, 3, 4..."""
    step = _value_order(new) - _value_order(old)  # unsigned words wrap around: arithmetic modulo 2^W
    sign_bit = old.dtype.type(8 * old.dtype.itemsize - 1)
    # The negative of the sign bit has all bits set if the step is negative, and none otherwise.
    return (step << old.dtype.type(1)) ^ np.negative(step >> sign_bit)


def _take_steps(words: Words, zigzags: Words) -> Words:
    """The words after these steps, the inverse of `_zigzag`."""
    one = words.dtype.type(1)
    step = (zigzags >> one) ^ np.negative(zigzags & one)
    ordered = _value_order(words) + step
    sign = _sign(words)
    return cast("Words", np.where(ordered & sign, ordered ^ sign, ~ordered))


def _value_order(words: Words) -> Words:
    """The rank of each word in the order of values. For negative words, a larger word is a lower value."""
    sign = _sign(words)
    return np.where(words & sign, ~words, words | sign)


def _sign(words: Words) -> Any:
    """A word with only the top bit set."""
    return words.dtype.type(1 << (8 * words.dtype.itemsize - 1))

"""Reads encoding `astraflow-delta-1`: the difference between two versions with the same tensor table.

    parse     bytes -> blocks, each checked against its checksum and the table; no tensor is touched
    apply     blocks -> the changed elements of a buffer that holds the base, in place

docs/protocol/delta.md defines every byte. Every bit pattern is preserved. Input is never trusted: damaged
bytes raise WeightsError, and the result of a chain of deltas must have the digest of its version.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.types import TensorInfo
from astraflow.weights.delta.kernels import choose_kernel
from astraflow.weights.delta.layout import (
    BLOCK,
    BLOCK_ELEMENTS,
    CHECKSUM,
    DENSE,
    END,
    GAP8,
    GAP16,
    HEADER,
    LENGTH,
    MAGIC,
    ElementSpan,
    checksum_of,
    spans_of,
    words_in,
)
from astraflow.weights.delta.planes import Counts, Kernel, positions_of
from astraflow.weights.manifest import (
    VersionDigest,
    span_bytes,
    tensors_in,
)
from astraflow.weights.threads import cancel_and_wait, shared_threads

__all__ = ["Delta", "apply_delta", "parse_delta"]


@dataclass(frozen=True, slots=True)
class _Block:
    """A block as stored in the stream. In the trailer, `offset` is the number of bytes of the version, and
    `num_elements` is the number of blocks."""

    offset: int
    """First byte of the block in the version."""
    num_elements: int
    counts: Counts
    width: int
    """Bytes of an element."""
    mode: int
    frames: tuple[memoryview, ...]
    """The planes, compressed."""

    @property
    def end(self) -> int:
        return self.offset + self.num_elements * self.width


@dataclass(frozen=True, slots=True)
class Delta:
    """A delta that is consistent with itself and with a tensor table. Its blocks are still encoded."""

    tensors: tuple[TensorInfo, ...]
    base_digest: str
    digest: str
    blocks: tuple[_Block, ...]

    @property
    def num_changed(self) -> int:
        """Number of elements that the delta writes (all elements of a dense block)."""
        return sum(block.counts.steps for block in self.blocks)

    def changed(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Yields the index of a tensor in the table, and the ascending flat positions of its elements that
        the delta writes. A large tensor is yielded in several pieces.

        Raises: WeightsError if the bytes are damaged.
        """
        starts = [tensor.offset for tensor in self.tensors]
        for block in self.blocks:
            places = block.offset + block.width * _positions(block)
            idx = bisect_right(starts, block.offset) - 1
            while idx < len(starts) and starts[idx] < block.end:
                end = starts[idx] + self.tensors[idx].num_bytes
                low, high = np.searchsorted(places, (starts[idx], end))
                if low < high:
                    yield idx, (places[low:high] - starts[idx]) // block.width
                idx += 1


class _Decompressors(threading.local):
    """A zstd context per thread, since threads must not share one."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor()


_decompressors = _Decompressors()


def parse_delta(data: bytes | bytearray | memoryview, tensors: Sequence[TensorInfo]) -> Delta:
    """The delta, whose blocks are views of `data`.

    Raises: WeightsError for anything that is not a delta between versions of this table.
    """
    view = memoryview(data)
    head = _take(view, 0, HEADER.size + CHECKSUM.size)
    magic, base_digest, digest, num_bytes = HEADER.unpack_from(head)
    if magic != MAGIC:
        raise WeightsError(f"a delta begins with {MAGIC!r}, not {bytes(magic)!r}")
    _check(head[HEADER.size :], "header", head[: HEADER.size])
    if num_bytes != span_bytes(tensors):
        raise WeightsError(
            f"the delta belongs to a version of {num_bytes} bytes, but the table has {span_bytes(tensors)}"
        )
    blocks: list[_Block] = []
    spans = spans_of(tensors)
    position = len(head)
    last_end = 0
    while True:
        block, position = _read_block(view, position)
        if block.mode == END:
            break
        _check_place(block, spans, last_end)
        blocks.append(block)
        last_end = block.end
    # The last block read is the trailer, which stores the number of blocks as `num_elements`.
    if block.num_elements != len(blocks) or position != view.nbytes:
        raise WeightsError(
            f"the delta ends after {len(blocks)} of {block.num_elements} blocks with "
            f"{view.nbytes - position} bytes left"
        )
    return Delta(tuple(tensors), base_digest.hex(), digest.hex(), tuple(blocks))


def _read_block(view: memoryview, position: int) -> tuple[_Block, int]:
    """The block or trailer at `position`, and the position after it."""
    head = _take(view, position, BLOCK.size)
    offset, num_elements, *numbers, width, mode, _, num_bytes = BLOCK.unpack_from(head)
    counts = Counts(*numbers)
    position += BLOCK.size
    checksum = _take(view, position, CHECKSUM.size)
    position += CHECKSUM.size
    payload = _take(view, position, num_bytes)
    _check(checksum, f"block at byte {offset} of the version", head, payload)
    # The planes of the gaps, one of small steps, one of byte steps, and one for each byte of an element.
    num_planes = {END: 0, GAP8: width + 3, GAP16: width + 4, DENSE: width + 2}.get(mode, -1)
    if num_planes < 0:
        raise WeightsError(f"a block has mode {mode}; this reader knows the modes 0 to 3")
    frames: list[memoryview] = []
    end = 0
    for _ in range(num_planes):
        (length,) = LENGTH.unpack(_take(payload, end, LENGTH.size))
        frames.append(_take(payload, end + LENGTH.size, length))
        end += LENGTH.size + length
    if end != payload.nbytes:
        raise WeightsError(f"a block's frames end at {end} of {payload.nbytes} bytes")
    return _Block(offset, num_elements, counts, width, mode, tuple(frames)), position + num_bytes


def _check_place(block: _Block, spans: Sequence[ElementSpan], last_end: int) -> None:
    """Raises: WeightsError unless the block lies within one span, after the previous block, and has possible
    counts, which bound the memory that it needs."""
    idx = bisect_right(spans, block.offset, key=lambda s: s.start) - 1
    # If no span begins this early, an empty span stands for it, into which no block fits.
    span = spans[idx] if idx >= 0 else ElementSpan(0, 0, 1)
    is_placed = (
        block.width == span.width
        and last_end <= block.offset
        and block.end <= span.end
        and (block.offset - span.start) % span.width == 0
    )
    steps, symbols, byte_steps, wide_steps = block.counts
    is_possible = 1 <= steps <= block.num_elements <= BLOCK_ELEMENTS and wide_steps <= byte_steps <= steps
    if block.mode == DENSE:
        is_possible = is_possible and symbols == 0 and steps == block.num_elements
    else:
        is_possible = is_possible and steps <= symbols <= block.num_elements
    if not is_placed or not is_possible:
        raise WeightsError(
            f"a block fits no tensor: {block.num_elements} elements of {block.width} bytes at byte "
            f"{block.offset}, with {block.counts}"
        )


def apply_delta(
    delta: Delta,
    buffer: NDArray[np.uint8],
    *,
    is_verified: bool = True,
    kernel: Kernel | None = None,
) -> None:
    """Turns the base in `buffer` into the new version in place, writing only changed elements.

    The caller must know that `buffer` holds the version with `delta.base_digest`. If `is_verified` is false,
    the digest of the result is not compared; only the last delta of a chain needs this comparison.

    Raises: WeightsError; `buffer` then holds neither version.
    """
    kernel = kernel or choose_kernel(buffer.nbytes)
    if buffer.nbytes != span_bytes(delta.tensors):
        raise WeightsError(f"the buffer has {buffer.nbytes} bytes, expected {span_bytes(delta.tensors)}")
    digest = VersionDigest(buffer)
    hashed = digest if is_verified else None
    waiting = [
        shared_threads().submit(_apply_block, kernel, buffer, block, delta.tensors, hashed)
        for block in delta.blocks
    ]
    if is_verified:  # threads also hash what no block covers
        waiting += [shared_threads().submit(digest.take, *gap) for gap in _gaps(delta)]
    try:
        for future in waiting:
            future.result()
    finally:
        cancel_and_wait(waiting)
    if is_verified and (found := digest.hexdigest()) != delta.digest:
        raise WeightsError(f"the patched tensors hash to {found}, expected {delta.digest}")


def _gaps(delta: Delta) -> Iterator[tuple[int, int]]:
    """Ranges of the version that no block covers, in pieces that several threads can share."""
    gap_start = 0
    end_of_version = span_bytes(delta.tensors)
    for block_start, block_end in (*((b.offset, b.end) for b in delta.blocks), (end_of_version, 0)):
        for low in range(gap_start, block_start, BLOCK_ELEMENTS):
            yield low, min(low + BLOCK_ELEMENTS, block_start)
        gap_start = block_end


def _apply_block(
    kernel: Kernel,
    buffer: NDArray[np.uint8],
    block: _Block,
    tensors: Sequence[TensorInfo],
    hashed: VersionDigest | None,
) -> None:
    """Adds the steps of a block to its elements, and hashes the result."""
    words = words_in(buffer, ElementSpan(block.offset, block.end, block.width))
    steps, symbols, byte_steps, wide_steps = block.counts
    num_gap_planes = 0 if block.mode == DENSE else block.mode  # sparse modes are the bytes of a gap symbol
    sizes = [symbols] * num_gap_planes + [-(-steps // 4), byte_steps] + [wide_steps] * block.width

    add = kernel.add_dense if block.mode == DENSE else kernel.add_sparse
    try:
        add(words, block.counts, [_decompress(f, n) for f, n in zip(block.frames, sizes, strict=True)])
    except WeightsError as err:
        raise WeightsError(f"{tensors_in(tensors, block.offset, block.end)}: {err}") from err
    if hashed is not None:
        hashed.take(block.offset, block.end)


def _positions(block: _Block) -> NDArray[np.int64]:
    """The ascending positions of the elements that the delta writes in a block."""
    if block.mode == DENSE:
        return np.arange(block.num_elements)
    gaps = [_decompress(frame, block.counts.symbols) for frame in block.frames[: block.mode]]
    return positions_of(gaps, block.counts.steps, block.num_elements)


def _decompress(frame: memoryview, num_bytes: int) -> NDArray[np.uint8]:
    """A plane of known size. A frame that declares another size is refused before memory is allocated."""
    if not num_bytes and not frame.nbytes:
        return np.zeros(0, np.uint8)
    try:
        if zstandard.frame_content_size(frame) != num_bytes:
            raise WeightsError(f"a plane does not hold {num_bytes} bytes")
        data = _decompressors.decompressor.decompress(
            frame, max_output_size=num_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as err:
        raise WeightsError(f"a plane of {num_bytes} bytes: {err}") from err
    if len(data) != num_bytes:
        raise WeightsError(f"a plane of {len(data)} bytes, expected {num_bytes}")
    return np.frombuffer(data, np.uint8)


def _take(view: memoryview, start: int, num_bytes: int) -> memoryview:
    if start + num_bytes > view.nbytes:
        raise WeightsError(
            f"the delta ends at byte {view.nbytes}, but {num_bytes} bytes are expected from byte {start} on"
        )
    return view[start : start + num_bytes]


def _check(checksum: memoryview, what: str, *parts: memoryview) -> None:
    if checksum_of(*parts) != bytes(checksum):
        raise WeightsError(f"{what}: its checksum is wrong; the delta is damaged")

"""Encoding `astraflow-delta-1`: the difference between two versions with the same tensor table.

    encode    base, new -> header, a block for each 4M elements that has changes, trailer
    parse     bytes -> blocks, each checked against its checksum and the table; no tensor is touched
    apply     blocks -> the changed elements of a buffer that holds the base, in place

docs/DELTA.md defines every byte. Lossless for every bit pattern. Memory beyond the two versions is a few
blocks. Blocks are coded by threads; their bytes do not depend on how many, nor on the kernel. What is read is
never trusted: damaged bytes give WeightsError, and what was applied must show its digest before it counts.
"""

import struct
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.types import TensorInfo
from astraflow.weights.codec.kernels import choose_kernel
from astraflow.weights.codec.planes import Counts, Kernel, Words, positions_of
from astraflow.weights.manifest import (
    ALIGNMENT,
    ITEM_BYTES,
    SEGMENT_BYTES,
    VersionDigest,
    cut,
    span_bytes,
    tensors_in,
)
from astraflow.weights.threads import NUM_THREADS, shared_threads

__all__ = ["BLOCK_ELEMENTS", "ENCODING", "Delta", "apply_delta", "encode_delta", "parse_delta"]

ENCODING = "astraflow-delta-1"

BLOCK_ELEMENTS = 1 << 22
"""Elements of a block, at most: large enough that headers and code tables cost nothing, small enough for many
threads and little memory."""

_MAGIC = b"AFDELTA1"
_HEADER = struct.Struct("<8s16s16sQ")
_BLOCK = struct.Struct("<QIIIIIBBHI")
_CHECKSUM = struct.Struct("<Q")
_LENGTH = struct.Struct("<I")
_END, _GAP8, _GAP16, _DENSE = 0, 1, 2, 3

_DENSE_FROM = 4
"""A block is dense if more than one in this many of its elements changed: there the steps of all elements
take about as many bytes as positions, and far less work."""
_GAP8_FROM = 400
"""Gaps are one byte if more than one in this many elements changed: there both codes take the same."""
_AHEAD = 2
"""Blocks that wait for their turn, beyond one a thread."""
_LEVEL = zstandard.ZstdCompressionParameters.from_level(1, min_match=7)
"""Higher levels gain under one percent. Planes look random: shorter matches are chance and cost bytes."""


class _Span(NamedTuple):
    """Elements of one width that lie next to each other; `start` and `end` in bytes."""

    start: int
    end: int
    width: int


@dataclass(frozen=True, slots=True)
class _Block:
    offset: int
    num_elements: int
    counts: Counts
    width: int
    mode: int
    frames: tuple[memoryview, ...]

    @property
    def end(self) -> int:
        return self.offset + self.num_elements * self.width


@dataclass(frozen=True, slots=True)
class Delta:
    """An encoded delta that agrees with itself and with a tensor table."""

    tensors: tuple[TensorInfo, ...]
    base_digest: str
    digest: str
    blocks: tuple[_Block, ...]

    @property
    def num_changed(self) -> int:
        """Elements that the delta touches (all of a dense block)."""
        return sum(block.counts.steps for block in self.blocks)

    def changed(self) -> Iterator[tuple[int, NDArray[np.int64]]]:
        """Index of a tensor in the table and flat positions of elements of it that the delta touches,
        ascending; a large tensor comes in pieces. Raises: WeightsError if the bytes are damaged."""
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


class _Coders(threading.local):
    """zstd contexts, which are not to be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor()


_coders = _Coders()


# --- encoding -------------------------------------------------------------------------------------


def encode_delta(
    base: NDArray[np.uint8],
    new: NDArray[np.uint8],
    tensors: Sequence[TensorInfo],
    *,
    base_digest: str,
    digest: str,
    kernel: Kernel | None = None,
    hashed: VersionDigest | None = None,
) -> Iterator[bytes]:
    """The delta's bytes piece by piece.

    `base` and `new` hold versions of the same table, padding and all; the digests are theirs. Who must still
    check that of `new` gives it as `hashed`: each block is hashed while the cache holds it.
    """
    kernel = kernel or choose_kernel(new.nbytes)
    header = _HEADER.pack(_MAGIC, bytes.fromhex(base_digest), bytes.fromhex(digest), span_bytes(tensors))
    yield header + _checksum(header)
    num_blocks = 0
    waiting: deque[Future[bytes]] = deque()
    try:
        for block in _cut(tensors):
            waiting.append(shared_threads().submit(_encode_block, kernel, base, new, block, hashed))
            if len(waiting) >= NUM_THREADS + _AHEAD:
                num_blocks += bool(waiting[0].result())
                yield waiting.popleft().result()
        for future in waiting:
            num_blocks += bool(future.result())
            yield future.result()
    finally:
        _give_up(waiting)
    trailer = _BLOCK.pack(span_bytes(tensors), num_blocks, 0, 0, 0, 0, 0, _END, 0, 0)
    yield trailer + _checksum(trailer)


def _encode_block(
    kernel: Kernel,
    base: NDArray[np.uint8],
    new: NDArray[np.uint8],
    block: _Span,
    hashed: VersionDigest | None,
) -> bytes:
    """Nothing if nothing changed."""
    old_words, new_words = _words(base, block), _words(new, block)
    found = _find(kernel, base, new, block, hashed)
    gaps: list[NDArray[np.uint8]] = []
    if found is None:
        mode, steps = _DENSE, kernel.all_steps(old_words, new_words)
    else:
        positions, steps = found
        if not positions.size:
            return b""
        mode = _GAP8 if positions.size * _GAP8_FROM > old_words.size else _GAP16
        gaps = kernel.gap_planes(positions, mode)
    planes = [*gaps, *kernel.step_planes(steps)]
    num_symbols = gaps[0].size if gaps else 0
    counts = Counts(steps.size, num_symbols, planes[len(gaps) + 1].size, planes[-1].size)
    frames = [_coders.compressor.compress(plane.data) if plane.size else b"" for plane in planes]
    payload = b"".join(part for frame in frames for part in (_LENGTH.pack(len(frame)), frame))
    head = _BLOCK.pack(block.start, old_words.size, *counts, block.width, mode, 0, len(payload))
    return head + _checksum(head, payload) + payload


def _find(
    kernel: Kernel,
    base: NDArray[np.uint8],
    new: NDArray[np.uint8],
    block: _Span,
    hashed: VersionDigest | None,
) -> tuple[NDArray[np.uint32], Words] | None:
    """As `Kernel.find` for a block: in parts that a core's own cache holds until they are hashed, too."""
    limit = max((block.end - block.start) // block.width // _DENSE_FROM, 1)
    places: list[NDArray[np.uint32]] = []
    steps: list[Words] = []
    for low, high in cut(block.end - block.start, SEGMENT_BYTES):
        part = _Span(block.start + low, block.start + high, block.width)
        found = kernel.find(_words(base, part), _words(new, part), limit)
        if hashed is not None:
            hashed.take(part.start, part.end)
        if found is not None:
            places.append(found[0] + np.uint32(low // block.width))
            steps.append(found[1])
            limit -= found[0].size
        if found is None or limit < 0:
            return None
    if hashed is not None:
        hashed.take(block.start, block.end)
    return np.concatenate(places), np.concatenate(steps)


# --- reading --------------------------------------------------------------------------------------


def parse_delta(data: bytes | bytearray | memoryview, tensors: Sequence[TensorInfo]) -> Delta:
    """The blocks, as views of `data`. Raises: WeightsError for anything that is not a delta of this table."""
    view = memoryview(data)
    head = _take(view, 0, _HEADER.size + _CHECKSUM.size)
    magic, base_digest, digest, num_bytes = _HEADER.unpack_from(head)
    if magic != _MAGIC:
        raise WeightsError(f"a delta begins with {_MAGIC!r}, not {bytes(magic)!r}")
    _check(head[_HEADER.size :], "header", head[: _HEADER.size])
    if num_bytes != span_bytes(tensors):
        raise WeightsError(
            f"the delta is of a version of {num_bytes} bytes, the table has {span_bytes(tensors)}"
        )
    blocks: list[_Block] = []
    spans, position, last_end = _spans(tensors), len(head), 0
    while True:
        block, position = _read_block(view, position)
        if block.mode == _END:
            break
        _check_place(block, spans, last_end)
        blocks.append(block)
        last_end = block.end
    if block.num_elements != len(blocks) or position != view.nbytes:
        raise WeightsError(
            f"the delta ends after {len(blocks)} of {block.num_elements} blocks with "
            f"{view.nbytes - position} bytes left"
        )
    return Delta(tuple(tensors), base_digest.hex(), digest.hex(), tuple(blocks))


def _read_block(view: memoryview, position: int) -> tuple[_Block, int]:
    head = _take(view, position, _BLOCK.size)
    offset, num_elements, *numbers, width, mode, _, num_bytes = _BLOCK.unpack_from(head)
    counts = Counts(*numbers)
    position += _BLOCK.size
    checksum = _take(view, position, _CHECKSUM.size)
    position += _CHECKSUM.size
    payload = _take(view, position, num_bytes)
    _check(checksum, f"block at byte {offset} of the version", head, payload)
    num_planes = {_END: 0, _GAP8: width + 3, _GAP16: width + 4, _DENSE: width + 2}.get(mode, -1)
    if num_planes < 0:
        raise WeightsError(f"a block of mode {mode}; this reader knows 0 to 3")
    frames: list[memoryview] = []
    end = 0
    for _ in range(num_planes):
        (length,) = _LENGTH.unpack(_take(payload, end, _LENGTH.size))
        frames.append(_take(payload, end + _LENGTH.size, length))
        end += _LENGTH.size + length
    if end != payload.nbytes:
        raise WeightsError(f"a block's frames end at {end} of {payload.nbytes} bytes")
    return _Block(offset, num_elements, counts, width, mode, tuple(frames)), position + num_bytes


def _check_place(block: _Block, spans: Sequence[_Span], last_end: int) -> None:
    """Raises: WeightsError unless the block lies within one span, after the block before, and its counts
    are possible: they bound the memory that it takes."""
    idx = bisect_right(spans, block.offset, key=lambda s: s.start) - 1
    span = spans[idx] if idx >= 0 else _Span(0, 0, 0)
    is_placed = (
        block.width == span.width
        and last_end <= block.offset
        and block.end <= span.end
        and (block.offset - span.start) % span.width == 0
    )
    steps, symbols, byte_steps, wide_steps = block.counts
    is_possible = 1 <= steps <= block.num_elements <= BLOCK_ELEMENTS and wide_steps <= byte_steps <= steps
    if block.mode == _DENSE:
        is_possible = is_possible and symbols == 0 and steps == block.num_elements
    else:
        is_possible = is_possible and steps <= symbols <= block.num_elements
    if not is_placed or not is_possible:
        raise WeightsError(f"a block that fits no tensor: {block.offset=} {block.width=} {block.counts=}")


# --- applying -------------------------------------------------------------------------------------


def apply_delta(
    delta: Delta,
    buffer: NDArray[np.uint8],
    *,
    is_verified: bool = True,
    kernel: Kernel | None = None,
) -> None:
    """Turns the base in `buffer` into the new version, in place; touches changed elements only.

    The caller knows that `buffer` holds the version of `delta.base_digest`. Without `is_verified` the digest
    is not compared: for all but the last delta of a chain.

    Raises: WeightsError; `buffer` is then neither version.
    """
    kernel = kernel or choose_kernel(buffer.nbytes)
    if buffer.nbytes != span_bytes(delta.tensors):
        raise WeightsError(f"a buffer of {buffer.nbytes} bytes, not {span_bytes(delta.tensors)}")
    digest = VersionDigest(buffer)
    hashed = digest if is_verified else None
    waiting = [
        shared_threads().submit(_apply_block, kernel, buffer, block, delta.tensors, hashed)
        for block in delta.blocks
    ]
    if is_verified:
        waiting += [shared_threads().submit(digest.take, *gap) for gap in _gaps(delta)]
    try:
        for future in waiting:
            future.result()
    finally:
        _give_up(waiting)
    if is_verified and (found := digest.hexdigest()) != delta.digest:
        raise WeightsError(f"the patched tensors hash to {found}, expected {delta.digest}")


def _gaps(delta: Delta) -> Iterator[tuple[int, int]]:
    """Ranges of the version without a block, cut as blocks are."""
    end = 0
    for start, following in (*((b.offset, b.end) for b in delta.blocks), (span_bytes(delta.tensors), 0)):
        for low in range(end, start, BLOCK_ELEMENTS):
            yield low, min(low + BLOCK_ELEMENTS, start)
        end = following


def _apply_block(
    kernel: Kernel,
    buffer: NDArray[np.uint8],
    block: _Block,
    tensors: Sequence[TensorInfo],
    hashed: VersionDigest | None,
) -> None:
    words = _words(buffer, _Span(block.offset, block.end, block.width))
    steps, symbols, byte_steps, wide_steps = block.counts
    num_gap_planes = 0 if block.mode == _DENSE else block.mode
    sizes = [symbols] * num_gap_planes + [-(-steps // 4), byte_steps] + [wide_steps] * block.width

    add = kernel.add_dense if block.mode == _DENSE else kernel.add_sparse
    try:
        add(words, block.counts, [_decompressed(f, n) for f, n in zip(block.frames, sizes, strict=True)])
    except WeightsError as err:
        raise WeightsError(f"{tensors_in(tensors, block.offset, block.end)}: {err}") from err
    if hashed is not None:
        hashed.take(block.offset, block.end)


def _positions(block: _Block) -> NDArray[np.int64]:
    if block.mode == _DENSE:
        return np.arange(block.num_elements)
    gaps = [_decompressed(frame, block.counts.symbols) for frame in block.frames[: block.mode]]
    return positions_of(gaps, block.counts.steps, block.num_elements)


def _decompressed(frame: memoryview, num_bytes: int) -> NDArray[np.uint8]:
    """A plane of known size: a frame that says otherwise is refused before memory is taken for it."""
    if not num_bytes and not frame.nbytes:
        return np.zeros(0, np.uint8)
    try:
        if zstandard.frame_content_size(frame) != num_bytes:
            raise WeightsError(f"a plane does not hold {num_bytes} bytes")
        data = _coders.decompressor.decompress(frame, max_output_size=num_bytes, allow_extra_data=False)
    except zstandard.ZstdError as err:
        raise WeightsError(f"a plane of {num_bytes} bytes: {err}") from err
    if len(data) != num_bytes:
        raise WeightsError(f"a plane of {len(data)} bytes, expected {num_bytes}")
    return np.frombuffer(data, np.uint8)


# --- both -----------------------------------------------------------------------------------------


def _give_up(waiting: Collection[Future[Any]]) -> None:
    """Nothing of this work runs any more when it returns."""
    for future in waiting:
        future.cancel()
    wait(waiting)


def _spans(tensors: Sequence[TensorInfo]) -> list[_Span]:
    """Neighbours of one element width as one span: small tensors cost no block of their own."""
    spans: list[_Span] = []
    for tensor in tensors:
        if not tensor.num_bytes:
            continue
        width, end = ITEM_BYTES[tensor.dtype], tensor.offset + tensor.num_bytes
        last = spans[-1] if spans else None
        if (
            last is not None
            and last.width == width
            and tensor.offset - last.end < ALIGNMENT
            and (tensor.offset - last.start) % width == 0
        ):
            spans[-1] = _Span(last.start, end, width)
        else:
            spans.append(_Span(tensor.offset, end, width))
    return spans


def _cut(tensors: Sequence[TensorInfo]) -> Iterator[_Span]:
    for span in _spans(tensors):
        step = BLOCK_ELEMENTS * span.width
        for start in range(span.start, span.end, step):
            yield _Span(start, min(start + step, span.end), span.width)


def _words(buffer: NDArray[np.uint8], span: _Span) -> Words:
    part = buffer[span.start : span.end]
    return part.view("<u2") if span.width == 2 else part.view("<u4")


def _take(view: memoryview, start: int, num_bytes: int) -> memoryview:
    if start + num_bytes > view.nbytes:
        raise WeightsError(f"the delta ends at byte {view.nbytes}, within {num_bytes} bytes from {start}")
    return view[start : start + num_bytes]


def _checksum(*parts: bytes | memoryview) -> bytes:
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return _CHECKSUM.pack(checksum.intdigest())


def _check(checksum: memoryview, what: str, *parts: memoryview) -> None:
    if _checksum(*parts) != bytes(checksum):
        raise WeightsError(f"{what}: its checksum is wrong; the delta is damaged")

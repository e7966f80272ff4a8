"""Writes encoding `astraflow-delta-1`: base, new -> header, one block per 4M elements, trailer.

Several processes can encode blocks of the same delta; the header and the trailer join them. Blocks without
changes are omitted. Several threads encode blocks, and the bytes depend neither on their number nor on the
kernel. Apart from the two versions, only a few blocks are in memory at a time.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from astraflow.types import TensorInfo
from astraflow.weights.delta.kernels import choose_kernel
from astraflow.weights.delta.layout import (
    BLOCK,
    CHECKSUM,
    DENSE,
    END,
    GAP8,
    GAP16,
    HEADER,
    LENGTH,
    MAGIC,
    ElementSpan,
    blocks_of,
    checksum_of,
    words_in,
)
from astraflow.weights.delta.planes import Counts, Kernel, Words
from astraflow.weights.manifest import SEGMENT_BYTES, VersionBytes, VersionDigest, cut, span_bytes
from astraflow.weights.threads import NUM_THREADS, cancel_and_wait, shared_threads

__all__ = ["HEADER_BYTES", "encode_blocks", "encode_header", "encode_trailer"]

HEADER_BYTES = HEADER.size + CHECKSUM.size

_DENSE_FROM = 4
"""A block is dense if more than one in this many of its elements changed. The steps of all elements then take
about as many bytes as the changed steps with their positions, and far less work."""
_GAP8_FROM = 400
"""Gaps are one byte wide if more than one in this many elements changed. At exactly this share, both widths
take the same space."""
_AHEAD = 2
"""Number of queued blocks, beyond one per thread."""
_ZSTD = zstandard.ZstdCompressionParameters.from_level(1, min_match=7)
"""Higher levels save less than one percent. Planes look random, so matches shorter than 7 bytes are
coincidences that cost more than they save."""


class _Compressors(threading.local):
    """A zstd context per thread, since threads must not share one."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)


_compressors = _Compressors()


def encode_header(tensors: Sequence[TensorInfo], *, base_digest: str, digest: str) -> bytes:
    """The first `HEADER_BYTES` of a delta."""
    header = HEADER.pack(MAGIC, bytes.fromhex(base_digest), bytes.fromhex(digest), span_bytes(tensors))
    return header + checksum_of(header)


def encode_trailer(tensors: Sequence[TensorInfo], num_blocks: int) -> bytes:
    """The end of a delta of `num_blocks` blocks."""
    trailer = BLOCK.pack(span_bytes(tensors), num_blocks, 0, 0, 0, 0, 0, END, 0, 0)
    return trailer + checksum_of(trailer)


def encode_blocks(
    base: VersionBytes,
    new: VersionBytes,
    tensors: Sequence[TensorInfo],
    *,
    kernel: Kernel | None = None,
    hashed: VersionDigest | None = None,
    is_advancing: bool = False,
    within: tuple[int, int] | None = None,
) -> Iterator[bytes]:
    """The blocks of a delta, one after the other.

    `hashed` is the digest of `new`; each part is hashed while it is in the CPU cache. With `is_advancing`,
    the new elements overwrite the base, whose slices must be views; unless the iterator is exhausted, `base`
    then holds neither version. `within`: only blocks that begin in this `[start, end)` are encoded.
    """
    kernel = kernel or choose_kernel(new.nbytes)
    coder = _BlockEncoder(kernel, base, new, hashed, is_advancing)
    first, end = within or (0, new.nbytes)
    blocks = [block for block in blocks_of(tensors) if first <= block.start < end]
    for encoded in _in_order(coder, blocks):
        if encoded:  # a block without changes has no bytes
            yield encoded


def _in_order(coder: "_BlockEncoder", blocks: Sequence[ElementSpan]) -> Iterator[bytes]:
    """The bytes of each block in order, encoded by several threads."""
    waiting: deque[Future[bytes]] = deque()
    try:
        for block in blocks:
            waiting.append(shared_threads().submit(coder.encode, block))
            if len(waiting) >= NUM_THREADS + _AHEAD:
                encoded = waiting[0].result()
                waiting.popleft()
                yield encoded
        for future in waiting:
            yield future.result()
    finally:
        cancel_and_wait(waiting)


@dataclass(frozen=True, slots=True)
class _BlockEncoder:
    """Encodes the blocks of one delta, in any order and from several threads at once."""

    kernel: Kernel
    base: VersionBytes
    new: VersionBytes
    hashed: VersionDigest | None
    is_advancing: bool

    def encode(self, block: ElementSpan) -> bytes:
        """The bytes of a block; empty if nothing changed."""
        num_elements = (block.end - block.start) // block.width
        gaps: list[NDArray[np.uint8]] = []
        mode, positions, steps = self._find(block, num_elements)
        if mode != DENSE:
            if not positions.size:
                return b""
            mode = GAP8 if positions.size * _GAP8_FROM > num_elements else GAP16
            gaps = self.kernel.gap_planes(positions, mode)  # the mode is also the width of a symbol
        planes = [*gaps, *self.kernel.step_planes(steps)]
        num_symbols = gaps[0].size if gaps else 0
        # After the gaps come the small steps, then the byte steps, and the wide steps come last.
        counts = Counts(steps.size, num_symbols, planes[len(gaps) + 1].size, planes[-1].size)
        frames = [_compressors.compressor.compress(plane.data) if plane.size else b"" for plane in planes]
        payload = b"".join(part for frame in frames for part in (LENGTH.pack(len(frame)), frame))
        head = BLOCK.pack(block.start, num_elements, *counts, block.width, mode, 0, len(payload))
        return head + checksum_of(head, payload) + payload

    def _find(self, block: ElementSpan, num_elements: int) -> tuple[int, NDArray[np.uint32], Words]:
        """Mode, positions and steps. A dense block has the steps of all elements and no positions.

        The block is searched in parts of one hash segment, so that a part is still in the core's own cache
        when it is written into the base and hashed. The search assumes that the block is sparse. When the
        changes exceed what a sparse block may hold, it converts the steps found so far and continues densely,
        so only one part is searched twice. The caller chooses between the two sparse modes.
        """
        limit = max(num_elements // _DENSE_FROM, 1)  # changes that a sparse block can still take
        sparse: list[tuple[NDArray[np.uint32], Words]] = []
        dense: Words | None = None
        for low, high in cut(block.end - block.start, SEGMENT_BYTES):
            part = ElementSpan(block.start + low, block.start + high, block.width)
            old = words_in(self.base, part)
            new = words_in(self.new, part)
            first = low // block.width
            found = self.kernel.find(old, new, limit) if dense is None else None
            if found is not None:
                limit -= found[0].size
                sparse.append((found[0] + np.uint32(first), found[1]))
            else:  # too many changes: this part and all later ones are dense
                dense = _to_dense(sparse, num_elements, old.dtype) if dense is None else dense
                dense[first : first + old.size] = self.kernel.all_steps(old, new)
            # `old` is a view of the base. Steps are computed by now, so it may be overwritten.
            if self.is_advancing and found is not None:
                self.kernel.copy_at(old, new, found[0])
            elif self.is_advancing:
                old[:] = new
            if self.hashed is not None:
                self.hashed.take(part.start, part.end)
        if self.hashed is not None:
            self.hashed.take(block.start, block.end)  # segments that straddle two parts
        if dense is not None:
            return DENSE, np.zeros(0, np.uint32), dense
        positions, steps = zip(*sparse, strict=True)
        return GAP16, np.concatenate(positions), np.concatenate(steps)


def _to_dense(sparse: Sequence[tuple[NDArray[np.uint32], Words]], size: int, dtype: np.dtype[Any]) -> Words:
    """The steps of all elements, filled with those found before the block turned out to be dense."""
    steps = np.zeros(size, dtype)
    for positions, some in sparse:
        steps[positions] = some + dtype.type(1)  # sparse steps are zig-zag numbers minus one
    return steps

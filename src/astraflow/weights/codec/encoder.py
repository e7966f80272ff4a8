"""Writing encoding `astraflow-delta-1`: base, new -> header, a block for each 4M elements, trailer.

A block without changes is left out. Blocks are coded by threads; their bytes do not depend on how many, nor
on the kernel. Memory beyond the two versions is a few blocks.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np
import zstandard
from numpy.typing import NDArray

from astraflow.types import TensorInfo
from astraflow.weights.codec.kernels import choose_kernel
from astraflow.weights.codec.layout import (
    BLOCK,
    BLOCK_ELEMENTS,
    DENSE,
    END,
    GAP8,
    GAP16,
    HEADER,
    LENGTH,
    MAGIC,
    Span,
    checksum_of,
    spans_of,
    words_in,
)
from astraflow.weights.codec.planes import Counts, Kernel, Words
from astraflow.weights.manifest import SEGMENT_BYTES, VersionDigest, cut, span_bytes
from astraflow.weights.threads import NUM_THREADS, give_up, shared_threads

__all__ = ["encode_delta"]

_DENSE_FROM = 4
"""A block is dense if more than one in this many of its elements changed: there the steps of all elements
take about as many bytes as positions, and far less work."""
_GAP8_FROM = 400
"""Gaps are one byte if more than one in this many elements changed: there both codes take the same."""
_AHEAD = 2
"""Blocks that wait for their turn, beyond one a thread."""
_LEVEL = zstandard.ZstdCompressionParameters.from_level(1, min_match=7)
"""Higher levels gain under one percent. Planes look random: shorter matches are chance and cost bytes."""


class _Coders(threading.local):
    """A zstd context, which is not to be shared between threads."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_LEVEL)


_coders = _Coders()


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
    header = HEADER.pack(MAGIC, bytes.fromhex(base_digest), bytes.fromhex(digest), span_bytes(tensors))
    yield header + checksum_of(header)
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
        give_up(waiting)
    trailer = BLOCK.pack(span_bytes(tensors), num_blocks, 0, 0, 0, 0, 0, END, 0, 0)
    yield trailer + checksum_of(trailer)


def _encode_block(
    kernel: Kernel,
    base: NDArray[np.uint8],
    new: NDArray[np.uint8],
    block: Span,
    hashed: VersionDigest | None,
) -> bytes:
    """Nothing if nothing changed."""
    old_words, new_words = words_in(base, block), words_in(new, block)
    found = _find(kernel, base, new, block, hashed)
    if hashed is not None:
        hashed.take(block.start, block.end)  # what parts did not cover
    gaps: list[NDArray[np.uint8]] = []
    if found is None:
        mode, steps = DENSE, kernel.all_steps(old_words, new_words)
    else:
        positions, steps = found
        if not positions.size:
            return b""
        mode = GAP8 if positions.size * _GAP8_FROM > old_words.size else GAP16
        gaps = kernel.gap_planes(positions, mode)
    planes = [*gaps, *kernel.step_planes(steps)]
    num_symbols = gaps[0].size if gaps else 0
    counts = Counts(steps.size, num_symbols, planes[len(gaps) + 1].size, planes[-1].size)
    frames = [_coders.compressor.compress(plane.data) if plane.size else b"" for plane in planes]
    payload = b"".join(part for frame in frames for part in (LENGTH.pack(len(frame)), frame))
    head = BLOCK.pack(block.start, old_words.size, *counts, block.width, mode, 0, len(payload))
    return head + checksum_of(head, payload) + payload


def _find(
    kernel: Kernel,
    base: NDArray[np.uint8],
    new: NDArray[np.uint8],
    block: Span,
    hashed: VersionDigest | None,
) -> tuple[NDArray[np.uint32], Words] | None:
    """As `Kernel.find` for a block: in parts that a core's own cache holds until they are hashed, too."""
    limit = max((block.end - block.start) // block.width // _DENSE_FROM, 1)
    places: list[NDArray[np.uint32]] = []
    steps: list[Words] = []
    for low, high in cut(block.end - block.start, SEGMENT_BYTES):
        part = Span(block.start + low, block.start + high, block.width)
        found = kernel.find(words_in(base, part), words_in(new, part), limit)
        if hashed is not None:
            hashed.take(part.start, part.end)
        if found is None:
            return None
        places.append(found[0] + np.uint32(low // block.width))
        steps.append(found[1])
        limit -= found[0].size
    return np.concatenate(places), np.concatenate(steps)


def _cut(tensors: Sequence[TensorInfo]) -> Iterator[Span]:
    for span in spans_of(tensors):
        step = BLOCK_ELEMENTS * span.width
        for start in range(span.start, span.end, step):
            yield Span(start, min(start + step, span.end), span.width)

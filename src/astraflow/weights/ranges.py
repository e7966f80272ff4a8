"""Divides the bytes of a version into ranges, so that each rank of a trainer writes one of them.

    rank k    takes its range of the new version, and a copy of its range of the previous one
              -> files with blocks of a delta and bytes of a full version; hashes of its segments
    rank 0    joins the blocks in rank order into the delta, and the hashes into the digest

Ranges begin and end at block boundaries of a delta, so the joined bytes are the same for any number of ranks.
A rank needs only its own range of both versions. Of the new version it also needs the bytes up to the end of
the segment in which its range ends, because it hashes that segment. A single process has one range, the whole
version.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import WeightsError
from astraflow.types import TensorInfo
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.delta.encoder import HEADER_BYTES, encode_blocks
from astraflow.weights.delta.layout import blocks_of
from astraflow.weights.manifest import (
    SEGMENT_BYTES,
    TensorBytes,
    VersionDigest,
    cut,
    elements_in,
    span_bytes,
    table_of,
)
from astraflow.weights.threads import cancel_and_wait, shared_threads

__all__ = [
    "ByteRange",
    "RangeJob",
    "RangeWriter",
    "VersionWriter",
    "WrittenRange",
    "elements_of_rank",
    "part_path",
    "range_of",
    "write_at",
]

_PART_BYTES = 32 * SEGMENT_BYTES
"""Bytes that a thread writes before it takes the next part: a chunk of the default size, because only one
thread at a time can write to a file."""


class ByteRange(NamedTuple):
    """The bytes `[start, end)` of a version that a rank writes. The rank holds those up to `held_end`."""

    start: int
    end: int
    held_end: int


def range_of(table: Sequence[TensorInfo], rank: int, world: int) -> ByteRange:
    """The range of a rank: about one `world`-th of the version. Some ranges are empty if blocks are few."""
    num_bytes = span_bytes(table)
    starts = [block.start for block in blocks_of(table)]
    bounds = [*starts[1:], num_bytes]

    def bound(number: int) -> int:
        """Start of the range of rank `number`, at least 1: the block boundary nearest to an equal share."""
        return min(bounds, key=lambda place: abs(place * world - number * num_bytes))

    start = bound(rank) if rank else 0
    end = bound(rank + 1) if rank + 1 < world else num_bytes
    last_segment = -(-end // SEGMENT_BYTES) * SEGMENT_BYTES
    return ByteRange(start, end, min(last_segment, num_bytes) if end > start else end)


def elements_of_rank(table: Sequence[TensorInfo], rank: int, world: int) -> dict[str, tuple[int, int]]:
    """Name of each tensor -> the `[first, last)` of its elements that a rank must hold; (0, 0) for none."""
    own = range_of(table, rank, world)
    return {info.name: elements_in(info, own.start, own.held_end) for info in table}


@dataclass(frozen=True, slots=True)
class RangeJob:
    """A version to write."""

    policy: str
    version: int
    path: str
    """An existing file. It receives all bytes of a full version, each at its offset. For a delta, it receives
    only rank 0's blocks, after the header; each other rank writes its own file (`part_path`)."""
    chunk_bytes: int = 0
    """If positive, `path` is a folder for a full version, and its files `0`, `1`, ... are the chunks."""


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """What a rank has written."""

    num_bytes: int
    """Bytes of the range, or of its blocks."""
    num_blocks: int
    """Number of blocks of a delta; 0 for a full version."""
    hashes: str
    """Concatenated hexadecimal hashes of the segments that begin in the range."""


class VersionWriter(Protocol):
    """Writes all ranges of a version. Methods block, and serve one caller at a time. `tensors` are rank
    0's."""

    def write_delta(self, job: RangeJob, tensors: Sequence[HostTensor], base: int) -> list[WrittenRange]:
        """Writes the difference from version `base`, which the writer keeps a copy of. Returns one entry per
        rank.

        The copy is updated to the new version. Once a delta is as large as the full version, further blocks
        are not written, because the caller then discards the delta.

        Raises: WeightsError if the tensors do not match the range, or there is no copy of the base.
        """
        ...

    def write_full(
        self, job: RangeJob, tensors: Sequence[HostTensor], *, is_copied: bool
    ) -> list[WrittenRange]:
        """Writes all bytes, and copies them if deltas are wanted. Returns one entry per rank.

        `is_copied`: `write_delta` has just copied them. Raises: like `write_delta`.
        """
        ...

    def end(self) -> None:
        """Called when the version is published, so its tensors are no longer needed."""


@dataclass(frozen=True, slots=True)
class _RangeCopy:
    """A copy of a range of the version that was written last. Indices are positions in that version."""

    version: int
    nbytes: int
    """Bytes of the whole version."""
    start: int
    data: NDArray[np.uint8]

    def __getitem__(self, index: slice, /) -> NDArray[np.uint8]:
        start, end, _ = index.indices(self.nbytes)
        assert self.start <= start <= end <= self.start + self.data.nbytes, "bytes that are not here"
        return self.data[start - self.start : end - self.start]


class RangeWriter:
    """Writes the range of one rank. In a single-process trainer it implements `VersionWriter`.

    With `delta`, it keeps a copy of its range of each policy's newest version.

    Example: `RangeWriter(delta=True).write_full(RangeJob("actor", 0, "0.tmp"), tensors, is_copied=False)`.
    """

    def __init__(self, *, delta: bool, rank: int = 0, world: int = 1) -> None:
        self._delta = delta
        self._rank = rank
        self._world = world
        self._copies: dict[str, _RangeCopy] = {}

    def write_delta(self, job: RangeJob, tensors: Sequence[HostTensor], base: int) -> list[WrittenRange]:
        """Like `VersionWriter.write_delta`, for this rank's range only."""
        table, own, new = self._table_and_range(tensors)
        copy = self._copies.pop(job.policy, None)  # after a failure below, it would hold neither version
        if copy is None or copy.version != base or copy.nbytes != new.nbytes:
            raise WeightsError(f"{job.policy!r} version {base}, the base of a delta, is not here")
        hashed = VersionDigest(new)
        num_bytes = num_blocks = 0
        path = part_path(job.path, self._rank)
        first = 0 if self._rank else HEADER_BYTES
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            within = (own.start, own.end)
            for block in encode_blocks(copy, new, table, hashed=hashed, is_advancing=True, within=within):
                # The comparison must run to the end, because it updates the copy.
                if num_bytes < new.nbytes:
                    write_at(fd, first + num_bytes, block)
                num_bytes += len(block)
                num_blocks += 1
        finally:
            os.close(fd)
        self._copies[job.policy] = _RangeCopy(job.version, copy.nbytes, copy.start, copy.data)
        return [WrittenRange(num_bytes, num_blocks, _hashes(hashed, own))]

    def write_full(
        self, job: RangeJob, tensors: Sequence[HostTensor], *, is_copied: bool
    ) -> list[WrittenRange]:
        """Like `VersionWriter.write_full`, for this rank's range only."""
        _, own, source = self._table_and_range(tensors)
        copy = self._copies.pop(job.policy, None)
        target: NDArray[np.uint8] | None = None
        if self._delta and not is_copied:
            is_fit = copy is not None and copy.data.nbytes == own.end - own.start
            target = copy.data if copy is not None and is_fit else np.zeros(own.end - own.start, np.uint8)
            copy = _RangeCopy(job.version, source.nbytes, own.start, target)
        hashes = _write_range(job, source, own, target)
        if copy is not None:
            self._copies[job.policy] = copy
        return [WrittenRange(own.end - own.start, 0, hashes)]

    def end(self) -> None:
        """Does nothing."""

    def _table_and_range(
        self, tensors: Sequence[HostTensor]
    ) -> tuple[tuple[TensorInfo, ...], ByteRange, TensorBytes]:
        """The table of a version, the range of this rank, and the bytes of that range."""
        table = table_of((tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)
        own = range_of(table, self._rank, self._world)
        return table, own, TensorBytes(table, tensors, span=(own.start, own.held_end))


def part_path(path: str, rank: int) -> str:
    """The file with a rank's blocks of a delta."""
    return f"{path}.{rank}" if rank else path


def write_at(fd: int, offset: int, data: bytes | memoryview) -> None:
    """Writes all of the data at an offset of a file."""
    view = memoryview(data)
    while view.nbytes:
        num_bytes = os.pwrite(fd, view, offset)
        view = view[num_bytes:]
        offset = offset + num_bytes


def _write_range(job: RangeJob, source: TensorBytes, own: ByteRange, target: NDArray[np.uint8] | None) -> str:
    """Writes a range into its chunks with several threads, and into `target` if given. Returns the hashes."""
    hashed = VersionDigest(source)

    def write_part(start: int, end: int) -> None:
        number = start // job.chunk_bytes if job.chunk_bytes else 0
        path = f"{job.path}/{number}" if job.chunk_bytes else job.path
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            for low, high in cut(end - start, SEGMENT_BYTES):
                segment = source[start + low : start + high]
                write_at(fd, start + low - number * job.chunk_bytes, segment.data)
                if target is not None:
                    target[start + low - own.start : start + high - own.start] = segment
                hashed.take(start + low, start + high)
        finally:
            os.close(fd)
        hashed.take(start, end)  # segments that straddle two pieces, if the range begins within a segment

    step = math.gcd(_PART_BYTES, job.chunk_bytes)  # a part lies in one chunk
    starts = range(own.start // step * step, own.end, step) if own.end > own.start else ()
    parts = [(max(start, own.start), min(start + step, own.end)) for start in starts]
    writing = [shared_threads().submit(write_part, *part) for part in parts]
    try:
        for future in writing:
            future.result()
    finally:
        cancel_and_wait(writing)
    return _hashes(hashed, own)


def _hashes(hashed: VersionDigest, own: ByteRange) -> str:
    """Hashes of the segments that begin in a range."""
    return hashed.hashes(-(-own.start // SEGMENT_BYTES), -(-own.end // SEGMENT_BYTES)).hex()

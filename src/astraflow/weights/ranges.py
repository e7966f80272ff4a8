"""Who writes which bytes of a version: the ranks of a trainer share them, each a range.

    rank k    its range of the new version, and a copy of its range of the one before
              -> the blocks of a delta and the bytes of a full version, in files; the hashes of its segments
    rank 0    joins: the blocks in the order of ranks make the delta, the hashes the digest

Ranges begin and end where blocks of a delta do. So what is joined has the same bytes for any number of ranks,
and no rank needs more than its range of both versions; of the new one up to the end of the segment in which
the range ends, because it hashes that segment. A trainer of one process has one range, the whole version.
"""

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
from astraflow.weights.threads import give_up, shared_threads

__all__ = [
    "ByteRange",
    "RangeJob",
    "RangeWriter",
    "WritesRanges",
    "Written",
    "elements_of_rank",
    "part_path",
    "range_of",
    "write_at",
]

_PART_BYTES = 16 * SEGMENT_BYTES
"""Bytes that a thread writes before it takes the next part."""


class ByteRange(NamedTuple):
    """The bytes `[start, end)` of a version that a rank writes; it holds those up to `held_end`."""

    start: int
    end: int
    held_end: int


def range_of(table: Sequence[TensorInfo], rank: int, world: int) -> ByteRange:
    """The range of a rank: about its share of the version. Some are empty if there are few blocks."""
    num_bytes = span_bytes(table)
    starts = [block.start for block in blocks_of(table)]
    bounds = [*starts[1:], num_bytes]

    def bound(number: int) -> int:
        """Where the range of a rank other than 0 begins."""
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
    """A version that is to be written."""

    policy: str
    version: int
    path: str
    """An existing file, which gets the bytes of a full version at their places. Of a delta it gets rank 0's
    blocks, behind the header; those of the other ranks are in files of their own beside it (`part_path`)."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank has written."""

    num_bytes: int
    """Bytes of its range, or of its blocks."""
    num_blocks: int
    """Blocks of a delta; 0 for a full version."""
    hashes: str
    """Hexadecimal hashes of the segments that begin in its range, joined."""


class WritesRanges(Protocol):
    """Writes all ranges of a version. Methods block; one caller at a time. `tensors` are those of rank 0."""

    def write_delta(self, job: RangeJob, tensors: Sequence[HostTensor], base: int) -> list[Written]:
        """Writes the difference to version `base`, of which this has a copy, by rank. The copy becomes one of
        the new version. Blocks beyond the size of a full version are not written.

        Raises: WeightsError if the tensors are not those of the range, or there is no copy of the base.
        """
        ...

    def write_full(self, job: RangeJob, tensors: Sequence[HostTensor], *, is_copied: bool) -> list[Written]:
        """Writes all bytes, by rank, and copies them if deltas are wanted. `is_copied`: `write_delta` has
        just copied them. Raises: as `write_delta`."""
        ...

    def end(self) -> None:
        """The version is published: its tensors are not needed any more."""
        ...


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy of a range of the version that was written last, as bytes of that version."""

    version: int
    nbytes: int
    """Of the whole version."""
    start: int
    data: NDArray[np.uint8]

    def __getitem__(self, index: slice, /) -> NDArray[np.uint8]:
        start, end, _ = index.indices(self.nbytes)
        assert self.start <= start <= end <= self.start + self.data.nbytes, "bytes that are not here"
        return self.data[start - self.start : end - self.start]


class RangeWriter:
    """Writes the range of one rank. Implements `WritesRanges` for a trainer of one process.

    With `delta` it keeps a copy of its range of each policy's newest version.

    Example: `RangeWriter(delta=True).write_full(RangeJob("actor", 0, "0.tmp"), tensors, is_copied=False)`.
    """

    def __init__(self, *, delta: bool, rank: int = 0, world: int = 1) -> None:
        self._delta = delta
        self._rank = rank
        self._world = world
        self._copies: dict[str, _Copy] = {}

    def write_delta(self, job: RangeJob, tensors: Sequence[HostTensor], base: int) -> list[Written]:
        """This rank's range alone, as `WritesRanges.write_delta`."""
        table, own, new = self._looked_at(tensors)
        copy = self._copies.pop(job.policy, None)  # neither version, if anything fails from here on
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
                # The comparison goes on in any case, since it updates the copy.
                if num_bytes < new.nbytes:
                    write_at(fd, first + num_bytes, block)
                num_bytes += len(block)
                num_blocks += 1
        finally:
            os.close(fd)
        self._copies[job.policy] = _Copy(job.version, copy.nbytes, copy.start, copy.data)
        return [Written(num_bytes, num_blocks, _hashes(hashed, own))]

    def write_full(self, job: RangeJob, tensors: Sequence[HostTensor], *, is_copied: bool) -> list[Written]:
        """This rank's range alone, as `WritesRanges.write_full`."""
        _, own, source = self._looked_at(tensors)
        copy = self._copies.pop(job.policy, None)
        target: NDArray[np.uint8] | None = None
        if self._delta and not is_copied:
            is_fit = copy is not None and copy.data.nbytes == own.end - own.start
            target = copy.data if copy is not None and is_fit else np.zeros(own.end - own.start, np.uint8)
            copy = _Copy(job.version, source.nbytes, own.start, target)
        fd = os.open(job.path, os.O_WRONLY)
        try:
            hashes = _write_range(fd, source, own, target)
        finally:
            os.close(fd)
        if copy is not None:
            self._copies[job.policy] = copy
        return [Written(own.end - own.start, 0, hashes)]

    def end(self) -> None:
        """Nothing is left to do."""

    def _looked_at(
        self, tensors: Sequence[HostTensor]
    ) -> tuple[tuple[TensorInfo, ...], ByteRange, TensorBytes]:
        """The table of a version, the range of this rank, and the bytes of it."""
        table = table_of((tensor.name, tensor.shape, tensor.dtype) for tensor in tensors)
        own = range_of(table, self._rank, self._world)
        return table, own, TensorBytes(table, tensors, span=(own.start, own.held_end))


def part_path(path: str, rank: int) -> str:
    """The file with a rank's blocks of a delta."""
    return f"{path}.{rank}" if rank else path


def write_at(fd: int, offset: int, data: bytes | memoryview) -> None:
    """Writes all of the data at a place in a file."""
    view = memoryview(data)
    while view.nbytes:
        num_bytes = os.pwrite(fd, view, offset)
        view = view[num_bytes:]
        offset = offset + num_bytes


def _write_range(fd: int, source: TensorBytes, own: ByteRange, target: NDArray[np.uint8] | None) -> str:
    """Writes a range at its place with a few threads, also into `target` if there is one. Returns: the
    hashes."""
    hashed = VersionDigest(source)

    def write_part(start: int, end: int) -> None:
        for low, high in cut(end - start, SEGMENT_BYTES):
            segment = source[start + low : start + high]
            write_at(fd, start + low, segment.data)
            if target is not None:
                target[start + low - own.start : start + high - own.start] = segment
            hashed.take(start + low, start + high)
        hashed.take(start, end)  # segments that lie in two of these pieces, where a range begins within one

    parts = cut(own.end - own.start, _PART_BYTES)
    writing = [shared_threads().submit(write_part, own.start + low, own.start + high) for low, high in parts]
    try:
        for future in writing:
            future.result()
    finally:
        give_up(writing)
    return _hashes(hashed, own)


def _hashes(hashed: VersionDigest, own: ByteRange) -> str:
    """Of the segments that begin in a range."""
    return hashed.hashes(-(-own.start // SEGMENT_BYTES), -(-own.end // SEGMENT_BYTES)).hex()

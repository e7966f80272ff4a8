"""The layout of encoding `astraflow-delta-1`, shared by writer and reader.

docs/protocol/delta.md defines every byte.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import xxhash

from astraflow.types import TensorInfo
from astraflow.weights.delta.planes import Words
from astraflow.weights.manifest import ALIGNMENT, ITEM_BYTES, VersionBytes

__all__ = [
    "BLOCK",
    "BLOCK_ELEMENTS",
    "CHECKSUM",
    "DENSE",
    "ENCODING",
    "END",
    "GAP8",
    "GAP16",
    "HEADER",
    "LENGTH",
    "MAGIC",
    "ElementSpan",
    "blocks_of",
    "checksum_of",
    "spans_of",
    "words_in",
]

ENCODING = "astraflow-delta-1"

BLOCK_ELEMENTS = 1 << 22
"""Largest number of elements per block: enough to make headers and code tables cheap, few enough for many
threads and little memory."""

MAGIC = b"AFDELTA1"
HEADER = struct.Struct("<8s16s16sQ")
"""Magic, digest of the base, digest of the result, bytes of a version. A checksum follows."""
BLOCK = struct.Struct("<QIIIIIBBHI")
"""First byte, elements, the four numbers of `Counts`, width, mode, 0, bytes of the payload. A checksum
follows, and then the payload."""
CHECKSUM = struct.Struct("<Q")
LENGTH = struct.Struct("<I")
"""Number of bytes of the frame that follows."""
END = 0
"""Mode of the trailer."""
GAP8 = 1
"""Mode of a sparse block whose gap symbols have one byte. The modes 1 and 2 are also the number of gap
planes."""
GAP16 = 2
"""Mode of a sparse block whose gap symbols have two bytes."""
DENSE = 3
"""Mode of a block that holds a step for every element."""


class ElementSpan(NamedTuple):
    """Adjacent elements of the same width; `start` and `end` are byte positions."""

    start: int
    end: int
    width: int


def spans_of(tensors: Sequence[TensorInfo]) -> list[ElementSpan]:
    """Spans of adjacent tensors with the same element width, so that small tensors can share a block."""
    spans: list[ElementSpan] = []
    for tensor in tensors:
        if not tensor.num_bytes:
            continue
        width = ITEM_BYTES[tensor.dtype]
        end = tensor.offset + tensor.num_bytes
        last = spans[-1] if spans else None
        if (
            last is not None
            and last.width == width
            and tensor.offset - last.end < ALIGNMENT
            and (tensor.offset - last.start) % width == 0
        ):
            spans[-1] = ElementSpan(last.start, end, width)
        else:
            spans.append(ElementSpan(tensor.offset, end, width))
    return spans


def blocks_of(tensors: Sequence[TensorInfo]) -> Iterator[ElementSpan]:
    """The spans of a version, cut into blocks."""
    for span in spans_of(tensors):
        step = BLOCK_ELEMENTS * span.width
        for start in range(span.start, span.end, step):
            yield ElementSpan(start, min(start + step, span.end), span.width)


def words_in(buffer: VersionBytes, span: ElementSpan) -> Words:
    """The elements of a span."""
    part = buffer[span.start : span.end]
    return part.view("<u2") if span.width == 2 else part.view("<u4")


def checksum_of(*parts: bytes | memoryview) -> bytes:
    """The checksum over all parts, in order, as the format stores it."""
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return CHECKSUM.pack(checksum.intdigest())

"""The layout of encoding `astraflow-delta-1`, shared by writer and reader; docs/DELTA.md defines every
byte."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from astraflow.types import TensorInfo
from astraflow.weights.codec.planes import Words
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
    "Span",
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
BLOCK = struct.Struct("<QIIIIIBBHI")
CHECKSUM = struct.Struct("<Q")
LENGTH = struct.Struct("<I")
END = 0
"""Mode of the trailer; the modes of blocks follow."""
GAP8 = 1
GAP16 = 2
DENSE = 3


class Span(NamedTuple):
    """Adjacent elements of one width; `start` and `end` are positions in bytes."""

    start: int
    end: int
    width: int


def spans_of(tensors: Sequence[TensorInfo]) -> list[Span]:
    """Spans of adjacent tensors with one element width, so that small tensors need no block of their own."""
    spans: list[Span] = []
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
            spans[-1] = Span(last.start, end, width)
        else:
            spans.append(Span(tensor.offset, end, width))
    return spans


def words_in(buffer: VersionBytes, span: Span) -> Words:
    part = buffer[span.start : span.end]
    return part.view("<u2") if span.width == 2 else part.view("<u4")


def checksum_of(*parts: bytes | memoryview) -> bytes:
    checksum = xxhash.xxh3_64()
    for part in parts:
        checksum.update(part)
    return CHECKSUM.pack(checksum.intdigest())

"""Encodes and decodes items as msgpack or JSON; converts token columns; bounds what a peer may send.

Both encodings decode into the same typed items. Decoding is strict: unknown fields, wrong types, non-finite
numbers in JSON and oversized bodies are refused with `WireError`. No pickle, no code, no import path is
executed.
"""

from functools import lru_cache
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import WireError

__all__ = [
    "JSON",
    "MAX_BODY_BYTES",
    "MSGPACK",
    "ColumnType",
    "array",
    "column",
    "decode",
    "encode",
]

JSON = "application/json"
MSGPACK = "application/msgpack"
_MEDIA_TYPES = frozenset({JSON, MSGPACK})
MAX_BODY_BYTES = 256 * 1024 * 1024
"""A batch of 1,024 trajectories of 32k tokens is about 300 MB; larger ones are sliced over ranks."""

ColumnType = Literal["int32", "float32", "uint8"]
_DTYPES: dict[ColumnType, np.dtype[Any]] = {
    "int32": np.dtype("<i4"),
    "float32": np.dtype("<f4"),
    "uint8": np.dtype("u1"),
}
_ItemT = TypeVar("_ItemT")
_JSON_ENCODER = msgspec.json.Encoder()
_MSGPACK_ENCODER = msgspec.msgpack.Encoder()


def encode(item: msgspec.Struct, media_type: str = MSGPACK) -> bytes:
    """The bytes of one item in the given media type."""
    if media_type == JSON:
        return _JSON_ENCODER.encode(item)
    if media_type == MSGPACK:
        return _MSGPACK_ENCODER.encode(item)
    raise WireError(f"media type {media_type!r} is not supported; send {MSGPACK} or {JSON}")


@lru_cache(maxsize=256)
def _decoder(item_type: Any, media_type: str) -> msgspec.msgpack.Decoder[Any] | msgspec.json.Decoder[Any]:
    if media_type == JSON:
        return msgspec.json.Decoder(item_type)
    if media_type == MSGPACK:
        return msgspec.msgpack.Decoder(item_type)
    raise WireError(f"media type {media_type!r} is not supported; send {MSGPACK} or {JSON}")


def decode(
    body: bytes | memoryview,
    item_type: type[_ItemT],
    media_type: str = MSGPACK,
    *,
    limit: int = MAX_BODY_BYTES,
) -> _ItemT:
    """One item of `item_type` from bytes.

    Raises: WireError if the body is larger than `limit`, is not in the media type, or does not fit the type.
    """
    if len(body) > limit:
        raise WireError(f"{item_type.__name__}: body of {len(body)} bytes is over the limit of {limit}")
    if media_type not in _MEDIA_TYPES:
        media_type = media_type.split(";")[0].strip().lower()
    try:
        return _decoder(item_type, media_type).decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise WireError(f"{item_type.__name__}: {err}") from err


def column(values: Any, kind: ColumnType) -> bytes:
    """A token column: little-endian bytes of a one-dimensional sequence or array."""
    return np.ascontiguousarray(values, dtype=_DTYPES[kind]).tobytes()


def array(data: bytes, kind: ColumnType) -> NDArray[Any]:
    """A read-only view of a token column, shape [T], no copy.

    Raises: WireError if the bytes are no whole number of entries.
    """
    dtype = _DTYPES[kind]
    if len(data) % dtype.itemsize:
        raise WireError(f"{kind} column of {len(data)} bytes is no multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)

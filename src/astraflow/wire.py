"""Encodes and decodes items as msgpack or JSON; converts token columns; bounds what a peer may send.

Both encodings decode into the same typed items. Decoding is strict. `WireError` refuses unknown fields, wrong
types, values beyond the bounds of `types.py` (such as numbers that are not finite) and oversized bodies.
Decoding runs no pickle and no code of the sender, and imports nothing that a message names.
"""

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import repeat
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import msgspec
import numpy as np
from numpy.typing import NDArray

from astraflow.errors import BoundError, TooLargeError, WireError
from astraflow.types.bounds import as_text

__all__ = [
    "JSON",
    "MAX_BODY_BYTES",
    "MSGPACK",
    "ColumnType",
    "array",
    "checked",
    "column",
    "decode",
    "decode_foreign_json",
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
_MAX_SHOWN_BYTES = 1024 * 1024
"""A value with a longer encoding is not shown, since that needs another decoding."""
_MAX_SHOWN = 100
"""Number of characters of such a value that a message shows."""
_MAX_REPR = 1000
"""The same for a list or a mapping, whose items may be long."""
_ItemT = TypeVar("_ItemT")
_StructT = TypeVar("_StructT", bound=msgspec.Struct)
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

    Raises: WireError if the body is larger than `limit`, is not in the media type, or does not fit the type;
    BoundError if a value is out of bounds, and the types up to that value fit.
    """
    if len(body) > limit:
        raise TooLargeError(f"{item_type.__name__}: body of {len(body)} bytes is over the limit of {limit}")
    if media_type not in _MEDIA_TYPES:
        media_type = media_type.split(";")[0].strip().lower()
    try:
        return _decoder(item_type, media_type).decode(body)
    except msgspec.ValidationError as err:
        found = _find_misfit(body, item_type, media_type)
        if not found.is_beyond_bound:
            raise WireError(f"{item_type.__name__}: {err}") from err
        raise BoundError(f"{item_type.__name__}: {err}{_shown(found.value, media_type)}") from err
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise WireError(f"{item_type.__name__}: {err}") from err


def decode_foreign_json(body: bytes | bytearray | str, kind: type[_ItemT]) -> _ItemT:
    """Decodes JSON that another program wrote, and whose texts may have halves of surrogate pairs or invalid
    UTF-8. Those become replacement characters.

    Raises: msgspec.DecodeError.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeError):
        text = body if isinstance(body, str) else body.decode(errors="replace")
        with suppress(ValueError, RecursionError):  # not JSON, which the next line explains
            text = json.dumps(json.loads(text), ensure_ascii=False)
        return msgspec.json.decode(as_text(text), type=kind)


def checked(item: _StructT) -> _StructT:
    """Returns the item if all its values are within their bounds.

    Items are not checked when they are constructed in Python. Call this for items built from the results of a
    user's function.

    Raises: WireError if a value has the wrong type, is out of bounds, or is not valid Unicode.
    """
    try:
        encoded = encode(item)
    except UnicodeEncodeError as err:
        raise WireError(
            f"{type(item).__name__}: a text is not valid Unicode: {err}; correct it, or remove the character"
        ) from err
    return decode(encoded, type(item))


class _Misfit(NamedTuple):
    """The innermost value of a message that does not fit its type."""

    value: bytes | memoryview
    """Its encoding."""
    is_beyond_bound: bool
    """Whether it has the right type, and only breaks a bound."""


def _find_misfit(body: bytes | memoryview, kind: Any, media_type: str) -> _Misfit:
    """Finds the first value that does not fit, by decoding the parts of a message one by one."""
    base: Any = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    if get_origin(base) in {Union, UnionType}:
        found = [_find_misfit(body, member, media_type) for member in get_args(base)]
        return next((each for each in found if each.is_beyond_bound), found[0])
    try:
        for part, inner in _parts(body, base, media_type):
            if not _fits(part, inner, media_type):
                return _find_misfit(memoryview(part), inner, media_type)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Misfit(body, is_beyond_bound=False)
    unbounded: Any = base
    if get_origin(base) is dict:
        unbounded = dict[str, msgspec.Raw]
    elif get_origin(base) is tuple and ... in get_args(base):
        unbounded = list[msgspec.Raw]
    return _Misfit(body, _fits(body, unbounded, media_type) or _is_huge_number(body, base))


def _parts(body: bytes | memoryview, base: Any, media_type: str) -> Iterable[tuple[bytes | memoryview, Any]]:
    """Returns the encoded parts of a value with their types; none for a value without parts."""
    args = get_args(base)
    if get_origin(base) is dict:
        named = _decoder(dict[str, msgspec.Raw], media_type).decode(body)
        return zip(named.values(), repeat(args[1]), strict=False)
    if get_origin(base) is tuple:
        items = _decoder(list[msgspec.Raw], media_type).decode(body)
        return zip(items, repeat(args[0]) if ... in args else args, strict=False)
    if isinstance(base, type) and issubclass(base, msgspec.Struct):
        fields = _fields(base)
        if base.__struct_config__.array_like:
            items = _decoder(list[msgspec.Raw], media_type).decode(body)
            return zip(items, (field.type for field in fields), strict=False)
        named = _decoder(dict[str, msgspec.Raw], media_type).decode(body)
        return [(named[each.encode_name], each.type) for each in fields if each.encode_name in named]
    return ()


_fields = lru_cache(msgspec.structs.fields)
"""The fields of an item, cached by type: a body may hold thousands of items that don't fit."""


def _fits(body: bytes | memoryview, kind: Any, media_type: str) -> bool:
    try:
        _decoder(kind, media_type).decode(body)
    except msgspec.ValidationError:
        return False
    return True


def _is_huge_number(body: bytes | memoryview, base: Any) -> bool:
    """Returns whether a value in JSON is a number that no float, or no 64 bits, can hold."""
    text = bytes(body)
    if base is int:
        return text.removeprefix(b"-").isdigit()
    try:
        return base is float and math.isinf(float(text))
    except ValueError:
        return False


def _shown(body: bytes | memoryview, media_type: str) -> str:
    """Returns the text `; got VALUE` for an encoded value; empty if the value is too long to decode it."""
    if len(body) > _MAX_SHOWN_BYTES:
        return ""
    try:
        value: Any = msgspec.json.decode(body) if media_type == JSON else msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    if isinstance(value, str | bytes | list | dict) and len(value) > _MAX_SHOWN:  # pyright: ignore[reportUnknownArgumentType] - whatever was sent
        return f"; its length is {len(value)}"  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, str | bytes):
        return f"; got {str(value)[:_MAX_SHOWN]!r}"
    shown = repr(cast("object", value))  # a short list may have long items
    return f"; got {shown if len(shown) <= _MAX_REPR else shown[:_MAX_REPR] + '...'}"


def column(values: Any, kind: ColumnType) -> bytes:
    """A token column: little-endian bytes of a one-dimensional sequence or array."""
    return np.ascontiguousarray(values, dtype=_DTYPES[kind]).tobytes()


def array(data: bytes, kind: ColumnType) -> NDArray[Any]:
    """A token column as a read-only array of shape [T], which is a view, not a copy.

    Raises: WireError if the bytes are not a whole number of entries.
    """
    dtype = _DTYPES[kind]
    if len(data) % dtype.itemsize:
        raise WireError(f"{kind} column of {len(data)} bytes; expected a multiple of {dtype.itemsize}")
    return np.frombuffer(data, dtype=dtype)

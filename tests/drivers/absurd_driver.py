"""Absurd and nearly right bodies for every field of an item.

They are made from the item's type, so that a new field is covered by itself.
"""

import base64
import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from astraflow import wire

INFO = msgspec.inspect
PLAIN: dict[type, Any] = {
    INFO.IntType: 0,
    INFO.FloatType: 1.0,
    INFO.StrType: "a",
    INFO.BytesType: bytes(4),
    INFO.BoolType: False,
    INFO.NoneType: None,
    INFO.AnyType: None,
    INFO.CustomType: None,
}

INTEGERS = (-1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, 10**20, 10**30, -(2**63), 1.5, "1", True, None, [], {})
FLOATS = (-1.0, 1e39, 1e200, 1.6e308, -1.6e308, math.nan, math.inf, -math.inf, 10**30, True, "1.0", None, [])
TEXTS = (
    "", "\x00", "\x1b[2J", "[/x]", "a\n", "\u0663.\u0663.\u0663", "\ud800", "9" * 5000, "9" * 400 + ".0.0",
    "-1.-1.-1", "e0.0.0", "../../etc/passwd", "actor", 7, None, [],
)  # fmt: skip
NAMES = (
    "",
    "actor",
    "x",
    "0",
    "-1",
    "\u0663",
    "1e9",
    "nan",
    "..",
    "%00",
    "\x00",
    "a" * 5000,
    "9" * 5000,
    "[/x]",
)
NUMBERS = (
    "", "0", "-1", "1", "3",
    "4096", "4097", "nan", "inf", "-inf", "1e400", "1_0", "\u0663", " 1", "+1", "0x10",
    "1.5", str(2**31), str(2**63), str(2**64), str(10**30), "9" * 5000, "1,2,3", "\x00", "[/x]",
)  # fmt: skip
BYTES = (b"", b"\0", b"\1" * 9, bytes(4), "!!!", 5, None)
MAX_COPIES = 100_000
"""Lists with a higher limit are not filled to it: that would test the machine."""


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def sound(kind: Any, known: Mapping[str, Any], name: str = "") -> Any:
    """A value of the type: `known` by the field's name, or the plainest one that its bounds allow."""
    if name in known:
        return known[name]
    if isinstance(kind, INFO.StructType):
        fields = {field.encode_name: sound(field.type, known, field.name) for field in kind.fields}
        if kind.array_like:
            return list(fields.values())
        return {kind.tag_field: kind.tag, **fields} if kind.tag_field else fields
    if isinstance(kind, INFO.VarTupleType):
        return [sound(kind.item_type, known)]
    if isinstance(kind, INFO.TupleType):
        return [sound(part, known) for part in kind.item_types]
    if isinstance(kind, INFO.DictType):
        return {"a": sound(kind.value_type, known)}
    if isinstance(kind, INFO.UnionType):
        return sound(kind.types[0], known)
    return kind.values[0] if isinstance(kind, INFO.LiteralType) else PLAIN[type(kind)]


def variants(kind: Any, value: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(what is changed, instead of `value`): each field of a sound value, and all that may stand there."""
    yield from ((f" = {_told(other)}", other) for other in _others(kind, value))
    if isinstance(kind, INFO.StructType | INFO.TupleType):
        for key, name, part in _fields(kind):
            for about, other in variants(part, value[key], known):
                yield f"{name}{about}", _replaced(value, key, other)
    elif isinstance(kind, INFO.VarTupleType) and value:
        for about, other in variants(kind.item_type, value[0], known):
            yield f"[0]{about}", [other, *value[1:]]
    elif isinstance(kind, INFO.DictType):
        for about, other in variants(kind.value_type, value["a"], known):
            yield f"[a]{about}", {"a": other}
    elif isinstance(kind, INFO.UnionType):
        for idx, part in enumerate(kind.types):
            instead = sound(part, known) if idx or value is None else value
            yield f"|{idx}", instead
            yield from variants(part, instead, known)


def _fields(kind: Any) -> list[tuple[int | str, str, Any]]:
    """Key, name and type of each field of a struct, or of each item of a tuple of fixed length."""
    if isinstance(kind, INFO.TupleType):
        return [(idx, f"[{idx}]", part) for idx, part in enumerate(kind.item_types)]
    return [
        (idx if kind.array_like else field.encode_name, f".{field.name}", field.type)
        for idx, field in enumerate(kind.fields)
    ]


def _replaced(value: Any, key: int | str, other: Any) -> Any:
    if isinstance(value, list):
        return [other if idx == key else old for idx, old in enumerate(value)]
    return {**value, key: other}


def _told(value: Any) -> str:
    try:
        return repr(value)[:60]
    except RecursionError:
        return "something deep"


def _others(kind: Any, value: Any) -> Iterator[Any]:
    """What may stand instead of a value, without a look into it."""
    if isinstance(kind, INFO.IntType):
        yield from (*INTEGERS, kind.ge, kind.ge - 1, kind.le, kind.le + 1)
    elif isinstance(kind, INFO.FloatType):
        yield from (*FLOATS, kind.ge, kind.le, kind.le * 1.01, math.nextafter(kind.ge, -math.inf))
    elif isinstance(kind, INFO.StrType):
        yield from (*TEXTS, "x" * (kind.max_length + 1), "x" * min(kind.max_length, MAX_COPIES))
    elif isinstance(kind, INFO.VarTupleType | INFO.DictType):
        yield from _other_lists(kind, value)
    elif isinstance(kind, INFO.BytesType):
        yield from BYTES
    else:
        yield from (None, [], {}, "x", 1, nested(900))
        if isinstance(value, dict):
            yield {**value, "unknown": 1}


def _other_lists(kind: Any, value: Any) -> Iterator[Any]:
    yield from (None, [], {}, "x", [None], nested(900))
    if isinstance(kind, INFO.DictType):
        yield from ({name: value["a"]} for name in ("", "x" * 300, "\x1b", "[/x]"))
        yield {str(idx): value["a"] for idx in range(kind.max_length + 1)}
    elif kind.max_length <= MAX_COPIES:
        yield value[:1] * kind.max_length
        yield value[:1] * (kind.max_length + 1)


def encoded(value: Any) -> Iterator[tuple[str, bytes]]:
    """(media type, body), in each media type in which the value can be written."""
    with contextlib.suppress(ValueError, RecursionError):
        text = json.dumps(value, default=lambda data: base64.b64encode(data).decode())
        yield wire.JSON, text.encode()
    with contextlib.suppress(ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        yield wire.MSGPACK, msgspec.msgpack.encode(value)


def bodies(item: type, known: Mapping[str, Any]) -> Iterator[tuple[str, str, bytes]]:
    """(what is changed, media type, body) for every field of an item; the first is the sound item."""
    kind = INFO.type_info(item)
    whole = sound(kind, known)
    for about, value in ((": sound", whole), *variants(kind, whole, known)):
        for media_type, body in encoded(value):
            yield item.__name__ + about, media_type, body

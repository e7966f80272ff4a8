"""Reads the JSON of calls, and gives arguments that are plain text the types of a tool's schema."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

from astraflow.types.model_text import past_separators
from astraflow.workflows.calls import ToolCall

__all__ = ["as_argument", "check_json", "is_call", "load_json", "read_call", "to_json", "values_at"]

_MAX_DEPTH = 64
"""Largest nesting of objects and lists in a call. Much deeper nesting would exceed Python's recursion
limit."""
_EXPECTED = 'expected {"name": ..., "arguments": {...}}'
_KINDS: Mapping[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


_JSON = re.compile(r"\{|\[(?![A-Z_]+\])")
"""How JSON begins, in contrast to a mark such as [TOOL_CALLS]."""


def values_at(text: str, start: int, *, most: int = 1 << 20) -> tuple[list[object], int, str]:
    """Reads up to `most` consecutive JSON objects and lists from `start`; a list counts as its items.

    Returns them, the position after them, and why the next one cannot be read (empty if no JSON follows).
    """
    values: list[object] = []
    pos = past_separators(text, start)
    while len(values) < most and _JSON.match(text, pos):
        try:
            value, end = load_json(text, pos)
        except json.JSONDecodeError as err:
            return values, pos, f"{err.msg}, at character {err.pos - start}"
        except ValueError as err:
            return values, pos, str(err)
        values += cast("list[object]", value) if isinstance(value, list) and value else [value]
        pos = past_separators(text, end)
    return values, pos, ""


def load_json(text: str, pos: int = 0) -> tuple[object, int]:
    """Decodes the JSON at `pos`; returns the value and the position after it.

    Raises: ValueError if it is not JSON, is nested too deeply, has a key with two values, or has a value that
    cannot be encoded as JSON again: an infinite number, `NaN`, half of a surrogate pair.
    """
    try:
        loaded, end = _DECODER.raw_decode(text, pos)
    except RecursionError:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}") from None
    check_json(loaded)
    return loaded, end


def check_json(loaded: object) -> None:
    """Raises: ValueError if a value is nested too deeply, or cannot be encoded as JSON."""
    level = [loaded]  # all values at one depth
    depth = 0
    while level := [part for value in level for part in _parts(value)]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    json.dumps(loaded, ensure_ascii=False, allow_nan=False).encode()


def to_json(value: object) -> str:
    """Encodes a value as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    """Makes an object of its keys and values. Raises: ValueError if a key has two different values."""
    made: dict[str, object] = {}
    for key, value in pairs:
        if key in made and made[key] != value:
            raise ValueError(f"the key {key!r} has two values")
        made[key] = value
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_object, strict=False)
"""Accepts line breaks inside of strings (`strict=False`), because models write programs that way."""


def _parts(value: object) -> Iterable[object]:
    """The values in an object or a list; empty for any other value."""
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


# --- calls ----------------------------------------------------------------------------------------


def _name_in(call: Mapping[str, object]) -> object:
    return call.get("name", call.get("tool_name"))  # Command writes `tool_name`


def is_call(value: object) -> bool:
    """Whether a value has the form of a call: an object with a name and arguments."""
    if not isinstance(value, dict):
        return False
    call = cast("dict[str, object]", value)
    return isinstance(_name_in(call), str) and ("arguments" in call or "parameters" in call)


def read_call(loaded: object, start: int = 0, end: int = 0) -> ToolCall:
    """Reads a call from its JSON, or takes one that was read; `start` and `end`: where it is in the reply."""
    return (loaded if isinstance(loaded, ToolCall) else _read_call(loaded)).at(start, end)


def _read_call(loaded: object) -> ToolCall:
    if not isinstance(loaded, dict):
        return ToolCall(problem=f"the call is not a JSON object; {_EXPECTED}")
    call = cast("dict[str, object]", loaded)
    name = _name_in(call)
    if not isinstance(name, str) or not name.strip():
        return ToolCall(problem=f"the call has no name; {_EXPECTED}")
    if not is_call(call):
        return ToolCall(problem=f"the call of {name!r} has no arguments; {_EXPECTED}")
    # Llama 3 writes `parameters` for `arguments`.
    given = call.get("arguments")
    try:
        arguments = _decode_arguments(call.get("parameters") if given is None else given)
    except ValueError as err:
        return ToolCall(problem=f"the arguments of {name!r} are text that is not JSON: {err}; {_EXPECTED}")
    if not isinstance(arguments, dict):
        excerpt = json.dumps(arguments)[:40]
        return ToolCall(problem=f"the arguments of {name!r} are {excerpt}, not an object; {_EXPECTED}")
    return ToolCall(name.strip(), cast("dict[str, object]", arguments))


def _decode_arguments(arguments: object) -> object:
    """Decodes arguments. Some models write null or empty text for no arguments, or the object as JSON text.

    Raises: ValueError if a text is not JSON.
    """
    while isinstance(arguments, str) and arguments.strip():
        text = arguments.strip()
        arguments, end = load_json(text)
        if end < len(text):
            raise ValueError(f"text follows the JSON, at character {end}")
    return {} if arguments is None or isinstance(arguments, str) else arguments


# --- arguments that are plain text ----------------------------------------------------------------


def as_argument(text: str, schema: str, key: str, is_text: str | None = None) -> object:
    """The value of an argument that the model wrote as plain text, by the schema of the tool's arguments.

    `is_text`: "true" or "false" if the model says whether it is a text. Without a type in the schema, JSON
    that isn't a string in quotes is a value, and everything else is a text.
    """
    kinds = {"string"} if is_text == "true" else set(_kinds_of(key, schema)) if is_text is None else {"any"}
    value = text if kinds == {"string"} else _value_of(text)
    if isinstance(value, str) and "any" not in kinds:
        return text  # the quotes are part of it
    fits = any(type(value) in _KINDS.get(kind, ()) for kind in kinds)
    return text if "string" in kinds and not fits else value


def _value_of(text: str) -> object:
    """The value that a text is in JSON, or in Python for `True`, `False`, and `None`; else the text."""
    word = text.strip()
    word = {"True": "true", "False": "false", "None": "null"}.get(word, word)
    try:
        value, end = load_json(word)
    except ValueError:
        return text
    return value if end == len(word) else text


def _kinds_of(key: str, schema: str) -> Iterator[str]:
    """The JSON types that a schema allows for an argument; none if it says none."""
    try:
        arguments: Any = json.loads(schema or "{}")
        yield from _kinds_in(arguments["properties"][key])
    except (ValueError, RecursionError, KeyError, TypeError):
        return


def _kinds_in(schema: Any) -> Iterator[str]:
    match schema:
        case {"type": str(kind)}:
            yield kind
        case {"type": [*kinds]}:
            yield from kinds
        case {"enum": [*values]}:
            yield from [kind for kind, types in _KINDS.items() for each in values if type(each) in types]
        case {"anyOf": [*parts]} | {"oneOf": [*parts]} | {"allOf": [*parts]}:
            for part in parts:
                yield from _kinds_in(part)
        case _:
            return

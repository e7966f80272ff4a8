"""Finds function calls in a model's text; each style of chat template has its own parser.

A call names a tool that was offered, and has `arguments` or `parameters`. A call in tags that lacks one of
them has a `problem`, which the model is told, so it can correct the call. JSON without tags may be an answer,
so it is a call only if it has both.

Calls inside of reasoning (`types.model_text`) are ignored. A tag inside a string of a call's JSON is text.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from astraflow.types.model_text import past_separators, without_reasoning

__all__ = [
    "CALL_PARSERS",
    "CallParser",
    "ToolCall",
    "bare_json_calls",
    "looks_like_call",
    "offered_calls",
    "tagged_calls",
    "without_reasoning",
]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it.

    If the call cannot be read, `problem` says why. The model gets this text, so it can correct the call.
    """

    name: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    problem: str = ""


CallParser: TypeAlias = Callable[[str], Sequence[ToolCall]]
"""Returns the calls in a text, in order; empty if the text is an answer."""

_MAX_DEPTH = 64
"""Largest nesting of objects and lists in a call. Much deeper nesting would exceed Python's recursion
limit."""

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
_ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:')
_JSON_START = re.compile(r"(?:```\w*\s*)?(?:[{]|\[\s*[{])")
_CALL_MARK = re.compile(
    r"<tool_calls?\b|<function\b|<invoke\b|\[TOOL_CALLS\]|<\|python_tag\|>|<\|tool_calls?_|<｜tool▁calls?▁"  # noqa: RUF001 - DeepSeek's own bars
    r"|<\|channel\|>commentary"
)
"""Openings of calls in the styles of common model families, most of which no parser reads."""
_EXPECTED = 'expected {"name": ..., "arguments": {...}}'


def tagged_calls(text: str) -> tuple[ToolCall, ...]:
    """Reads JSON between <tool_call> and </tool_call>, as Hermes and Qwen write it.

    A pair of tags may hold several calls, and the last closing tag may be missing.
    Example: `tagged_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')`.
    """
    return _tagged_calls_in(without_reasoning(text))


def _tagged_calls_in(text: str) -> tuple[ToolCall, ...]:
    calls: list[ToolCall] = []
    pos = 0
    while (opening := text.find(_OPEN, pos)) >= 0:
        start = opening + len(_OPEN)
        values, pos, problem = _values_at(text, start)
        is_closed = pos == len(text) or text.startswith((_CLOSE, _OPEN), pos)
        if values and is_closed and not problem:
            calls += _calls(values)
            continue
        if not problem:
            problem = "text follows the JSON" if values else "no JSON follows the tag"
            problem = f"{problem}, at character {pos - start}; {_EXPECTED}"
        calls.append(ToolCall(problem=f"the call is not valid JSON: {problem}"))
        closing = text.find(_CLOSE, pos)
        pos = closing if closing >= 0 else len(text)
    return tuple(calls)


def bare_json_calls(text: str) -> tuple[ToolCall, ...]:
    """Reads a text that is JSON: an object with a name, several of them, or a list, as Llama 3 writes it.

    Other JSON is an answer: `{"name": "Alice", "age": 5}`, or a list in which one object is not a call.
    """
    return _bare_json_calls_in(without_reasoning(text))


def _bare_json_calls_in(text: str) -> tuple[ToolCall, ...]:
    start = past_separators(text, 0)
    if not text.startswith(("{", "["), start) or not _NAME.search(text) or not _ARGUMENTS.search(text):
        return ()
    values, end, problem = _values_at(text, start)
    if not all(_is_call(part) for part in _flat(values)):
        return ()
    if not problem and end < len(text):
        problem = f"text follows the JSON, at character {end - start}; write the call alone"
    if problem:
        return (ToolCall(problem=f"the call is not valid JSON: {problem}"),)
    return _calls(values)


def offered_calls(parser: CallParser, reply: str, offered: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls in a reply; none if it is JSON without tags that doesn't name `offered` tools.

    In tags, a call of an unknown tool stays, because it can't be anything else.
    """
    # A reply may mention the tags of reasoning, so it isn't searched for reasoning again.
    if parser is tagged_calls:
        parser = _tagged_calls_in
    elif parser is bare_json_calls:
        parser = _bare_json_calls_in
    calls = tuple(parser(reply))
    if not calls or not reply.startswith(("{", "[")):
        return calls
    names = {call.name for call in calls if not call.problem} or set(_NAME.findall(reply)[:1])
    return calls if names <= set(offered) else ()


def looks_like_call(reply: str, offered: Collection[str]) -> bool:
    """Whether a reply looks like a call of an `offered` tool, in any of the styles that models write."""
    if not offered or _CALL_MARK.search(reply):
        return bool(offered)
    if _JSON_START.match(reply):
        return any(f'"{name}"' in reply for name in offered)
    return reply.startswith(tuple(f"{bracket}{name}(" for name in offered for bracket in ("", "[")))


def _values_at(text: str, start: int) -> tuple[list[object], int, str]:
    """Reads consecutive JSON objects and lists from `start`. Returns them, the position after them, and why
    the next one cannot be read (empty if no JSON follows)."""
    values: list[object] = []
    pos = past_separators(text, start)
    while text.startswith(("{", "["), pos):
        try:
            value, end = _load_json(text, pos)
        except json.JSONDecodeError as err:
            return values, pos, f"{err.msg}, at character {err.pos - start}"
        except ValueError as err:
            return values, pos, str(err)
        values.append(value)
        pos = past_separators(text, end)
    return values, pos, ""


def _load_json(text: str, pos: int = 0) -> tuple[object, int]:
    """Decodes the JSON at `pos`; returns the value and the position after it.

    Raises: ValueError if it is not JSON, is nested too deeply, has a key with two values, or has a value that
    cannot be encoded as JSON again: an infinite number, `NaN`, half of a surrogate pair.
    """
    try:
        loaded, end = _DECODER.raw_decode(text, pos)
    except RecursionError:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}") from None
    level = [loaded]  # all values at one depth
    depth = 0
    while level := [part for value in level for part in _parts(value)]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    json.dumps(loaded, ensure_ascii=False, allow_nan=False).encode()
    return loaded, end


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


def _flat(values: Sequence[object]) -> list[object]:
    """The values; a list counts as its items."""
    flat: list[object] = []
    for value in values:
        flat += cast("list[object]", value) if isinstance(value, list) else [value]
    return flat


def _calls(values: Sequence[object]) -> tuple[ToolCall, ...]:
    return tuple(_read_call(part) for part in _flat(values) or values)


def _is_call(value: object) -> bool:
    """Whether a value has the form of a call: an object with a name and arguments."""
    if not isinstance(value, dict):
        return False
    call = cast("dict[str, object]", value)
    return isinstance(call.get("name"), str) and ("arguments" in call or "parameters" in call)


def _read_call(loaded: object) -> ToolCall:
    if not isinstance(loaded, dict):
        return ToolCall(problem=f"the call is not a JSON object; {_EXPECTED}")
    call = cast("dict[str, object]", loaded)
    name = call.get("name")
    if not isinstance(name, str) or not name.strip():
        return ToolCall(problem=f"the call has no name; {_EXPECTED}")
    if not _is_call(call):
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
        arguments, end = _load_json(text)
        if end < len(text):
            raise ValueError(f"text follows the JSON, at character {end}")
    return {} if arguments is None or isinstance(arguments, str) else arguments


CALL_PARSERS: dict[str, CallParser] = {"tagged": tagged_calls, "bare_json": bare_json_calls}
"""Parsers by their names in recipes."""

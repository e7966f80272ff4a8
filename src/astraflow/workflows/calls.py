"""Finds function calls in a model's text; each style of chat template has its own parser.

Calls inside of reasoning (`<think>...</think>`) are ignored, because reasoning is not part of the answer. A
tag inside a string of a call's JSON is text, not a tag.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

__all__ = [
    "CALL_PARSERS",
    "CallParser",
    "ToolCall",
    "bare_json_calls",
    "tagged_calls",
    "text_before_calls",
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
_THINK = "<think>"
_THINK_END = "</think>"
_MARK = re.compile(f"{_THINK}|{_THINK_END}|{_OPEN}")
_BETWEEN = re.compile(r"(?:[\s;,]|<\|python_tag\|>)*")
"""Text that may precede a call. Llama 3 writes the tag before calls, and separates calls with `;`."""
_EXPECTED = 'expected {"name": ..., "arguments": {...}}'


def tagged_calls(text: str) -> tuple[ToolCall, ...]:
    """Reads JSON between <tool_call> and </tool_call>, as Hermes and Qwen write it.

    A pair of tags may hold several calls, and the last closing tag may be missing.
    Example: `tagged_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')`.
    """
    text = without_reasoning(text)
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
    """Reads a text that is JSON: an object with a name, several of them, or a list, as Llama 3 writes it."""
    text = without_reasoning(text)
    start = _past_separators(text, 0)
    if not text.startswith(("{", "["), start) or '"name"' not in text:
        return ()
    values, end, problem = _values_at(text, start)
    if not problem and end < len(text):
        problem = f"text follows the JSON, at character {end - start}; write the call alone"
    if problem:
        return (ToolCall(problem=f"the call is not valid JSON: {problem}"),)
    return _calls(values)


def without_reasoning(text: str, *, begins_inside: bool = False) -> str:
    """A model's text without its reasoning, <think>...</think>. The closing tag may be missing.

    `begins_inside`: the prompt ended with <think>, so the text starts with reasoning. Even without this, a
    </think> without its <think> ends reasoning that started before the text.
    """
    return "".join(text[start:end] for start, end in _spans(text, begins_inside)).strip()


def text_before_calls(text: str, *, begins_inside: bool = False) -> str | None:
    """The text before the first <tool_call>, with its reasoning; None if there is no such tag."""
    for start, end in _spans(text, begins_inside):
        if (opening := text.find(_OPEN, start, end)) >= 0:
            return text[:opening].strip()
    return None


def _spans(text: str, begins_inside: bool) -> list[tuple[int, int]]:
    """The parts of a text that are not reasoning, as `[start, end)`."""
    spans: list[tuple[int, int]] = []
    start = _end_of_reasoning(text, 0) if begins_inside else 0
    pos = _values_at(text, start)[1]
    while mark := _MARK.search(text, pos):
        if mark[0] == _OPEN:
            pos = _values_at(text, mark.end())[1]
            continue
        if mark[0] == _THINK:
            spans.append((start, mark.start()))
            start = _end_of_reasoning(text, mark.end())
        else:
            spans.clear()  # a </think> without its <think>: all text so far was reasoning
            start = mark.end()
        pos = _values_at(text, start)[1]
    return [*spans, (start, len(text))]


def _end_of_reasoning(text: str, start: int) -> int:
    end = text.find(_THINK_END, start)
    return end + len(_THINK_END) if end >= 0 else len(text)


def _values_at(text: str, start: int) -> tuple[list[object], int, str]:
    """Reads consecutive JSON objects and lists from `start`. Returns them, the position after them, and why
    the next one cannot be read (empty if no JSON follows)."""
    values: list[object] = []
    pos = _past_separators(text, start)
    while text.startswith(("{", "["), pos):
        try:
            value, length = _load_json(text[pos:])
        except json.JSONDecodeError as err:
            return values, pos, f"{err.msg}, at character {pos - start + err.pos}"
        except ValueError as err:
            return values, pos, str(err)
        values.append(value)
        pos = _past_separators(text, pos + length)
    return values, pos, ""


def _past_separators(text: str, pos: int) -> int:
    found = _BETWEEN.match(text, pos)
    return found.end() if found else pos


def _load_json(text: str) -> tuple[object, int]:
    """Decodes the JSON at the start of a text; returns the value and its length.

    Raises: ValueError if it is not JSON, is nested too deeply, has a key with two values, or has a value that
    cannot be encoded as JSON again: an infinite number, `NaN`, half of a surrogate pair.
    """
    try:
        loaded, end = _DECODER.raw_decode(text)
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


def _calls(values: Sequence[object]) -> tuple[ToolCall, ...]:
    """Reads the calls in JSON values; a list counts as its items."""
    flat: list[object] = []
    for value in values:
        flat += cast("list[object]", value) if isinstance(value, list) else [value]
    return tuple(_read_call(part) for part in flat or values)


def _read_call(loaded: object) -> ToolCall:
    if not isinstance(loaded, dict):
        return ToolCall(problem=f"the call is not a JSON object; {_EXPECTED}")
    call = cast("dict[str, object]", loaded)
    name = call.get("name")
    if not isinstance(name, str) or not name.strip():
        return ToolCall(problem=f"the call has no name; {_EXPECTED}")
    # Llama 3 writes `parameters` for `arguments`.
    given = call.get("arguments")
    try:
        arguments = _decode_arguments(call.get("parameters") if given is None else given)
    except ValueError as err:
        return ToolCall(problem=f"the arguments of {name!r} are text that is not JSON: {err}; {_EXPECTED}")
    if not isinstance(arguments, dict):
        shown = json.dumps(arguments)[:40]
        return ToolCall(problem=f"the arguments of {name!r} are {shown}, not an object; {_EXPECTED}")
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

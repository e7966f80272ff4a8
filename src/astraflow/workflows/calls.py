"""Finds function calls in a model's text; each style of chat template has its own parser."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, cast

__all__ = ["CALL_PARSERS", "CallParser", "ToolCall", "bare_json_calls", "tagged_calls"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it.

    If the call cannot be read, `problem` says why; the model is told, so that it can correct the call.
    """

    name: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    problem: str = ""


CallParser: TypeAlias = Callable[[str], Sequence[ToolCall]]
"""Returns the calls in a text, in order; none if the text is an answer."""

_MAX_DEPTH = 64
"""Largest nesting of objects and lists in a call. Much deeper ones reach Python's recursion limit later."""

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def tagged_calls(text: str) -> tuple[ToolCall, ...]:
    """Reads JSON between <tool_call> and </tool_call>, as Hermes and Qwen write it.

    Example: `tagged_calls('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')`.
    """
    return tuple(_call(part) for part in _TAGGED.findall(text))


def bare_json_calls(text: str) -> tuple[ToolCall, ...]:
    """Reads a text that is one JSON object with a name, or a list of such objects, as Llama 3 writes it."""
    stripped = text.strip().removeprefix("<|python_tag|>")
    if not stripped.startswith(("{", "[")) or '"name"' not in stripped:
        return ()
    try:
        loaded = _loaded(stripped)
    except ValueError as err:
        return (ToolCall(problem=f"the call is not valid JSON: {err}"),)
    parts = cast("list[object]", loaded) if isinstance(loaded, list) else [loaded]
    return tuple(_checked(part) for part in parts)


def _call(text: str) -> ToolCall:
    try:
        return _checked(_loaded(text))
    except ValueError as err:
        return ToolCall(problem=f"the call is not valid JSON: {err}")


def _loaded(text: str) -> object:
    """Decodes JSON.

    Raises: ValueError if the text is not JSON, is nested too deeply, or has what no JSON can say again: a
    number beyond all bounds, `NaN`, half a character.
    """
    try:
        loaded = cast("object", json.loads(text))
    except RecursionError:
        raise ValueError(f"nested deeper than {_MAX_DEPTH}") from None
    level = [loaded]
    depth = 0
    while level := [part for value in level for part in _parts(value)]:
        depth += 1
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested deeper than {_MAX_DEPTH}")
    json.dumps(loaded, ensure_ascii=False, allow_nan=False).encode()
    return loaded


def _parts(value: object) -> Iterable[object]:
    """The values that an object or a list holds; none for any other value."""
    if isinstance(value, dict):
        return cast("dict[str, object]", value).values()
    return cast("list[object]", value) if isinstance(value, list) else ()


def _checked(loaded: object) -> ToolCall:
    expected = 'expected {"name": ..., "arguments": {...}}'
    if not isinstance(loaded, dict):
        return ToolCall(problem=f"the call is not a JSON object; {expected}")
    call = cast("dict[str, object]", loaded)
    name = call.get("name")
    # Llama 3 writes `parameters` for `arguments`.
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall(problem=f"the call has no name, or its arguments are not an object; {expected}")
    return ToolCall(name, cast("dict[str, object]", arguments))


CALL_PARSERS: dict[str, CallParser] = {"tagged": tagged_calls, "bare_json": bare_json_calls}
"""Parsers by the name that a recipe uses."""

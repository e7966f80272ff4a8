"""Tools: plain Python functions that a model may call.

A function's name, docstring and annotated parameters are what the model is shown; its arguments are checked
against the annotations before it runs. What a call cannot do (an unknown tool, wrong arguments, an exception)
is told to the model as the call's result; only a RolloutError, which says that the tool itself is out of
order, fails the episode. A tool that blocks runs in a thread of its own, which cannot be killed: it must come
back by itself.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_type_hints

import msgspec

from astraflow.errors import ConfigError, RolloutError
from astraflow.types import ToolSpec
from astraflow.workflows.calls import ToolCall

__all__ = ["Tool", "ToolResult", "make_tool", "run_call"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function with what the model is shown of it. Made by `make_tool`."""

    spec: ToolSpec
    function: Callable[..., object]
    arguments: type[msgspec.Struct]
    """Decodes and checks the arguments of a call."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told about a call."""

    text: str
    is_error: bool = False


def make_tool(function: Callable[..., object]) -> Tool:
    """The tool of a function; arguments that `functools.partial` bound are not shown.

    Raises: ConfigError if a parameter has no name or no annotation that JSON knows.
    """
    inner, bound = _unbound(function)
    name: str = getattr(inner, "__name__", type(inner).__name__)
    try:
        hints = get_type_hints(inner)
    except (NameError, TypeError) as err:
        raise ConfigError(f"tool {name}: its annotations cannot be read: {err}") from err
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(inner).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name}: {parameter} has no name that a call could give; name it")
        kind = hints.get(parameter.name, Any)
        required = parameter.default is parameter.empty
        if parameter.name in bound:
            continue
        fields.append((parameter.name, kind) if required else (parameter.name, kind, parameter.default))
    try:
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        schema = _schema(name, arguments)
    except TypeError as err:
        raise ConfigError(f"tool {name}: a parameter cannot be shown to a model: {err}") from err
    return Tool(
        ToolSpec(name=name, description=inspect.getdoc(inner) or "", parameters=schema), function, arguments
    )


def _unbound(function: Callable[..., object]) -> tuple[Callable[..., object], frozenset[str]]:
    if not isinstance(function, partial):
        return function, frozenset()
    bound = cast("partial[object]", function)
    return bound.func, frozenset(bound.keywords)


def _schema(name: str, arguments: type[msgspec.Struct]) -> str:
    _, found = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    own = {key: value for key, value in found.pop(name).items() if key != "title"}
    schema = {**own, "$defs": found} if found else own
    return msgspec.json.encode(schema).decode()


async def run_call(
    tools: Mapping[str, Tool], call: ToolCall, *, timeout_s: float, max_chars: int
) -> ToolResult:
    """Runs one call. Raises: RolloutError if the tool itself does."""
    tool = tools.get(call.name)
    if call.problem:
        return ToolResult(f"error: {call.problem}", is_error=True)
    if tool is None:
        return ToolResult(f"error: no tool {call.name!r}; there are {', '.join(tools)}", is_error=True)
    try:
        checked = msgspec.convert(call.arguments, tool.arguments)
    except msgspec.ValidationError as err:
        return ToolResult(f"error: {err}", is_error=True)
    given = {key: getattr(checked, key) for key in call.arguments}
    try:
        async with asyncio.timeout(timeout_s):
            value = await _called(tool.function, given)
    except RolloutError:
        raise
    except TimeoutError:
        return ToolResult(f"error: the call took longer than {timeout_s:g} s", is_error=True)
    except (Exception, SystemExit, KeyboardInterrupt) as err:  # noqa: BLE001 - it is told to the model
        return ToolResult(_shortened(f"error: {type(err).__name__}: {err}", max_chars), is_error=True)
    return ToolResult(_shortened(_text(value), max_chars))


async def _called(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]} (cut off)"


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, msgspec.MsgspecError):
        return str(value)

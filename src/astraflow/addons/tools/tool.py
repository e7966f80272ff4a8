"""Functions that a model calls: described to it, their arguments checked, run under a deadline.

The model is shown a function's name, docstring and annotated parameters. The arguments of a call are checked
against the annotations before the function runs. If a call fails (an unknown tool, wrong arguments, an
exception), the model is told so as the call's result. Only a RolloutError, which says that the tool itself
does not work, fails the episode.

An async function runs in the event loop, any other in a thread. A thread cannot be killed: a function that
may not return by itself runs in a process (`tool_process.py`).
"""

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, get_type_hints

import msgspec

from astraflow.errors import ConfigError, RolloutError
from astraflow.types import Task, ToolSpec
from astraflow.workflows.calls import ToolCall

__all__ = [
    "Tool",
    "ToolContext",
    "ToolFailedError",
    "ToolResult",
    "make_tool",
    "run_call",
    "shorten",
    "text_of",
]


class ToolFailedError(Exception):
    """A tool raised in another process; the text is what the model is told."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """What a tool may know of its call. A parameter with this annotation is filled in; no model sees it.

    Example: `def look(place: str, context: ToolContext) -> str`.
    """

    task: Task
    """The task of the episode."""
    episode: str
    """Names the episode; no other one has the same name, not even another attempt at it."""
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """What the tools of one episode keep for one another. It ends with the episode, and does not reach tools
    that run in a process: these get an empty one for each call."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function together with the description that the model is shown; `make_tool` makes it."""

    spec: ToolSpec
    function: Callable[..., object]
    arguments: type[msgspec.Struct]
    """The struct that checks and converts the arguments of a call."""
    context: str = ""
    """The parameter that gets the `ToolContext`; empty if there is none."""
    turns: asyncio.Semaphore | None = None
    """Limits how many calls run at a time; the others wait before their deadline begins."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told about a call."""

    text: str
    is_error: bool = False
    is_late: bool = False
    """The call was given up because it took too long."""


def make_tool(function: Callable[..., object]) -> Tool:
    """Makes a tool of a function. Arguments that `functools.partial` bound are not shown to the model.

    Raises: ConfigError if a parameter has no name, or an annotation that JSON cannot express.
    """
    inner, bound = _unbound(function)
    name: str = getattr(inner, "__name__", type(inner).__name__)
    try:
        hints = get_type_hints(inner)
    except (NameError, TypeError) as err:
        raise ConfigError(f"tool {name}: its annotations cannot be read: {err}") from err
    context = ""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(inner).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {name}: a call cannot pass {parameter} by name; make it an ordinary parameter"
            )
        if parameter.name in bound:
            continue
        kind = hints.get(parameter.name, Any)
        if kind is ToolContext:
            context = parameter.name
            continue
        is_required = parameter.default is parameter.empty
        fields.append((parameter.name, kind) if is_required else (parameter.name, kind, parameter.default))
    try:
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        schema = _schema(name, arguments)
    except TypeError as err:
        raise ConfigError(f"tool {name}: a parameter cannot be shown to a model: {err}") from err
    spec = ToolSpec(name=name, description=inspect.getdoc(inner) or "", parameters=schema)
    return Tool(spec, function, arguments, context)


def _unbound(function: Callable[..., object]) -> tuple[Callable[..., object], frozenset[str]]:
    """The function inside a `partial`, and the names of the arguments that are bound."""
    if not isinstance(function, partial):
        return function, frozenset()
    bound = cast("partial[object]", function)
    return bound.func, frozenset(bound.keywords)


def _schema(name: str, arguments: type[msgspec.Struct]) -> str:
    """The JSON schema of a function's parameters, with the schemas of other structs in `$defs`."""
    _, components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    own = {key: value for key, value in components.pop(name).items() if key != "title"}
    schema = {**own, "$defs": components} if components else own
    return msgspec.json.encode(schema).decode()


async def run_call(
    tools: Mapping[str, Tool], call: ToolCall, *, context: ToolContext, timeout_s: float, max_chars: int
) -> ToolResult:
    """Runs one call and returns what the model is told about it, at most `max_chars` of it.

    Raises: RolloutError if the tool raises it.
    """
    tool = tools.get(call.name)
    if call.problem:
        return ToolResult(f"error: {call.problem}", is_error=True)
    if tool is None:
        return ToolResult(f"error: no tool {call.name!r}; there are {', '.join(tools)}", is_error=True)
    try:
        checked = msgspec.convert(call.arguments, tool.arguments)
    except msgspec.ValidationError as err:
        return ToolResult(f"error: {err}", is_error=True)
    # Only arguments that the model gave are passed: the function has its own defaults for the others.
    given = {key: getattr(checked, key) for key in call.arguments}
    if tool.context:
        given[tool.context] = context
    try:
        async with tool.turns or contextlib.nullcontext(), asyncio.timeout(timeout_s):
            value = await _called(tool.function, given)
    except RolloutError:
        raise
    except TimeoutError:
        return ToolResult(f"error: the call took longer than {timeout_s:g} s", is_error=True, is_late=True)
    except ToolFailedError as err:
        return ToolResult(shorten(f"error: {err}", max_chars), is_error=True)
    except (Exception, SystemExit, KeyboardInterrupt) as err:  # noqa: BLE001 - the model is told
        return ToolResult(shorten(f"error: {type(err).__name__}: {err}", max_chars), is_error=True)
    return ToolResult(shorten(text_of(value), max_chars))


async def _called(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


def shorten(text: str, max_chars: int) -> str:
    """The beginning of a long text, with a word that there is more."""
    return text if len(text) <= max_chars else f"{text[:max_chars]} (cut off)"


def text_of(value: object) -> str:
    """A result as text: a string as it is, other values as JSON, and what JSON cannot express by `str`."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, msgspec.MsgspecError):
        return str(value)

"""Functions that a model calls: their descriptions, the checks of their arguments, and calls with a deadline.

The model sees a function's name, docstring, and annotated parameters. The arguments of a call are checked
against the annotations before the function runs. If a call fails (an unknown tool, wrong arguments, or an
exception), the call's result tells the model so. Only a RolloutError, which means that the tool itself
doesn't work, fails the episode.

An async function runs in the event loop, and any other function runs in a thread. A thread can't be killed,
so run a function that may hang in a process (`tool_process.py`).
"""

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast, get_type_hints

import msgspec

from astraflow.errors import ConfigError, RolloutError
from astraflow.types import Task, ToolSpec
from astraflow.user_input.own_code import ending_forks
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
    """A tool raised an exception in another process. The text is for the model."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The context of a call. A parameter with this annotation is filled in, and models don't see it.

    Example: `def look(place: str, context: ToolContext) -> str`.
    """

    task: Task
    """The task of the episode."""
    episode: str
    """Unique name of the episode. Another attempt at the same episode has another name."""
    state: dict[str, Any] = field(default_factory=dict[str, Any])
    """Data that the tools of one episode share. It exists as long as the episode. Tools that run in a process
    don't share it; they get an empty dict for each call."""


async def _works() -> None:
    """The check of a tool that always works."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function together with the description that the model sees. Make it with `make_tool`."""

    spec: ToolSpec
    function: Callable[..., object]
    arguments: type[msgspec.Struct] | None = None
    """The struct that checks and converts the arguments of a call; None if the function does that itself."""
    context: str = ""
    """Name of the parameter that gets the `ToolContext`; empty if there is none."""
    turns: asyncio.Semaphore | None = None
    """Limits the number of simultaneous calls. The deadline of a waiting call has not begun yet."""
    check: Callable[[], Awaitable[None]] = _works
    """Called after a call was abandoned. Raises: RolloutError if the tool no longer works."""

    def checked(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Converts the arguments of a call. Raises: msgspec.ValidationError."""
        if self.arguments is None:
            return dict(arguments)
        checked = msgspec.convert(arguments, self.arguments)
        # Pass only the arguments that the model gave; the function has its own defaults for the others.
        return {key: getattr(checked, key) for key in arguments}


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call, as the model sees it."""

    text: str
    is_error: bool = False
    is_late: bool = False
    """True if the call was abandoned because it took too long."""


def make_tool(function: Callable[..., object]) -> Tool:
    """Makes a tool from a function. The model doesn't see arguments that `functools.partial` has bound.

    Raises: ConfigError if a parameter doesn't have a name, or has an annotation that JSON can't express.
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
    """Returns the function inside a `partial`, and the names of the bound arguments."""
    if not isinstance(function, partial):
        return function, frozenset()
    bound = cast("partial[object]", function)
    return bound.func, frozenset(bound.keywords)


def _schema(name: str, arguments: type[msgspec.Struct]) -> str:
    """Returns the JSON schema of a function's parameters, with the schemas of other structs in `$defs`."""
    _, components = msgspec.json.schema_components([arguments], ref_template="#/$defs/{name}")
    own = {key: value for key, value in components.pop(name).items() if key != "title"}
    schema = {**own, "$defs": components} if components else own
    return msgspec.json.encode(schema).decode()


async def run_call(
    tools: Mapping[str, Tool], call: ToolCall, *, context: ToolContext, timeout_s: float, max_chars: int
) -> ToolResult:
    """Runs one call and returns its result for the model, cut to `max_chars` characters.

    Raises: RolloutError if the tool raises it.
    """
    tool = tools.get(call.name)
    if call.problem:
        return ToolResult(f"error: {call.problem}", is_error=True)
    if tool is None:
        return ToolResult(f"error: no tool {call.name!r}; there are {', '.join(tools)}", is_error=True)
    try:
        given = tool.checked(call.arguments)
    except msgspec.ValidationError as err:
        return ToolResult(f"error: {err}", is_error=True)
    if tool.context:
        given[tool.context] = context
    try:
        async with tool.turns or contextlib.nullcontext(), asyncio.timeout(timeout_s):
            if inspect.iscoroutinefunction(tool.function):
                value = await tool.function(**given)
            else:
                value = await asyncio.to_thread(ending_forks()(tool.function), **given)
    except RolloutError:
        raise
    except TimeoutError:
        await tool.check()
        return ToolResult(f"error: the call took longer than {timeout_s:g} s", is_error=True, is_late=True)
    except ToolFailedError as err:
        return ToolResult(shorten(f"error: {err}", max_chars), is_error=True)
    except (Exception, SystemExit, KeyboardInterrupt) as err:  # noqa: BLE001 - the model is told
        return ToolResult(shorten(f"error: {type(err).__name__}: {err}", max_chars), is_error=True)
    return ToolResult(shorten(text_of(value), max_chars))


def shorten(text: str, max_chars: int) -> str:
    """Cuts a long text and notes that there is more."""
    return text if len(text) <= max_chars else f"{text[:max_chars]} (cut off)"


def text_of(value: object) -> str:
    """Converts a result to text: strings stay unchanged, and other values become JSON or else `str`."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, msgspec.MsgspecError):
        return str(value)

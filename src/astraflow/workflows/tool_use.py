"""The workflow `tool_use`: a model calls plain Python functions until it answers.

The model is shown a function's name, docstring and annotated parameters. The arguments of a call are checked
against the annotations before the function runs. If a call fails (an unknown tool, wrong arguments, an
exception), the model is told so as the call's result. Only a RolloutError, which says that the tool itself
does not work, fails the episode. A function that is not async runs in a thread. A thread cannot be killed, so
such a function must return by itself.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast, get_type_hints

import msgspec

from astraflow.errors import ConfigError, RolloutError
from astraflow.types import Message, ToolSpec
from astraflow.workflows.calls import CALL_PARSERS, CallParser, ToolCall
from astraflow.workflows.conversation import Policies, Rewards, ScoredTask
from astraflow.workflows.roles import in_parallel, policy_at

__all__ = [
    "Tool",
    "ToolResult",
    "make_tool",
    "run_call",
    "tool_use",
]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function together with the description that the model is shown; `make_tool` makes it."""

    spec: ToolSpec
    function: Callable[..., object]
    arguments: type[msgspec.Struct]
    """The struct that checks and converts the arguments of a call."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told about a call."""

    text: str
    is_error: bool = False


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
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(inner).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"tool {name}: a call cannot pass {parameter} by name; make it an ordinary parameter"
            )
        if parameter.name in bound:
            continue
        kind = hints.get(parameter.name, Any)
        is_required = parameter.default is parameter.empty
        fields.append((parameter.name, kind) if is_required else (parameter.name, kind, parameter.default))
    try:
        arguments = msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)
        schema = _schema(name, arguments)
    except TypeError as err:
        raise ConfigError(f"tool {name}: a parameter cannot be shown to a model: {err}") from err
    return Tool(
        ToolSpec(name=name, description=inspect.getdoc(inner) or "", parameters=schema), function, arguments
    )


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
    tools: Mapping[str, Tool], call: ToolCall, *, timeout_s: float, max_chars: int
) -> ToolResult:
    """Runs one call and returns what the model is told about it.

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
    try:
        async with asyncio.timeout(timeout_s):
            value = await _called(tool.function, given)
    except RolloutError:
        raise
    except TimeoutError:
        return ToolResult(f"error: the call took longer than {timeout_s:g} s", is_error=True)
    except (Exception, SystemExit, KeyboardInterrupt) as err:  # noqa: BLE001 - the model is told
        return ToolResult(_shortened(f"error: {type(err).__name__}: {err}", max_chars), is_error=True)
    return ToolResult(_shortened(_text(value), max_chars))


async def _called(function: Callable[..., object], arguments: Mapping[str, object]) -> object:
    if inspect.iscoroutinefunction(function):
        return await function(**arguments)
    return await asyncio.to_thread(function, **arguments)


def _shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]} (cut off)"


def _text(value: object) -> str:
    """A result as text: a string as it is, other values as JSON, and what JSON cannot express by `str`."""
    if isinstance(value, str):
        return value
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, msgspec.MsgspecError):
        return str(value)


# --- the workflow -----------------------------------------------------------------------------------

_NO_CALLS_LEFT = ToolResult("error: no calls are left; give your answer", is_error=True)


async def tool_use(
    task: ScoredTask,
    policies: Policies,
    *,
    tools: Sequence[Tool],
    policy: str = "",
    parser: str | CallParser = "tagged",
    max_calls: int = 8,
    call_timeout_s: float = 10.0,
    max_result_chars: int = 4096,
    error_cost: float = 0.0,
) -> Rewards:
    """The model calls `tools`, and gets their results as `tool` messages, until it answers without a call.

    The calls of one answer run in parallel. The first answer without a call is scored; after `max_calls`
    calls, the next answer is scored in any case.
    Rewarded: the whole conversation with that score, less `error_cost` for each call that failed.
    Metrics: `tool_calls`, the number of calls; `tool_errors`, the number of calls that failed.
    """
    calls_in = CALL_PARSERS[parser] if isinstance(parser, str) else parser
    tools_by_name = {tool.spec.name: tool for tool in tools}
    chat = policy_at(policies, policy, 0).conversation(
        context=task.context, tools=[tool.spec for tool in tools]
    )
    answer = await chat.say(task.prompt)
    num_calls = 0
    num_errors = 0
    while num_calls < max_calls and (calls := calls_in(answer.reply)):
        allowed = calls[: max_calls - num_calls]
        results = await in_parallel(
            run_call(tools_by_name, call, timeout_s=call_timeout_s, max_chars=max_result_chars)
            for call in allowed
        )
        results += [_NO_CALLS_LEFT] * (len(calls) - len(allowed))
        num_calls += len(allowed)
        num_errors += sum(result.is_error for result in results)
        messages = [
            Message(role="tool", content=result.text, name=call.name)
            for call, result in zip(calls, results, strict=True)
        ]
        answer = await chat.send(messages)
    rewards = Rewards()
    score = await task.score(answer.text)
    rewards.add(chat, score - error_cost * num_errors)
    rewards.set_score(score)
    rewards.add_metric("tool_calls", num_calls)
    rewards.add_metric("tool_errors", num_errors)
    return rewards

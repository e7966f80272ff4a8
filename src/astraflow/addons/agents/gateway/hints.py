"""The reply format that a request asks for (`tool_choice` and `response_format`), as a hint in the prompt.

The format is not enforced. A forced token would not be sampled from the policy's own distribution, so its
logprob would not be the one that the trainer computes. Instead, a line after the newest message asks the
policy for the format. A reply in another format is passed on unchanged, and counted.
"""

import json
from collections.abc import Collection, Sequence

import msgspec

from astraflow.addons.agents.gateway.chat_wire import ChatRequest, bad_request
from astraflow.types import Message
from astraflow.workflows.calls import ToolCall

__all__ = ["Hint", "hint_of"]


class Hint(msgspec.Struct, frozen=True):
    """The reply format that a request asks for.

    Example: `Hint(lines=("Reply with a call of the tool add.",), tool_names=frozenset({"add"}))`.
    """

    lines: tuple[str, ...] = ()
    """The lines for the policy; empty if any reply is valid."""
    tool_names: frozenset[str] = frozenset()
    """The reply must call one of these tools; empty: it need not call any."""
    json_kind: str = ""
    """`json_schema`: the reply must be JSON; `json_object`: a JSON object; empty: any text. A tool call is
    always valid."""

    def add_to(self, new: Sequence[Message], history: Sequence[Message]) -> tuple[Message, ...]:
        """Adds the lines after the last message of `new`, except for those that `history` already shows."""
        texts = [message.content for message in history if message.role != "assistant"]
        lines = [line for line in self.lines if not any(line in text for text in texts)]
        if not lines:
            return tuple(new)
        text = "\n".join(lines)
        if not new or new[-1].role == "assistant":
            return (*new, Message(role="user", content=text))
        last = msgspec.structs.replace(new[-1], content=f"{new[-1].content}\n\n{text}")
        return (*new[:-1], last)

    def is_met_by(self, calls: Collection[ToolCall], text: str) -> bool:
        """Whether a reply has the format. JSON is not validated against its schema; clients do that."""
        if self.tool_names:
            return any(call.name in self.tool_names for call in calls)
        return not self.json_kind or bool(calls) or _is_json(text, self.json_kind)


def hint_of(request: ChatRequest) -> Hint:
    """Makes the hint of a request.

    Raises: RefusedError if it names a tool that it does not define, or an unknown format.
    """
    tool_line, tool_names = _tool_hint(request)
    format_line, json_kind = _format_hint(request)
    lines = tuple(line for line in (tool_line, format_line) if line)
    return Hint(lines, tool_names, json_kind)


def _tool_hint(request: ChatRequest) -> tuple[str, frozenset[str]]:
    """The line for `tool_choice`, and the tools of which the reply must call one."""
    choice = request.tool_choice
    if choice is None or choice == "auto" or choice == "none":
        return "", frozenset()
    names = frozenset(tool.function.name for tool in request.tools or ())
    if choice == "required":
        if not names:
            raise bad_request("tool_choice = required, but the request has no tools")
        return "Reply with a call of one of the tools.", names
    name = _named_tool(choice)
    if name not in names:
        raise bad_request(
            f"tool_choice names the tool {name!r}, but the request has "
            f"{', '.join(sorted(names)) or 'no tools'}"
        )
    return f"Reply with a call of the tool {name}.", frozenset({name})


def _named_tool(choice: str | dict[str, object]) -> str:
    """The tool that a `tool_choice` names. Raises: RefusedError if it names none."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case _:
            raise bad_request(
                'tool_choice must be auto, none, required or {"type": "function", "function": {"name": ...}}',
                "unsupported_value",
            )


def _format_hint(request: ChatRequest) -> tuple[str, str]:
    """The line for `response_format`, and the kind of JSON."""
    wish = request.response_format
    if wish is None or wish.type == "text":
        return "", ""
    if wish.type == "json_object":
        line = "one JSON object, and with nothing else."
    elif wish.type == "json_schema" and wish.json_schema is not None:
        schema = json.dumps(wish.json_schema.schema or {}, ensure_ascii=False)
        line = f"JSON that fits this JSON schema, and with nothing else: {schema}"
    else:
        raise bad_request(
            f"response_format: {wish.type!r} is not a format; expected text, json_object, or json_schema "
            "with a json_schema",
            "unsupported_value",
        )
    has_tools = bool(request.tools) and request.tool_choice != "none"
    reply = "Unless you call a tool, reply" if has_tools else "Reply"
    return f"{reply} with {line}", wish.type


def _is_json(text: str, kind: str) -> bool:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return kind == "json_schema" or isinstance(value, dict)

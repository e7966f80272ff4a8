"""Function calls in a model's text: what a call is, and which formats exist. `added.read_calls` reads them.

A call names a tool that was offered. One that can't be read, or that names another tool, has a `problem`,
which the model is told, so it can correct the call. In formats without tags, it is an answer instead.

Calls inside of reasoning (`types.model_text`) are ignored. A tag inside of a call's argument is text.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, cast, get_args

from astraflow import added
from astraflow.types.model_text import CALL_OPENINGS, without_reasoning

__all__ = [
    "CALL_PARSERS",
    "CallFormat",
    "CallParser",
    "FormatName",
    "ParserOrName",
    "ToolCall",
    "bare_json_calls",
    "chosen_parser",
    "looks_like_call",
    "offered_calls",
    "tagged_calls",
    "without_reasoning",
]

FormatName = Literal[
    "tagged", "bare_json", "qwen_xml", "glm", "minimax", "deepseek_dsml", "kimi", "deepseek", "mistral",
    "gpt_oss", "pythonic", "lfm2", "olmo3", "gemma", "granite", "phi", "nemotron", "hunyuan", "command",
]  # fmt: skip
"""How a family of models writes calls. `added.read_calls` reads each of them."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call as the model wrote it.

    If the call cannot be read, `problem` says why. The model gets this text, so it can correct the call.
    """

    name: str = ""
    arguments: Mapping[str, object] = field(default_factory=dict[str, object])
    problem: str = ""
    start: int = field(default=0, compare=False)
    """Where the call begins in the reply, with its tags."""
    end: int = field(default=0, compare=False)

    def at(self, start: int, end: int) -> "ToolCall":
        """The call with its place in the reply."""
        return replace(self, start=start, end=end)


CallParser: TypeAlias = Callable[[str], Sequence[ToolCall]]
"""Returns the calls in a text, in order; empty if the text is an answer."""
ParserOrName: TypeAlias = CallParser | str
"""A parser, the name of a format, or `auto`: the format that the policy's chat template prints."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A built-in parser. Example: `CallFormat("tagged")('<tool_call>{"name": "f", "arguments": {}}')`."""

    name: FormatName

    def __call__(self, text: str) -> tuple[ToolCall, ...]:
        """The calls in a text, outside of its reasoning."""
        return self.read(without_reasoning(text))

    def read(self, reply: str, schemas: Mapping[str, str] = MappingProxyType({})) -> tuple[ToolCall, ...]:
        """The calls in a reply. `schemas`: tool -> JSON schema, for arguments that are plain text."""
        return added.read_calls(self.name, reply, schemas)


CALL_PARSERS: dict[str, CallFormat] = {name: CallFormat(name) for name in get_args(FormatName)}
"""Parsers by their names in recipes."""
tagged_calls = CALL_PARSERS["tagged"]
bare_json_calls = CALL_PARSERS["bare_json"]
_WITHOUT_TAGS = (bare_json_calls, CALL_PARSERS["pythonic"])
_JSON_START = re.compile(r"(?:```\w*\s*)?(?:[{]|\[\s*[{])")


def chosen_parser(parser: ParserOrName, own: FormatName) -> CallParser:
    """The parser for a policy whose chat template prints calls in the format `own`."""
    if isinstance(parser, str):
        return CALL_PARSERS[own if parser == "auto" else parser]
    return parser


def offered_calls(parser: CallParser, reply: str, offered: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls in a reply; none if it has no tags and doesn't name `offered` tools.

    `offered`: the names of the tools. If it maps them to JSON schemas, arguments that the model wrote as
    plain text get their types. In tags, a call of another tool stays, with a problem, because it can't be
    anything else.
    """
    # A reply may mention the tags of reasoning, so it isn't searched for reasoning again.
    if isinstance(parser, CallFormat):
        calls = parser.read(reply, _schemas_in(offered))
        has_tags = parser not in _WITHOUT_TAGS
    else:
        calls = tuple(parser(reply))
        has_tags = not reply.startswith(("{", "["))
    if calls and not has_tags:
        names = {call.name for call in calls if not call.problem}
        if not (names <= set(offered) if names else looks_like_call(reply, offered)):
            return ()
    tools = ", ".join(offered) or "none"
    return tuple(
        call
        if call.problem or call.name in offered
        else replace(call, problem=f"no tool {call.name!r}; there are {tools}")
        for call in calls
    )


def _schemas_in(offered: Collection[str]) -> Mapping[str, str]:
    return cast("Mapping[str, str]", offered) if isinstance(offered, Mapping) else {}


def looks_like_call(reply: str, offered: Collection[str]) -> bool:
    """Whether a reply looks like a call of an `offered` tool, in any of the formats that models write."""
    if not offered or any(opening in reply for opening in CALL_OPENINGS):
        return bool(offered)
    if _JSON_START.match(reply):
        return any(f'"{name}"' in reply for name in offered)
    return reply.startswith(tuple(f"{bracket}{name}(" for name in offered for bracket in ("", "[")))

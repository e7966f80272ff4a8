"""Finds out what a folder's chat template does with tools: whether it shows them, in which format it prints
calls, and whether it drops past reasoning. It loads no tokenizer."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, cast

from astraflow.addons.formats.readers import FORMATS
from astraflow.errors import DataError
from astraflow.models.chat_template import readable_args, template_environment, template_texts
from astraflow.models.template_limits import within_limit
from astraflow.types.model_text import without_reasoning
from astraflow.user_input.user_files import json_object
from astraflow.workflows.calls import CALL_PARSERS, FormatName

__all__ = ["TemplateReport", "call_format", "examine_template", "special_tokens"]

_Render: TypeAlias = Callable[..., str]
"""Renders messages. `tools`: whether with the tool; `is_open`: whether with the opening of the next reply."""

_REPLY = "forty-two"
_USER = {"role": "user", "content": "What is it?"}
_NAME = "look_up"
_SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "description": "What to look up."},
        "number": {"type": "integer", "description": "How many."},
        "places": {"type": "array", "items": {"type": "string"}, "description": "Where."},
    },
    "required": ["text"],
}
_TOOL = {
    "type": "function",
    "function": {"name": _NAME, "description": "Looks up a text.", "parameters": _SCHEMA},
}
_ARGUMENTS: Mapping[str, object] = {"text": "of mice & men, 5", "number": 5, "places": ["a", 1]}
_IDS = ("abcdef123", f"functions.{_NAME}:0")
"""Ids of the call: Mistral's templates want nine letters and digits, and Kimi's print the id as the name."""


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What a chat template does. A text is empty if there is nothing to report."""

    format: FormatName | None = None
    """The format in which it prints calls; None if it prints none, or no format reads them."""
    error: str = ""
    """Why it renders no prompt."""
    hides_tools: str = ""
    """Why the model doesn't see its tools."""
    unread: str = ""
    """A call as the template prints it, which no format reads; empty too if it prints none."""
    drops_reasoning: bool = False
    """Whether it drops the reasoning of a reply before the next message of the user."""


@lru_cache(64)
def call_format(folder: Path, template_args: str) -> FormatName:
    """The format of a folder's calls; `tagged` if the template shows none. `template_args`: JSON."""
    return examine_template(folder, json.loads(template_args)).format or "tagged"


def examine_template(folder: Path, template_args: Mapping[str, object]) -> TemplateReport:
    """Renders a prompt, a tool, a call, and a past reply with reasoning, and reads the call back.

    Raises: DataError if a file of the folder is not valid JSON.
    """
    texts = template_texts(folder)
    if not texts:
        return TemplateReport(error="the folder has no chat template; add chat_template.jinja")
    main = texts.get("default")
    if main is None:
        names = ", ".join(texts)
        return TemplateReport(error=f"the folder has templates named {names}, but none named default")
    special = special_tokens(folder)

    def render(*messages: Mapping[str, Any], tools: bool = True, is_open: bool = False) -> str:
        given = {"messages": messages, "tools": [_TOOL] if tools else None, "add_generation_prompt": is_open}
        parts = {**special, **given, **template_args}
        text = texts.get("tool_use", main) if tools else main  # as transformers chooses it
        return within_limit(lambda: template_environment().from_string(text).render(parts))

    try:
        prompt = render(_USER, tools=False, is_open=True)
    except DataError as err:
        names = sorted(readable_args(main, folder) - template_args.keys())
        unset = f"; it reads {', '.join(names)}, which template_args could set" if names else ""
        return TemplateReport(error=f"{err}{unset}")
    drops_reasoning = _drops_reasoning(render)
    try:
        shown = render(_USER, is_open=True)
        problem = "" if _NAME in shown else "it doesn't show them, so the model wouldn't know about them"
    except DataError as err:
        shown = ""
        problem = str(err)
    if problem:
        return TemplateReport(hides_tools=problem, drops_reasoning=drops_reasoning)
    printed = list(_printed_calls(render, shown))
    read: FormatName | None = next((form for text in printed if (form := _format_of(text))), None)
    if not printed:
        read = _described_format(shown, prompt)
    return TemplateReport(
        read,
        unread=printed[0] if printed and not read else "",
        drops_reasoning=drops_reasoning,
    )


def _printed_calls(render: _Render, shown: str) -> Iterator[str]:
    """What a template prints for a call, for each way to pass it. Nothing if it prints no call.

    A template doesn't say where a reply begins, so there are several texts for each way. `shown`: the prompt.
    """
    for call_id in _IDS:
        for arguments in (_ARGUMENTS, json.dumps(_ARGUMENTS)):
            function = {"name": _NAME, "arguments": arguments}
            calls = [{"id": call_id, "type": "function", "function": function}]
            try:
                text = render(_USER, {"role": "assistant", "content": "", "tool_calls": calls})
                plain = render(_USER, {"role": "assistant", "content": _REPLY})
                closed = render(_USER)
            except DataError:
                continue
            head, _, tail = plain.partition(_REPLY)
            starts = {_common(text, before) for before in (shown, closed, head)}
            replies = [text[start:].removesuffix(tail).strip() for start in sorted(starts, reverse=True)]
            if str(_ARGUMENTS["text"]) in replies[-1]:
                yield from replies


def _common(text: str, other: str) -> int:
    """The length of the beginning that two texts have in common."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((idx for idx, (one, two) in pairs if one != two), min(len(text), len(other)))


def _format_of(reply: str) -> FormatName | None:
    """The format that reads the call; None if there is none."""
    for parser in CALL_PARSERS.values():
        calls = parser.read(without_reasoning(reply), {_NAME: json.dumps(_SCHEMA)})
        if [(call.name, call.arguments, call.problem) for call in calls] == [(_NAME, _ARGUMENTS, "")]:
            return parser.name
    return None


def _described_format(shown: str, prompt: str) -> FormatName | None:
    """The format that a prompt describes in words. `prompt`: the prompt without tools."""
    described: list[FormatName] = [
        parser.name
        for parser in CALL_PARSERS.values()
        for text in (FORMATS[parser.name].mark, FORMATS[parser.name].hint)
        if text and text in shown and text not in prompt
    ]
    described.sort(key=lambda name: name == "tagged")  # other formats contain <tool_call> too
    return described[0] if described else None


def _drops_reasoning(render: _Render) -> bool:
    """Whether the reasoning of a reply is gone once the user says more."""
    reply = {"role": "assistant", "content": f"<think>\n{_REPLY}\n</think>\n\nYes."}
    try:
        return _REPLY not in render(_USER, reply, _USER, tools=False)
    except DataError:
        return False


def special_tokens(folder: Path) -> dict[str, str]:
    """The special tokens that templates print, by their names. Raises: DataError if a file isn't JSON."""
    tokens: dict[str, str] = {}
    for key, value in json_object(folder / "tokenizer_config.json").items():
        text = cast("dict[str, object]", value).get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):  # `add_bos_token` is a bool
            tokens[key] = text
    return tokens

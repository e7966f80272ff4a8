"""Finds where the reasoning in a model's text ends and its reply begins.

Everything that has to know it asks here: the parsers of calls, the scorers, the gateway, and the viewer.

- Reasoning is the text from the first opening tag to the first closing tag after it. All other text is the
  reply, including tags that it mentions later.
- A closing tag without an opening tag ends reasoning that the prompt opened.
- Reasoning that has no closing tag takes the rest of the text, so there may be no reply.
- A tag in quotes, in backticks, or in an argument of a call is plain text. Outside of reasoning, so is a tag
  that stands in a sentence like a word: `Use the <think> tag.`
- A text in channels, as gpt-oss writes it, is a series of messages with headers. Those of the channel
  `analysis` are reasoning, those to a function are calls, and the rest is the reply, without its headers.
"""

# ruff: noqa: RUF001 - DeepSeek's own bars

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "CALL_OPENINGS",
    "REASONING_TAGS",
    "ChannelMessage",
    "Reasoning",
    "channel_messages",
    "find_reasoning",
    "past_separators",
    "with_opening",
    "without_reasoning",
]

REASONING_TAGS = {
    **{
        f"<{name}>": f"</{name}>" for name in ("think", "thinking", "seed:think", "mm:think", "longcat_think")
    },
    "[THINK]": "[/THINK]",
    "<|channel>thought": "<channel|>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "◁think▷": "◁/think▷",
}
"""Closing tags of reasoning by their opening tags."""
CALL_OPENINGS = (
    *("<tool_call", "<function=", "<function_calls>", "<invoke", "<minimax:tool_call>", "<seed:tool_call>"),
    *("[TOOL_CALLS]", "<TOOLCALL>", "functools[", "<|python_", "<|tool_call", "<|START_ACTION|>"),
    *("<｜tool▁call", "<｜DSML｜", "<start_function_call>", "to=functions.", "<|channel|>commentary"),
)
"""How calls begin, in the formats of `workflows.calls` and in others."""
_BEFORE_JSON = (
    *("<tool_call>", "<|tool_call|>", "[TOOL_CALLS]", "[ARGS]", "<TOOLCALL>", "<tool_calls>", "functools"),
    *("<|tool_call_argument_begin|>", "<｜tool▁sep｜>", "```json", "<|START_ACTION|>"),
)
_NEXT = r"(?=\s*(?:</?(?:parameter|function|invoke|arg_key|tool_call)\b|</?｜DSML｜|$))"
_ARGUMENTS = {
    "<parameter": re.compile(f"</parameter>{_NEXT}"),
    "<｜DSML｜parameter": re.compile(f"</｜DSML｜parameter>{_NEXT}"),
    "<arg_value>": re.compile(f"</arg_value>{_NEXT}"),
    '<|"|>': re.compile(re.escape('<|"|>')),
    "<|tool_call_start|>": re.compile(r"<\|tool_call_end\|>"),
    "<function_calls>": re.compile("</function_calls>"),
}
"""The ends of arguments that aren't JSON, by what precedes them. A closing tag inside of one is text."""

_OPENINGS = {closing: opening for opening, closing in REASONING_TAGS.items()}
_MARK = re.compile("[<[◁]")
"""How each tag begins. Most replies have none, so they are read at once."""
_TAG = re.compile("|".join(map(re.escape, (*REASONING_TAGS, *_OPENINGS, *_ARGUMENTS, *_BEFORE_JSON))))
_HEADER = re.compile(
    r"\s*+(?:<\|start\|>assistant\s*+)?(to=[^\s<]++\s*+)?<\|channel\|>\s*+(\w++)(\s++to=[^\s<]++)?[^<]{0,64}"
    r"(?:<\|constrain\|>[^<]{0,64})?<\|message\|>"
)
_MESSAGE_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|(?=<\|channel\|>)")
_PYTHON_CALL = re.compile(r"\s*(?:<\|python_(?:tag|start)\|>)?\[\w[\w.]*\(")
_BETWEEN = re.compile(r"(?:[\s;,]|<\|python_(?:tag|start|end)\|>)*")
"""Text that may precede a call. Llama 3 and 4 write the tags before calls, and separate calls with `;`."""
_DECODER = json.JSONDecoder(strict=False)
_AFTER_MENTION = frozenset(("", *" \t.,;:!?)"))


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning in a text, including its tags."""

    start: int
    end: int
    is_finished: bool = True
    """Whether a closing tag ends it."""
    opening: str = ""
    """The opening tag that the prompt had instead of the text; empty if the text has it."""
    text_start: int = 0
    """Where the reasoning begins and ends without its tags."""
    text_end: int = 0

    def text_in(self, text: str) -> str:
        """The reasoning without its tags."""
        return text[self.text_start : self.text_end]


def find_reasoning(text: str, *, begins_inside: bool = False) -> Reasoning | None:
    """Finds the reasoning in a text. `begins_inside`: the prompt ended with a tag, which it may repeat."""
    if not begins_inside and not _MARK.search(text):
        return None
    if messages := channel_messages(text):
        return next((each.place for each in messages if each.is_reasoning), None)
    tags = list(_tags(text))
    if begins_inside:
        ends = [REASONING_TAGS[tag] for tag in REASONING_TAGS if text.startswith(tag)] or _OPENINGS
        return _reasoning(text, None, next((tag for tag in tags if tag[0] in ends), None))
    next_tags: dict[str, re.Match[str]] = {}
    closings: list[re.Match[str] | None] = []
    for tag in reversed(tags):
        closings.append(next_tags.get(REASONING_TAGS.get(tag[0], "")))
        next_tags[tag[0]] = tag
    pos = 0
    for tag, closing in zip(tags, reversed(closings), strict=True):
        if tag.start() < pos:
            continue
        is_mentioned = _is_mentioned(text, tag)
        if tag[0] in _OPENINGS and not is_mentioned:
            return _reasoning(text, None, tag, opening=_OPENINGS[tag[0]])
        if tag[0] in REASONING_TAGS:
            if not is_mentioned or (closing and not _is_mentioned(text, closing)):
                return _reasoning(text, tag, closing)
            pos = closing.end() if closing else pos
    return None


def _reasoning(
    text: str, tag: re.Match[str] | None, closing: re.Match[str] | None, opening: str = ""
) -> Reasoning:
    """The reasoning between two tags. The text may lack the first, and an unfinished one the second."""
    return Reasoning(
        start=tag.start() if tag else 0,
        end=closing.end() if closing else len(text),
        is_finished=closing is not None,
        opening=opening,
        text_start=tag.end() if tag else 0,
        text_end=closing.start() if closing else len(text),
    )


@dataclass(frozen=True, slots=True)
class ChannelMessage:
    """One message of a text in channels."""

    is_reasoning: bool
    is_call: bool
    place: Reasoning
    """Where it is; `text_start` is the end of its header."""


def channel_messages(text: str) -> list[ChannelMessage]:
    """The messages of a text in channels; empty for any other text. The first one begins with its header."""
    messages: list[ChannelMessage] = []
    header = _HEADER.match(text)
    while header:
        is_call = bool(header[1] or header[3])
        ending = _MESSAGE_END.search(text, _past_json(text, header.end()) if is_call else header.end())
        place = _reasoning(text, header, ending)
        messages.append(ChannelMessage(header[2] == "analysis" and not is_call, is_call, place))
        header = _HEADER.match(text, place.end)
    return messages


def without_reasoning(text: str, *, begins_inside: bool = False) -> str:
    """The text without its reasoning, and without white space around it."""
    if messages := channel_messages(text):
        rest = text[messages[-1].place.end :]
        parts = [
            text[each.place.start : each.place.end] if each.is_call else each.place.text_in(text)
            for each in messages
            if not each.is_reasoning
        ]
        return "\n".join([part.strip() for part in (*parts, rest) if part.strip()])
    reasoning = find_reasoning(text, begins_inside=begins_inside)
    rest = text[: reasoning.start] + text[reasoning.end :] if reasoning else text
    return rest.strip()


def with_opening(text: str) -> str:
    """The text with the opening tag of its reasoning, which the prompt may have had instead."""
    reasoning = find_reasoning(text)
    return f"{reasoning.opening}\n{text}" if reasoning and reasoning.opening else text


def past_separators(text: str, pos: int) -> int:
    """The position after the separators at `pos`, of which there may be none."""
    separators = _BETWEEN.match(text, pos)
    return separators.end() if separators else pos


def _tags(text: str) -> Iterator[re.Match[str]]:
    """The tags of reasoning in a text, other than those in quotes and in the arguments of calls."""
    if _PYTHON_CALL.match(text):
        return
    pos = _past_json(text, 0)
    while tag := _TAG.search(text, pos):
        pos = tag.end()
        quote = text[tag.start() - 1 : tag.start()]
        if tag[0] in _BEFORE_JSON:
            pos = _past_json(text, pos)
        elif tag[0] in _ARGUMENTS:
            pos = _past_argument(text, pos, tag[0])
        elif quote not in {"`", '"', "'"} or not text.startswith(quote, pos):
            yield tag


def _past_argument(text: str, pos: int, opening: str) -> int:
    """The position after an argument that begins at `pos`; `pos` if it doesn't end before the next one."""
    following = text.find(opening, pos) if _ARGUMENTS[opening].pattern != re.escape(opening) else -1
    end = _ARGUMENTS[opening].search(text, pos, following if following >= 0 else len(text))
    return end.end() if end else pos


def _past_json(text: str, pos: int) -> int:
    """The position after the JSON objects and lists that begin at `pos`, and the separators around them."""
    pos = past_separators(text, pos)
    while text.startswith(("{", "["), pos):
        try:
            pos = past_separators(text, _DECODER.raw_decode(text, pos)[1])
        except (ValueError, RecursionError):
            break
    return pos


def _is_mentioned(text: str, tag: re.Match[str]) -> bool:
    """Whether a tag stands in a sentence like a word: after text and a space, and before a space or
    punctuation."""
    start = tag.start()
    while start and text[start - 1] in " \t(":
        start -= 1
    follows_text = 0 < start < tag.start() and text[start - 1] != "\n"
    return follows_text and text[tag.end() : tag.end() + 1] in _AFTER_MENTION

"""Finds where the reasoning in a model's text ends and its reply begins.

Everything that has to know it asks here: the parsers of calls, the scorers, the gateway, and the viewer.

- Reasoning is the text from the first opening tag to the first closing tag after it. All other text is the
  reply, including tags that it mentions later.
- A closing tag without an opening tag ends reasoning that the prompt opened.
- Reasoning that has no closing tag takes the rest of the text, so there may be no reply.
- A tag in quotes, in backticks, or in the JSON of a call is plain text. Outside of reasoning, so is a tag
  that stands in a sentence like a word: `Use the <think> tag.`
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "REASONING_TAGS",
    "Reasoning",
    "find_reasoning",
    "past_separators",
    "with_opening",
    "without_reasoning",
]

REASONING_TAGS = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}
"""Closing tags of reasoning by their opening tags."""

_OPENINGS = {closing: opening for opening, closing in REASONING_TAGS.items()}
_CALL = "<tool_call>"
_TAG = re.compile("|".join(map(re.escape, (*REASONING_TAGS, *_OPENINGS, _CALL))))
_BETWEEN = re.compile(r"(?:[\s;,]|<\|python_tag\|>)*")
"""Text that may precede a call. Llama 3 writes the tag before calls, and separates calls with `;`."""
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


def find_reasoning(text: str, *, begins_inside: bool = False) -> Reasoning | None:
    """Finds the reasoning in a text. `begins_inside`: the prompt ended with <think>."""
    tags = list(_tags(text))
    if begins_inside:
        end = next((tag.end() for tag in tags if tag[0] == "</think>"), None)
        return Reasoning(0, end or len(text), is_finished=end is not None)
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
            return Reasoning(0, tag.end(), opening=_OPENINGS[tag[0]])
        if tag[0] in REASONING_TAGS:
            if not is_mentioned or (closing and not _is_mentioned(text, closing)):
                end = closing.end() if closing else len(text)
                return Reasoning(tag.start(), end, is_finished=closing is not None)
            pos = closing.end() if closing else pos
    return None


def without_reasoning(text: str, *, begins_inside: bool = False) -> str:
    """The text without its reasoning, and without white space around it."""
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
    """The tags of reasoning in a text, other than those in quotes and in the JSON of calls."""
    pos = _past_json(text, 0)
    while tag := _TAG.search(text, pos):
        pos = tag.end()
        quote = text[tag.start() - 1 : tag.start()]
        if tag[0] == _CALL:
            pos = _past_json(text, pos)
        elif quote not in {"`", '"', "'"} or not text.startswith(quote, pos):
            yield tag


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

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
    """Finds the reasoning in a text. `begins_inside`: the prompt ended with the opening tag."""
    if begins_inside:
        return _to_closing(text, 0, _find_closing(text, 0, "</think>"))
    if not _TAG.search(text):
        return None
    last_closings = {tag[0]: tag.start() for tag in _TAG.finditer(text) if _closes(text, tag)}
    pos = _past_json(text, 0)
    while tag := _TAG.search(text, pos):
        pos = tag.end()
        is_mentioned = _is_mentioned(text, tag)
        if tag[0] == _CALL:
            pos = _past_json(text, pos)
        elif _is_quoted(text, tag):
            continue
        elif tag[0] in _OPENINGS:
            if not is_mentioned:
                return Reasoning(0, pos, opening=_OPENINGS[tag[0]])
        else:
            closing = REASONING_TAGS[tag[0]]
            # Without a closing tag, each search would read the whole text.
            end = _find_closing(text, pos, closing) if last_closings.get(closing, -1) >= pos else None
            if not is_mentioned or (end and not _is_mentioned(text, end)):
                return _to_closing(text, tag.start(), end)
            pos = end.end() if end else pos
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
    found = _BETWEEN.match(text, pos)
    return found.end() if found else pos


def _find_closing(text: str, pos: int, closing: str) -> re.Match[str] | None:
    tags = (tag for tag in _TAG.finditer(text, pos) if tag[0] == closing and not _is_quoted(text, tag))
    return next(tags, None)


def _to_closing(text: str, start: int, closing: re.Match[str] | None) -> Reasoning:
    """The reasoning from `start` to a closing tag; without one, to the end of the text."""
    return Reasoning(start, closing.end()) if closing else Reasoning(start, len(text), is_finished=False)


def _past_json(text: str, pos: int) -> int:
    """The position after the JSON objects and lists that begin at `pos`, and the separators around them."""
    pos = past_separators(text, pos)
    while text.startswith(("{", "["), pos):
        try:
            _, end = _DECODER.raw_decode(text, pos)
        except (ValueError, RecursionError):
            break
        pos = past_separators(text, end)
    return pos


def _closes(text: str, tag: re.Match[str]) -> bool:
    return tag[0] in _OPENINGS and not _is_quoted(text, tag)


def _is_quoted(text: str, tag: re.Match[str]) -> bool:
    before = text[tag.start() - 1 : tag.start()]
    return before in {"`", '"', "'"} and text.startswith(before, tag.end())


def _is_mentioned(text: str, tag: re.Match[str]) -> bool:
    """Whether a tag stands in a sentence like a word: after text and a space, and before a space or
    punctuation."""
    start = tag.start()
    while start and text[start - 1] in " \t(":
        start -= 1
    follows_text = 0 < start < tag.start() and text[start - 1] != "\n"
    return follows_text and text[tag.end() : tag.end() + 1] in _AFTER_MENTION

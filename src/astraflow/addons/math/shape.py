"""Determines the shape of an answer: one value, several values, a set, or an ordered tuple or interval.

The shape is determined before any values are compared. One of two answers is therefore not taken for both, a
pair not for a number, and a closed interval not for an open one.
"""

import re
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Shape",
    "shape_of",
]

_OPENING = frozenset({"(", "[", "{", r"\{", r"\langle", r"\lfloor", r"\lceil"})
_CLOSING = frozenset({")", "]", "}", r"\}", r"\rangle", r"\rfloor", r"\rceil"})
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[^\\]", re.DOTALL)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_CONJUNCTION = re.compile(
    r",?\s*(?:\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|\\(?:lor|vee|land|wedge)(?![A-Za-z]))\s*,?"
)
_MEMBER = re.compile(r"^\s*\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*\\in(?![A-Za-z])\s*")
_TEXT_SPAN = re.compile(r"\\text\{[^{}]*\}")
_TEXT_CONJUNCTION = re.compile(r"(?<=\w)\s*(?:,?\s+(?:and|or)\s+|,\s*)(?=\w[^{}]*\})")
"""A comma, `and` or `or` inside `\\text{}`; each part then gets its own `\\text{}`."""
_SIGN = re.compile(r"\\pm(?![A-Za-z])|\\mp(?![A-Za-z])")


@dataclass(frozen=True, slots=True)
class Shape:
    """An answer taken apart. Example: `(1, 2]` is `Shape("tuple", ("1", "2"), "(]")`."""

    kind: Literal["value", "several", "set", "tuple"]
    items: tuple[str, ...]
    """The texts of the parts; a value has one part, itself."""
    brackets: str = ""
    """The opening and closing bracket of a tuple; empty for other shapes."""


def shape_of(text: str) -> Shape:
    """The shape of a tidy answer. Outside brackets, a comma before three digits separates thousands."""
    text = _TEXT_SPAN.sub(lambda group: _TEXT_CONJUNCTION.sub(r"}; \\text{", group.group()), text)
    text = _strip_name(_MEMBER.sub("", text).strip())
    while (inner := _inside(text)) is not None:
        brackets, content = inner
        if brackets == r"\{\}":
            return _set(content)
        items = _parts(content)
        if len(items) > 1:
            return Shape("tuple", items, brackets)
        if brackets != "()" or not content.strip():
            return Shape("value", (text,))
        text = content.strip()
    text = _THOUSANDS.sub(lambda number: number.group().replace(",", ""), text)
    several = _parts(_CONJUNCTION.sub(";", text))
    if len(several) == 1:
        several = _both_signs(several[0])
    elif any(_SIGN.search(part) for part in several):
        several = tuple(value for part in several for value in _both_signs(part))
    return Shape("several" if len(several) > 1 else "value", several)


def _strip_name(text: str) -> str:
    """The right side of an equation that names brackets, as `(x, y) = (1, 2)`; other texts are unchanged."""
    name, _, content = text.rpartition("=")
    content = content.strip()
    if name and len(_parts(name)) == 1 and _inside(content) is not None:
        return content
    return text


def _set(content: str) -> Shape:
    """The shape of a set in braces. A set that is given by a condition is a single value."""
    if re.search(r"\\mid(?![A-Za-z])|[|:]", content):
        return Shape("value", (rf"\{{{content}\}}",))
    items = _parts(_CONJUNCTION.sub(";", content))
    return Shape("set", tuple(value for item in items for value in _both_signs(item)))


def _both_signs(text: str) -> tuple[str, ...]:
    """Both values of `a \\pm b`; a `\\mp` next to it takes the opposite sign. Other texts are one value."""
    if not re.search(r"\\pm(?![A-Za-z])", text):
        return (text,)
    plus = re.sub(r"\\mp(?![A-Za-z])", "-", re.sub(r"\\pm(?![A-Za-z])", "+", text))
    minus = re.sub(r"\\mp(?![A-Za-z])", "+", re.sub(r"\\pm(?![A-Za-z])", "-", text))
    return (re.sub(r"(^|=)\s*\+", r"\1 ", plus).strip(), minus)


def _inside(text: str) -> tuple[str, str] | None:
    """The brackets and the content of a text that one pair of brackets encloses; None for other texts."""
    tokens = [(token.group(), token.start(), token.end()) for token in _TOKEN.finditer(text)]
    if len(tokens) < 2 or tokens[0][0] not in ("(", "[", r"\{", r"\langle"):
        return None
    closing = tokens[-1][0]
    if closing not in (")", "]", r"\}", r"\rangle"):
        return None
    depth = 0
    for token, _, end in tokens:
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and end != len(text):
            return None
    brackets = tokens[0][0] + closing
    content = text[tokens[0][2] : tokens[-1][1]]
    return ("()" if brackets == r"\langle\rangle" else brackets), content


def _parts(text: str) -> tuple[str, ...]:
    """The parts of a text between its outermost commas and semicolons."""
    parts: list[str] = [""]
    depth = 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth == 0 and token in (",", ";"):
            parts.append("")
        else:
            parts[-1] += token
    return tuple(part.strip() for part in parts if part.strip()) or (text.strip(),)

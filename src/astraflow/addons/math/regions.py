r"""Writes intervals and sets by a condition in one way.

`]1,4[` is `(1,4)`, `[1;4]` in a union is `[1,4]`, and `\{x \mid x > 2\}` is `x > 2`. A set of whole numbers
by a condition stays as it is: the same condition describes more real numbers.
"""

import re

__all__ = ["plain_regions"]

_JOINT = re.compile(r"(\\(?:cup|cap|setminus)(?![A-Za-z]))")
_NAME = re.compile(r"^\s*(?:[A-Za-z]\w*\s*(?:=|\\in(?![A-Za-z]))\s*)?")
_END = r"(?:[^\[\](),;{}]|\([^()]*\)|\{(?:[^{}]|\{[^{}]*\})*\})+"
_INTERVAL = re.compile(rf"\s*([\[\](])\s*({_END})\s*[,;]\s*({_END})\s*([\[\])])\s*")
_SET = re.compile(
    r"^(?P<name>\s*(?:[A-Za-z]\w*\s*(?:=|\\in(?![A-Za-z]))\s*)?)\\\{\s*(?P<variable>[A-Za-z])\s*"
    r"(?:\\in\s*(?P<domain>\\mathbb\{R\}|R)\s*)?(?:\\(?:mid|vert|middle\s*\|)(?![A-Za-z])|\||:)\s*(?P<condition>.+?)\\\}\s*$"
)
_OR = re.compile(r"\\text\{\s*or\s*\}|(?<![A-Za-z])or(?![A-Za-z])|,|\\lor(?![A-Za-z])")
_OPENING = {"[": "[", "]": "(", "(": "("}
_CLOSING = {"]": "]", "[": ")", ")": ")"}
_ORDER = re.compile(r"[<>=]|\\(?:le|ge|neq)(?![A-Za-z])")


def plain_regions(text: str) -> str:
    """A tidy text with its intervals between `(` or `[` and `)` or `]`, and without a set's braces."""
    if "\\{" in text:
        text = _condition(text)
    if "[" in text or "]" in text:
        text = _intervals(text)
    return text


def _intervals(text: str) -> str:
    """Rewrites `]` before an interval as `(`, and `[` after it as `)`. Other texts are unchanged."""
    name = _NAME.match(text)
    start = name.end() if name else 0
    parts = _JOINT.split(text[start:])
    intervals = [_INTERVAL.fullmatch(part) for part in parts[::2]]
    if None in intervals:
        return text
    matches = [match for match in intervals if match is not None]
    is_reversed = any(match[1] == "]" or match[4] == "[" for match in matches)
    if not is_reversed and len(matches) == 1:
        return text  # perhaps a pair in square brackets
    parts[::2] = [
        f"{_OPENING[match[1]]}{match[2].strip()},{match[3].strip()}{_CLOSING[match[4]]}" for match in matches
    ]
    return text[:start] + " ".join(parts)


def _condition(text: str) -> str:
    r"""The condition `x > 2` of a set of real numbers `\{x \mid x > 2\}`; other texts are unchanged."""
    match = _SET.match(text)
    if match is None or _ORDER.search(match["condition"]) is None:
        return text
    condition = match["condition"].strip()
    letters = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", condition))
    if match["variable"] not in letters or re.search(r"\\in(?![A-Za-z])|\\mathbb|\\[{}]", condition):
        return text
    if _ORDER.search(condition.replace("=", "")) is not None:
        return condition
    values = [re.fullmatch(r"\s*[A-Za-z]\s*=(.+)", part) for part in _OR.split(condition)]
    if None in values:
        return text
    return rf"\{{{','.join(match[1] for match in values if match is not None)}\}}"

"""Finds the fenced blocks in a reply, such as its programs or shell commands.

Fences are those of Markdown: at least three backticks or tildes, possibly indented or after the mark of a
list. Replies often get fences wrong, so these mistakes are read as they are meant: a last fence that is never
closed, an opening fence after text on the same line, and a closing fence before or after text.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["FencedBlock", "fenced_blocks"]

_FENCE = re.compile(
    r"(?P<indent>[\x20\t]*(?:(?:[-*+]|\d{1,3}[.)])[\x20\t]+)?)(?P<fence>`{3,}|~{3,})(?P<info>[^`]*)"
)
_FENCE_AFTER_TEXT = re.compile(r"[^`~]*(?P<indent>)(?P<fence>`{3,})(?P<info>[A-Za-z][\w+#.-]*)[\x20\t]*")
_INFO = re.compile(
    r"\s*(?:|(?P<python>(?i:python|py)\b.*|\S+\.py)|[{.]*(?P<tag>[A-Za-z][\w+#-]*)(?:[.}]\S*|\s*[{:=].*|\s+[\w-]+=.*)?)\s*"
)
"""What follows an opening fence: nothing, or a language and attributes. Other text follows a closing one."""
_MARKDOWN = ("markdown", "md")
_MAX_FENCES = 32
"""Largest number of lines with fences that one block may have."""


@dataclass(frozen=True, slots=True)
class FencedBlock:
    """A fenced block."""

    tag: str
    """The language that the opening fence names, in lower case; empty if it names none."""
    text: str
    start: int
    """Index of the line with the opening fence."""


@dataclass(frozen=True, slots=True)
class _Opening:
    indent: int
    fence: str
    tag: str


def fenced_blocks(text: str, is_whole: Callable[[str, str], bool] | None = None) -> list[FencedBlock]:
    """The fenced blocks of a text that are not blank, in order and without the indentation of their fences.

    `is_whole(tag, text)`: whether a text is a whole program in the language of the tag. If given, a block
    ends at the first closing fence that leaves a whole program, so strings in a program may contain fences.
    Without such a fence, a block ends at the first closing fence or at the next one that names a language.
    """
    lines = text.replace("\r\n", "\n").split("\n")
    marked = [at for at, line in enumerate(lines) if "```" in line or "~~~" in line]
    blocks: list[FencedBlock] = []
    at = 0
    for place, start in enumerate(marked):
        opening = _opening(lines[start]) if start >= at else None
        if opening is None or opening.tag in _MARKDOWN:  # a block of Markdown has blocks of its own
            continue
        content, at = _content(lines, start, marked[place + 1 : place + 1 + _MAX_FENCES], opening, is_whole)
        if content.strip():
            blocks.append(FencedBlock(opening.tag, content, start))
    return blocks


def _opening(line: str) -> _Opening | None:
    match = _FENCE.fullmatch(line) or _FENCE_AFTER_TEXT.fullmatch(line)
    info = _INFO.fullmatch(match["info"]) if match is not None else None
    if match is None or info is None:
        return None
    tag = "python" if info["python"] else info["tag"] or ""
    return _Opening(len(match["indent"]), match["fence"], tag.lower())


def _content(
    lines: list[str],
    start: int,
    marked: Sequence[int],
    opening: _Opening,
    is_whole: Callable[[str, str], bool] | None,
) -> tuple[str, int]:
    """The text of the block that opens at `start`, and the index of the line at which reading continues.

    `marked`: indices of the next lines that may have fences.
    """
    fallback: tuple[int, int] | None = None
    for at in marked:
        rest = _text_before_closing(lines[at], opening.fence)
        if rest is not None and is_whole is not None:
            content = _joined([*lines[start + 1 : at], rest], opening.indent)
            if is_whole(opening.tag, content):
                return content, at + 1
        if fallback is None and rest is not None and not rest.strip():
            fallback = (at, at + 1)
        if fallback is None and (following := _opening(lines[at])) is not None and following.tag:
            fallback = (at, at)
    if fallback is None or (is_whole is not None and len(marked) < _MAX_FENCES):
        content = _joined(lines[start + 1 :], opening.indent)
        if fallback is None or (is_whole is not None and is_whole(opening.tag, content)):
            return content, len(lines)
    return _joined(lines[start + 1 : fallback[0]], opening.indent), fallback[1]


def _text_before_closing(line: str, fence: str) -> str | None:
    """The text before a closing fence; None if the line has none. Text after the fence is a remark."""
    stripped = line.rstrip(" \t")
    before = stripped.rstrip(fence[0])
    if len(stripped) - len(before) >= len(fence):
        return before
    is_remark = stripped.lstrip(" \t").startswith(fence) and _opening(line) is None
    return "" if is_remark else None


def _joined(lines: list[str], indent: int) -> str:
    """The lines as one text, without up to `indent` blanks at the beginning of each."""
    if indent:
        lines = [line[min(indent, len(line) - len(line.lstrip(" \t"))) :] for line in lines]
    text = "\n".join(lines)
    return text if not text or text.endswith("\n") else f"{text}\n"

"""Makes text from outside safe for a terminal, and says who spoke.

Names of services, error messages, task ids and the output of models come from others. Escape sequences in
them would move the cursor, change colours or the title of the window, or write to the clipboard.
"""

import unicodedata
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # every command imports this file, and few have messages
    from astraflow.types import Message

__all__ = ["printable", "speaker_of"]

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories that a terminal obeys or does not show: controls, formats (such as direction marks),
surrogates, private use, line separators."""
_JOINER = "\u200d"
"""Joins emoji; it has no other effect."""


def printable(text: str, *, keeps_lines: bool = False) -> str:
    """The text with hidden characters written as `\\x1b` or `\\u202e`; `keeps_lines` keeps line ends and
    tabs.

    Example: `printable("a\\x1b[2Jb")` is `a\\\\x1b[2Jb`.
    """
    if text.isprintable():
        return text
    harmless = "\n\t" + _JOINER if keeps_lines else _JOINER
    return "".join(
        char
        if char in harmless or unicodedata.category(char) not in _HIDDEN
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def speaker_of(message: "Message") -> str:
    """Who said a message: its role, and the policy or tool if it has a name.

    Example: `assistant (coder)`, `assistant (actor as verifier)`, `user`.
    """
    name = f" ({printable(message.name)})" if message.name else ""
    return f"{printable(message.role)}{name}"

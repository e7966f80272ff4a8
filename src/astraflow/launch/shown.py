"""Text from outside, as it may be shown in a terminal: no character of it does anything.

Names of services, error messages, task ids and what models write come from others. Escape sequences in them
would move the cursor, change colours or the window's title, or write to the clipboard.
"""

import unicodedata

__all__ = ["shown"]

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}
"""Unicode categories that a terminal obeys or does not show: controls, formats (direction marks among them),
surrogates, private use, separators of lines."""
_JOINER = "\u200d"
"""Joins emoji; it has no other effect."""


def shown(text: str, *, keeps_lines: bool = False) -> str:
    """The text with what is hidden written as `\\x1b` or `\\u202e`; `keeps_lines`: line ends and tabs stay.

    Example: `shown("a\\x1b[2Jb")` is `a\\\\x1b[2Jb`.
    """
    if text.isprintable():
        return text
    kept = "\n\t" + _JOINER if keeps_lines else _JOINER
    return "".join(char if char in kept else _shown(char) for char in text)


def _shown(char: str) -> str:
    if unicodedata.category(char) not in _HIDDEN:
        return char
    return char.encode("unicode_escape").decode("ascii")

"""Formats of texts in a recipe, such as names, hosts and arguments. Each is checked when it is read."""

import re
from typing import Annotated

from pydantic import AfterValidator

__all__ = ["Argument", "Name", "Variable", "Word", "text_form"]


def text_form(pattern: str, expected: str) -> AfterValidator:
    """Returns a validator for texts that fully match a pattern; `expected` describes such texts."""
    form = re.compile(pattern)

    def checked(value: str) -> str:
        if form.fullmatch(value) is None:
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(checked)


Name = Annotated[
    str,
    text_form(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        "a name of 1 to 64 letters, digits, `.`, `_` and `-`, which begins with a letter or digit",
    ),
]
"""A name that a recipe gives to one of its parts. File names, metrics and commands contain it."""
Word = Annotated[
    str, text_form(r"[^\s\x00-\x1f\x7f-\x9f]{0,1000}", "a text without spaces and hidden characters")
]
"""A value without spaces or hidden characters, such as a host; empty where that has a meaning."""
Argument = Annotated[
    str, text_form(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{0,4096}", "one line without hidden characters")
]
"""An argument of a program, or the path of one."""
Variable = Annotated[
    str,
    text_form(
        r"[A-Za-z_][A-Za-z0-9_]{0,199}", "the name of an environment variable: letters, digits and `_`"
    ),
]

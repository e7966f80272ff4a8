"""Reads a choice out of free text: a verdict, a number, a route."""

import re
from collections.abc import Sequence

__all__ = ["last_choice"]


def last_choice(text: str, choices: Sequence[str]) -> str:
    """The choice that is named last, in any case and as whole words; empty if none is.

    Example: `last_choice("No... wait, it is right: Yes.", ("yes", "no")) == "yes"`.
    """
    found = {choice: _last_end(text, choice) for choice in choices}
    best = max(found, key=lambda choice: (found[choice], len(choice)), default="")
    return best if best and found[best] > 0 else ""


def _last_end(text: str, choice: str) -> int:
    """Where the last occurrence ends; 0 without one. `no` does not occur in `know`."""
    before = r"(?<!\w)" if choice[:1].isalnum() else ""
    after = r"(?!\w)" if choice[-1:].isalnum() else ""
    pattern = re.compile(before + re.escape(choice) + after, re.IGNORECASE)
    return max((match.end() for match in pattern.finditer(text)), default=0)

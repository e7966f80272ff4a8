"""Counts failed attempts by kind: failures that differ only in their task, their numbers, and what follows
the first line of their messages, are one kind.

The counts are part of the books, so they are bounded: past a number of kinds, all further ones are one.
"""

import re

import msgspec

__all__ = ["FailureKind", "count_failure"]

_MAX_KINDS = 30
_MAX_TOLD = 300
"""Characters of a message that are kept."""
_OTHERS = "failures of other kinds"
_TASK = re.compile(r"\btask \S+: ")
"""How messages name the task of the episode."""
_NUMBER = re.compile(r"\d+")


class FailureKind(msgspec.Struct):
    """One kind of failure."""

    num: int = 0
    """Attempts that failed like this."""
    example: str = ""
    """Error class and the message's first line, without its task, of the first one."""


def count_failure(kinds: dict[str, FailureKind], told: str) -> None:
    """Counts one failed attempt in. `told`: error class and message."""
    example = _TASK.sub("", told.partition("\n")[0], count=1)[:_MAX_TOLD]
    key = _NUMBER.sub("#", example)
    if key not in kinds and len(kinds) >= _MAX_KINDS:
        key = example = _OTHERS
    kinds.setdefault(key, FailureKind(example=example)).num += 1

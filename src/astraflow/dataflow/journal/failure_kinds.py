"""Counts failed attempts by kind. Messages of one kind have the same first line except for tasks and numbers.

The counts are part of the audit state, so they are bounded: all kinds beyond a limit are counted as one.
"""

import re

import msgspec

__all__ = ["FailureKind", "count_failure"]

_MAX_KINDS = 30
_MAX_MESSAGE_CHARS = 300
"""Characters of a message that are kept."""
_OTHERS = "failures of other kinds"
_TASK = re.compile(r"\btask \S+: ")
"""How messages name the episode's task."""
_NUMBER = re.compile(r"\d+")


class FailureKind(msgspec.Struct):
    """One kind of failure."""

    num: int = 0
    """Number of attempts that failed in this way."""
    example: str = ""
    """Error class and first line of the message, without the task, of the first of them."""


def count_failure(kinds: dict[str, FailureKind], message: str) -> None:
    """Counts a failed attempt. `message`: error class and message."""
    example = _TASK.sub("", message.partition("\n")[0], count=1)[:_MAX_MESSAGE_CHARS]
    key = _NUMBER.sub("#", example)
    if key not in kinds and len(kinds) >= _MAX_KINDS:
        key = example = _OTHERS
    kinds.setdefault(key, FailureKind(example=example)).num += 1

"""Counts failed attempts by kind: by the class of their error and the line of code that raised it.

The counts are part of the audit state, so they are bounded: all kinds beyond a limit are counted as one.
"""

import msgspec

from astraflow.types import Failure

__all__ = ["FailureKind", "count_failure"]

_MAX_KINDS = 30
_MAX_MESSAGE_CHARS = 300
"""Characters of a message that are kept."""
_OTHERS = "failures of other kinds"


class FailureKind(msgspec.Struct):
    """One kind of failure."""

    num: int = 0
    """Number of attempts that failed in this way."""
    example: str = ""
    """Error class and message of the first of them."""


def count_failure(kinds: dict[str, FailureKind], failure: Failure) -> None:
    """Counts a failed attempt."""
    key = f"{failure.error_class} {failure.place}"
    example = f"{failure.error_class}: {failure.message}" if failure.message else failure.error_class
    if key not in kinds and len(kinds) >= _MAX_KINDS:
        key = example = _OTHERS
    kinds.setdefault(key, FailureKind(example=example[:_MAX_MESSAGE_CHARS])).num += 1

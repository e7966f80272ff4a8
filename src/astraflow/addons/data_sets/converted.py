"""The results of converting a row of a published data set, and functions that read its columns.

A prepared row has `id`, `prompt`, `answer` (a text, or a list of right answers) and the columns that its data
set names. A row that cannot be used is left out, and counted by reason. A row that lacks a column which the
data set always had is an error, because then the published files have changed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from astraflow.errors import DataError
from astraflow.types.row_columns import number_text

__all__ = ["LeftOut", "PreparedRow", "RawRow", "answer_text", "read_column", "read_text_column"]

RawRow: TypeAlias = Mapping[str, Any]
"""A row of a published file."""
PreparedRow: TypeAlias = dict[str, Any]
"""A row of a prepared file."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """The reason why a row is left out. Example: `LeftOut("it has no answer")`."""

    reason: str


def read_column(row: RawRow, *names: str) -> Any:
    """Reads a column that every row has, under the first of the `names` that exists.

    Raises: DataError if the row has none of them.
    """
    for name in names:
        if name in row:
            return row[name]
    raise DataError(
        f"it has no column {' or '.join(repr(name) for name in names)} (columns: {', '.join(sorted(row))}), "
        "so the published files are not those that this version of AstraFlow knows"
    )


def read_text_column(row: RawRow, *names: str) -> str:
    """Like `read_column`, for text. Raises: DataError also if the value is not text."""
    value = read_column(row, *names)
    if not isinstance(value, str):
        raise DataError(f"its column {names[0]!r} is a {type(value).__name__}; expected a text")
    return value


def answer_text(value: object) -> str:
    """Converts an answer to text; empty if there is none. A whole number has no decimals: `27.0` is `27`."""
    if isinstance(value, float):
        return number_text(value) if math.isfinite(value) else ""
    return "" if value is None else str(value).strip()

"""What a converter makes of a row of a published data set, and how it reads one.

A prepared row has `id`, `prompt`, `answer` (a text, or a list of right answers) and the columns that its data
set names. A row that cannot be used is left out for a reason, and counted. A row without a column that the
data set always had is an error, because then the published files have changed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from astraflow.errors import DataError
from astraflow.types.row_columns import number_text

__all__ = ["LeftOut", "PreparedRow", "RawRow", "answer_text", "needed", "needed_text"]

RawRow: TypeAlias = Mapping[str, Any]
"""A row as it is published."""
PreparedRow: TypeAlias = dict[str, Any]
"""A row as a prepared file holds it."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Says why a row is left out. Example: `LeftOut("it has no answer")`."""

    reason: str


def needed(row: RawRow, *names: str) -> Any:
    """The value of a column that every row has, under the first of its names that is there.

    Raises: DataError if the row has none of them.
    """
    for name in names:
        if name in row:
            return row[name]
    raise DataError(
        f"it has no column {' or '.join(repr(name) for name in names)} (columns: {', '.join(sorted(row))}), "
        "so the published files are not those that this version of AstraFlow knows"
    )


def needed_text(row: RawRow, *names: str) -> str:
    """The same for a text. Raises: DataError if the value is none."""
    value = needed(row, *names)
    if not isinstance(value, str):
        raise DataError(f"its column {names[0]!r} is a {type(value).__name__}; expected a text")
    return value


def answer_text(value: object) -> str:
    """An answer as text, or empty; a number without needless decimals. Example: `27.0` is `27`."""
    if isinstance(value, float):
        return number_text(value) if math.isfinite(value) else ""
    return "" if value is None else str(value).strip()

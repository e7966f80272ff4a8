"""Floats of 16 and 32 bits from Arrow tables, with the digits that they were written with.

Python's floats have 64 bits, in which a 32-bit 0.1 reads 0.10000000149011612. The shortest digits that mean
the same number in its own type are 0.1.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

__all__ = ["with_own_digits"]


def with_own_digits(rows: Iterable[Mapping[str, Any]], schema: Any) -> Iterator[Mapping[str, Any]]:
    """Yields the rows of an Arrow table, with the digits of its narrow floats. `schema`: the table's."""
    narrow = {field.name: field.type for field in schema if _has_narrow(field.type)}
    for row in rows:
        yield {**row, **{name: _own_digits(row[name], kind) for name, kind in narrow.items()}}


def _has_narrow(kind: Any) -> bool:
    return str(kind) in {"float", "halffloat"} or any(
        _has_narrow(kind.field(idx).type) for idx in range(kind.num_fields)
    )


def _own_digits(value: Any, kind: Any) -> Any:
    if value is None or not _has_narrow(kind):
        return value
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return [_own_digits(item, kind.field(0).type if kind.num_fields else kind) for item in items]
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        types = {kind.field(idx).name: kind.field(idx).type for idx in range(kind.num_fields)}
        return {key: _own_digits(item, types[key]) for key, item in fields.items()}
    return float(str(kind.to_pandas_dtype()(value)))

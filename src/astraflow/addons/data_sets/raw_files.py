"""Reads the rows of a published file, one at a time: JSONL, a JSON list, or Parquet."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from astraflow.addons.data_sets.converted import RawRow
from astraflow.addons.data_sets.narrow_floats import with_own_digits
from astraflow.errors import ConfigError, DataError

__all__ = ["raw_rows"]

_ROWS_AT_A_TIME = 64
"""Number of rows of a Parquet file in memory at once: a row of a programming data set may have megabytes."""


def raw_rows(path: Path) -> Iterator[tuple[str, RawRow]]:
    """Yields each row with its place, for messages.

    Raises: DataError if the file is missing or cannot be read; ConfigError if a library is missing.
    """
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise DataError(
            f"{path}: files ending in {path.suffix!r} are not supported (choices: {', '.join(readers)})"
        )
    number = 0
    try:
        for number, row in enumerate(readers[path.suffix](path), start=1):
            if not isinstance(row, dict):
                raise DataError(f"{path}, row {number}, is a {type(row).__name__}; expected a mapping")
            yield f"{path}, row {number}", cast("dict[str, Any]", row)
    except (OSError, ValueError, RecursionError) as err:
        if isinstance(err, DataError):
            raise
        raise DataError(f"{path} cannot be read after row {number}: {err}") from err


def _jsonl_rows(path: Path) -> Iterator[object]:
    with path.open("rb") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _json_rows(path: Path) -> Iterator[object]:
    rows: object = json.loads(path.read_bytes())
    if not isinstance(rows, list):
        raise DataError(f"{path} contains a {type(rows).__name__}; expected a list of rows")
    yield from cast("list[object]", rows)


def _parquet_rows(path: Path) -> Iterator[object]:
    try:
        from pyarrow import parquet
    except ImportError as err:
        raise ConfigError("Parquet files need a package: pip install astraflow[tasks]") from err
    with cast("Any", parquet).ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_ROWS_AT_A_TIME):
            yield from with_own_digits(batch.to_pylist(), batch.schema)

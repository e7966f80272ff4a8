"""A tracker's position in `metrics.jsonl`, and the rows after it, which the tracker has not processed yet.

The file is the queue between a run and its trackers. It is on disk anyway, so nothing is lost while a tracker
is slow, hangs, or fails, and the run never waits for a tracker. The position is stored in the tracker's
folder. It moves only after the tracker has processed the rows, so the tracker may get a few rows twice after
a crash.
"""

import logging
from pathlib import Path
from typing import Any, cast

import msgspec

from astraflow.recipe.run_folder import write_atomic

__all__ = ["RowFeed", "num_waiting", "read_position"]

_log = logging.getLogger(__name__)
_POSITION = "position"
_MOST_ROWS = 100
"""Largest number of rows per call; the position moves after each call."""
_MOST_NAMES = 2000
"""Largest number of metric names that a tracker gets between two starts. Trackers draw a chart for each name,
and a workflow can create any number of new names."""


class RowFeed:
    """The rows of a file that a tracker has not processed yet.

    Example: `while rows := feed.rows(): tracker.write(rows); feed.advance()`.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._position = read_position(folder)
        self._next = self._position
        self._names: set[str] = set()
        self._is_full_noted = False

    def rows(self) -> list[dict[str, Any]]:
        """Returns up to 100 further rows; empty if the tracker has processed all rows."""
        rows: list[dict[str, Any]] = []
        self._next = self._position
        with self._path.open("rb") as file:
            if self._position > file.seek(0, 2):
                _log.warning("%s has become shorter, so it is read again from its beginning", self._path)
                self._position = self._next = 0
            file.seek(self._position)
            for line in file:
                # A last line without its end is still being written.
                if not line.endswith(b"\n") or len(rows) == _MOST_ROWS:
                    break
                self._next += len(line)
                rows.append(self._limit_names(cast("dict[str, Any]", msgspec.json.decode(line))))
        return rows

    def advance(self) -> None:
        """Moves the position to the end of the rows that `rows` returned last."""
        self._position = self._next
        write_atomic(self._folder / _POSITION, f"{self._position}\n".encode())

    def _limit_names(self, row: dict[str, Any]) -> dict[str, Any]:
        """Returns the row without new names beyond the limit."""
        for name in [name for name in row if name not in self._names]:
            if len(self._names) < _MOST_NAMES:
                self._names.add(name)
                continue
            del row[name]
            if not self._is_full_noted:
                self._is_full_noted = True
                _log.warning(
                    "rows have more than %d names; %r and other new ones are only in %s, not in the tracker",
                    _MOST_NAMES,
                    name,
                    self._path,
                )
        return row


def num_waiting(path: Path, folder: Path) -> int:
    """Counts the rows that a tracker has not processed yet. `folder`: the tracker's folder."""
    try:
        with path.open("rb") as file:
            file.seek(min(read_position(folder), file.seek(0, 2)))
            return sum(line.endswith(b"\n") for line in file)
    except FileNotFoundError:
        return 0


def read_position(folder: Path) -> int:
    """Returns the number of bytes that a tracker has processed. `folder`: the tracker's folder."""
    try:
        return int((folder / _POSITION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
    except ValueError as err:
        _log.warning("%s cannot be read (%s); the tracker gets all rows again", folder / _POSITION, err)
        return 0

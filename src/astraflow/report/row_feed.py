"""Where a tracker is in `metrics.jsonl`: the rows that it has not taken yet.

The file is the queue between a run and its trackers. It is on disk already, so nothing is lost while a
tracker is slow, hangs or fails, and the run never waits for one. The position is kept in the tracker's
folder. It moves on after the tracker has taken the rows, so a crash may hand a few of them over a second
time.
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
"""Rows that are handed over at once; the position moves on after each time."""
_MOST_NAMES = 2000
"""Names of numbers that one start of a tracker passes on. Trackers draw a chart for each, and a workflow may
make new ones for ever."""


class RowFeed:
    """The rows of a file that a tracker has not taken yet.

    Example: `while rows := feed.rows(): tracker.write(rows); feed.taken()`.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self._path = path
        self._folder = folder
        self._position = read_position(folder)
        self._next = self._position
        self._names: set[str] = set()
        self._is_full_noted = False

    def rows(self) -> list[dict[str, Any]]:
        """Up to 100 further rows; none if the tracker has taken all that there are."""
        rows: list[dict[str, Any]] = []
        self._next = self._position
        with self._path.open("rb") as file:
            if self._position > file.seek(0, 2):
                _log.warning("%s is shorter than it was; it is read from its beginning", self._path)
                self._position = self._next = 0
            file.seek(self._position)
            for line in file:
                if not line.endswith(b"\n") or len(rows) == _MOST_ROWS:
                    break
                self._next += len(line)
                rows.append(self._bounded(cast("dict[str, Any]", msgspec.json.decode(line))))
        return rows

    def taken(self) -> None:
        """The tracker has taken the rows that `rows` returned last."""
        self._position = self._next
        write_atomic(self._folder / _POSITION, f"{self._position}\n".encode())

    def _bounded(self, row: dict[str, Any]) -> dict[str, Any]:
        for name in [name for name in row if name not in self._names]:
            if len(self._names) < _MOST_NAMES:
                self._names.add(name)
                continue
            del row[name]
            if not self._is_full_noted:
                self._is_full_noted = True
                _log.warning(
                    "rows have more than %d names; %r and other new ones are left out here, and are in %s",
                    _MOST_NAMES,
                    name,
                    self._path,
                )
        return row


def num_waiting(path: Path, folder: Path) -> int:
    """How many rows of the file the tracker that owns `folder` has not taken yet."""
    try:
        with path.open("rb") as file:
            file.seek(min(read_position(folder), file.seek(0, 2)))
            return sum(line.endswith(b"\n") for line in file)
    except FileNotFoundError:
        return 0


def read_position(folder: Path) -> int:
    """How many bytes of the file the tracker that owns `folder` has taken."""
    try:
        return int((folder / _POSITION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return 0
    except ValueError as err:
        _log.warning("%s is broken (%s); all rows are handed over again", folder / _POSITION, err)
        return 0

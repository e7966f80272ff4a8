"""Loads run folders as data frames of pandas or polars, whichever the user asks for.

Nothing but the run folders is read, so live, finished and copied runs all work. The libraries are imported
when the first frame is made.
"""

import contextlib
import glob
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from astraflow.addons.experiments.results import RunResult, metric_rows, read_results
from astraflow.addons.view.export import EPISODE_COLUMNS, exported
from astraflow.addons.view.filters import filter_of
from astraflow.addons.view.index import RunIndex
from astraflow.errors import ConfigError
from astraflow.recipe.run_folder import RunFolder

__all__ = ["Runs", "load"]

Library = Literal["pandas", "polars"]
Row = dict[str, Any]
_MOST = 2**62
_VERSION_COLUMNS = ("policy", "version", "step", "at_s", "kind", "base", "fetched_bytes", "full_bytes")


def load(*places: str | Path, library: Library = "pandas") -> "Runs":
    """Finds runs: run folders, folders of them such as a sweep's, or patterns such as `runs/*`.

    `library` is the one whose data frames are made: `pandas` or `polars`.

    Raises: DataError if a place has no run. ConfigError if the library isn't installed.
    """
    if library not in ("pandas", "polars"):
        raise ConfigError(f"library = {library!r} is none of pandas, polars")
    try:
        import_module(library)
    except ImportError as err:
        raise ConfigError(f'data frames need a package: pip install "astraflow[{library}]"') from err
    results = read_results([path for place in places or ("runs",) for path in _expanded(place)])
    return Runs(tuple(results), library)


def _expanded(place: str | Path) -> list[Path]:
    """Returns the folders that match a pattern, or the place itself, which may be wrong."""
    folders = [Path(path) for path in sorted(glob.glob(str(place))) if Path(path, "journal").is_dir()]
    return folders or [Path(place)]


@dataclass(frozen=True, slots=True)
class Runs:
    """Some runs. Every frame has the column `run`, so that frames can be joined.

    Example: `load("runs/a", "runs/b").metrics().groupby("run").reward_mean.last()`.
    """

    results: tuple[RunResult, ...]
    library: Library

    def recipes(self) -> Any:
        """One row per run: its state, seed, and the keys by which the recipes differ."""
        keys = dict.fromkeys(key for run in self.results for key in run.recipe)
        differing = [key for key in keys if len({run.recipe.get(key) for run in self.results}) > 1]
        columns = ["run", "state", "reason", "steps", "wall_s", "seed"]
        own = [key for key in differing if key != "seed"]
        rows = [
            dict(
                zip(columns, (run.name, run.state, run.reason, run.steps, run.wall_s, run.seed), strict=True)
            )
            | {key: run.recipe.get(key) for key in own}
            for run in self.results
        ]
        return self._frame(rows, [*columns, *own])

    def metrics(self) -> Any:
        """One row per step or evaluation, with the columns of `metrics.jsonl`."""
        rows = [{"run": run.name, **row} for run in self.results for row in metric_rows(RunFolder(run.path))]
        return self._frame(rows, ["run", "kind", "policy", "step"])

    def episodes(self, *, limit: int = _MOST, **filters: str) -> Any:
        """One row per trajectory, newest first, with its text; up to `limit` of each run.

        The filters are those of `astraflow episodes`, for example `kind="eval"` or `reward="0..0.5"`. The
        first call builds the index of each run, as the page does. Raises: ConfigError for a wrong filter.
        """
        wanted = filter_of(filters)

        def rows() -> Iterator[Row]:
            for run, index in self._indexes():
                with contextlib.closing(index.reader()) as database:
                    for row in exported(database, index.folder, wanted, limit=limit):
                        yield {"run": run.name, **row}

        return self._frame(rows(), ["run", *EPISODE_COLUMNS])

    def versions(self) -> Any:
        """One row per published version: when, after which step, and how many bytes it took."""
        query = f"SELECT {', '.join(_VERSION_COLUMNS)} FROM versions ORDER BY policy, version"

        def rows() -> Iterator[Row]:
            for run, index in self._indexes():
                with contextlib.closing(index.reader()) as database:
                    for row in database.execute(query):
                        yield {"run": run.name, **dict(zip(_VERSION_COLUMNS, row, strict=True))}

        return self._frame(rows(), ["run", *_VERSION_COLUMNS])

    def _indexes(self) -> Iterator[tuple[RunResult, RunIndex]]:
        """Yields the filled index of each run that still has a folder."""
        for run in self.results:
            if not (run.path / "journal").is_dir():
                continue
            with RunIndex(run.path) as index:
                index.fill()
                yield run, index

    def _frame(self, rows: Iterable[Row], columns: Sequence[str]) -> Any:
        """Makes a frame; without rows, it has at least these columns."""
        library = import_module(self.library)
        table = list(rows)
        if self.library == "polars":
            schema = None if table else list(columns)
            return library.DataFrame(table, schema=schema, infer_schema_length=None)
        return library.DataFrame(table) if table else library.DataFrame(columns=list(columns))

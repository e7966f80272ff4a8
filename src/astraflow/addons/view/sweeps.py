"""Sweeps and chosen runs as the page shows them: each run's result, and which variant is ahead.

A run's result comes from three of its files. It is kept until one of them changes, so a page that asks again
and again reads only the runs that have moved on.
"""

import dataclasses
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.addons.experiments.comparison import Comparison, Member, compare, member_of
from astraflow.addons.experiments.group_file import GROUP_FILE, Group, load_group
from astraflow.addons.experiments.results import RunResult, read_result
from astraflow.errors import DataError
from astraflow.recipe.run_folder import RunFolder
from astraflow.user_input.user_files import format_path

__all__ = ["ComparedRuns", "Results", "ViewedSweep", "compared", "sweep_page", "sweep_summary"]

_Stamp = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ViewedSweep:
    """The folder of a sweep that the page shows."""

    name: str
    """Its name in URLs."""
    path: Path


@dataclass(frozen=True, slots=True)
class ComparedRuns:
    """Runs and what their comparison says."""

    members: tuple[Member, ...]
    links: Mapping[str, str]
    """Member -> the run's name in URLs. A member whose folder is missing has none."""
    comparison: Comparison | None
    problem: str
    """Why the runs can't be compared; empty if they can."""


class Results:
    """Results of runs, each kept until its files change. Example: `Results().read(run_dir, "a").finals`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the next field. It is held while a run is read, so that two requests don't read it twice."""
        self._results: dict[Path, tuple[_Stamp, RunResult]] = {}

    def read(self, path: Path, name: str) -> RunResult:
        """Returns the result of a run folder under a name."""
        stamp = _stamp_of(path)
        with self._lock:
            entry = self._results.get(path)
            if entry is None or entry[0] != stamp:
                entry = (stamp, read_result(path))
                self._results[path] = entry
        return dataclasses.replace(entry[1], name=name)


def compared(results: Sequence[RunResult], links: Mapping[str, str]) -> ComparedRuns:
    """Compares runs, or says why they can't be compared."""
    try:
        comparison = compare(results)
    except DataError as err:
        return ComparedRuns(tuple(member_of(run) for run in results), links, None, str(err))
    return ComparedRuns(comparison.members, links, comparison, "")


def sweep_summary(sweep: ViewedSweep) -> dict[str, object]:
    """Returns what the list of runs says about a sweep: how many of its runs are in which state."""
    try:
        group = load_group(sweep.path)
    except (DataError, OSError) as err:
        return {**_place(sweep), "problem": str(err), "num_runs": 0, "states": {}, "at_s": 0.0}
    states: dict[str, int] = {}
    newest_s = 0.0
    for member in group.members:
        state, at_s = _state_of(sweep.path / member.name, group, member.name)
        states[state] = states.get(state, 0) + 1
        newest_s = max(newest_s, at_s)
    return {
        **_place(sweep),
        "problem": "",
        "num_runs": len(group.members),
        "states": states,
        "at_s": newest_s,
    }


def sweep_page(sweep: ViewedSweep, results: Results, links: Mapping[Path, str]) -> dict[str, object]:
    """Returns all that the page shows about a sweep. `links`: run folder -> the run's name in URLs.

    Raises: DataError or OSError if the folder isn't that of a sweep, for example because it was deleted.
    """
    group = load_group(sweep.path)
    folders = {m.name: Path(os.path.realpath(sweep.path / m.name)) for m in group.members}
    own_links = {name: links[path] for name, path in folders.items() if path in links}
    runs: list[RunResult] = []
    for name, path in folders.items():
        run = results.read(path, name)
        if run.state == "unknown" and not run.path.exists():
            reason = "it has no folder: it has not started, or was deleted"
            run = dataclasses.replace(run, state="missing", reason=reason)
        runs.append(run)
    return {
        **_place(sweep),
        "recipe": group.recipe,
        "values": group.values,
        "compared": compared(runs, own_links),
    }


def _place(sweep: ViewedSweep) -> dict[str, object]:
    return {"name": sweep.name, "path": format_path(sweep.path)}


def _state_of(path: Path, group: Group, name: str) -> tuple[str, float]:
    """Returns the state of a member and when it was last written."""
    try:
        record = RunFolder(path).load_record()
    except (DataError, OSError):
        return ("failed" if name in group.failed else "missing"), 0.0
    if name in group.failed and record.state != "finished":
        return "failed", record.at_s
    return record.state, record.at_s


def _stamp_of(path: Path) -> _Stamp:
    """Returns what changes whenever a file changes that a result is read from."""
    folder = RunFolder(path)
    files = (folder.record, folder.recipe, folder.metrics, path.parent / GROUP_FILE)
    return tuple(_file_stamp(file) for file in files)


def _file_stamp(file: Path) -> tuple[int, int]:
    try:
        stat = file.stat()
    except OSError:
        return (0, 0)
    return (stat.st_mtime_ns, stat.st_size)

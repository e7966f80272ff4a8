"""The runs and sweeps that a viewer shows, and their names.

Names in URLs are looked up here, so a path never comes from a request.
"""

import itertools
import os
import re
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.addons.experiments.group_file import GROUP_FILE
from astraflow.addons.view.index import RunIndex
from astraflow.addons.view.late_summary import LateSummary
from astraflow.addons.view.remote import RemoteRun
from astraflow.addons.view.sweeps import ViewedSweep
from astraflow.addons.view.token_text import TokenText
from astraflow.errors import Error
from astraflow.recipe.run_folder import RunFolder

__all__ = ["ViewedRun", "ViewedRuns"]

_MAX_RUNS = 500
_PLAIN = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, slots=True)
class ViewedRun:
    """A run folder that the page shows."""

    name: str
    """Its name in URLs."""
    folder: RunFolder
    index: RunIndex
    texts: TokenText
    lock: threading.Lock
    """Held while the index is filled."""
    summary: LateSummary
    remote: RemoteRun | None = None
    """The source of the run if it is on another machine."""
    sweep: str = ""
    """The name of the sweep that it belongs to; empty if it belongs to none."""


class ViewedRuns:
    """The runs of a viewer. Call `close` at the end. Example: `ViewedRuns([Path("runs")]).all()`."""

    def __init__(self, roots: Sequence[Path], remotes: Sequence[RemoteRun] = ()) -> None:
        """Shows `roots` (run folders, folders of sweeps, or folders of these) and `remotes`, which `close`
        closes as well."""
        self._roots = [Path(os.path.realpath(root)) for root in roots]
        self._remotes = {remote.folder.path: remote for remote in remotes}
        self._runs: dict[Path, ViewedRun] = {}
        self._sweeps: dict[Path, ViewedSweep] = {}
        self._lock = threading.Lock()

    def all(self) -> list[ViewedRun]:
        """Returns the runs that exist now, up to 500. A run keeps its name.

        A run whose folder is gone is forgotten, so that a new folder at its path gets an index of its own.
        """
        with self._lock:
            for path in [path for path in self._runs if not os.path.isdir(path)]:
                self._forget(path)
            self._look()
            return [run for path, run in self._runs.items() if os.path.isdir(path)]

    def sweeps(self) -> list[ViewedSweep]:
        """Returns the sweeps that exist now. Their runs are among those of `all`."""
        with self._lock:
            self._look()
            return [sweep for path, sweep in self._sweeps.items() if _is_sweep(path)]

    def get(self, name: str) -> ViewedRun | None:
        """Returns the run with a name; None if there is none."""
        with self._lock:
            known = next((run for run in self._runs.values() if run.name == name), None)
        if known is not None and os.path.isdir(known.folder.path):
            return known  # without a look at all folders, which may be many, and far away
        return next((run for run in self.all() if run.name == name), None)

    def close(self) -> None:
        """Closes all indexes."""
        for run in self._runs.values():
            with run.lock:
                run.index.close()
        self._runs.clear()
        for remote in self._remotes.values():
            remote.close()

    def _forget(self, path: Path) -> None:
        """Closes the index of a run, unless a request fills it now; then the next call does."""
        run = self._runs[path]
        if run.lock.acquire(blocking=False):
            try:
                run.index.close()
            finally:
                run.lock.release()
            del self._runs[path]

    def _look(self) -> None:
        """Adds the runs and sweeps that are new."""
        sweep_of = dict.fromkeys(self._remotes, "")
        lists = [[root] if _is_run(root) or _is_sweep(root) else _folders_in(root) for root in self._roots]
        for path in itertools.chain.from_iterable(lists):
            if _is_run(path):
                sweep_of.setdefault(path, "")
            elif _is_sweep(path):
                if path not in self._sweeps:
                    names = {sweep.name for sweep in self._sweeps.values()}
                    self._sweeps[path] = ViewedSweep(_free_name(path.name, names), path)
                for member in filter(_is_run, _folders_in(path)):
                    sweep_of.setdefault(member, self._sweeps[path].name)
        new = [path for path in sweep_of if path not in self._runs]
        if len(self._runs) + len(new) > _MAX_RUNS:  # folders that can't be read must not crowd out others
            new.sort(key=_is_unreadable)
        for path in new[: max(0, _MAX_RUNS - len(self._runs))]:
            self._add_run(path, sweep_of[path])

    def _add_run(self, path: Path, sweep: str) -> None:
        remote = self._remotes.get(path)
        name = remote.url.partition("://")[2] if remote else path.name
        # Members of several sweeps have the same names of folders.
        name = f"{sweep}.{name}" if sweep else name
        name = _free_name(name, {run.name for run in self._runs.values()})
        folder = RunFolder(path)
        self._runs[path] = ViewedRun(
            name=name,
            folder=folder,
            index=RunIndex(path),
            texts=TokenText(folder),
            lock=threading.Lock(),
            summary=LateSummary(folder),
            remote=remote,
            sweep=sweep,
        )


def _free_name(title: str, others: Collection[str]) -> str:
    plain = _PLAIN.sub("-", title) or "run"
    name = plain
    number = 2
    while name in others:
        name = f"{plain}-{number}"
        number += 1
    return name


def _folders_in(root: Path) -> list[Path]:
    """Returns the folders in a folder; none if it can't be read. `realpath` accepts links in a circle."""
    try:
        paths = {Path(os.path.realpath(path)) for path in root.iterdir()}
    except OSError:
        return []
    return sorted(path for path in paths if os.path.isdir(path))


def _is_run(path: Path) -> bool:
    return os.path.isdir(path / "journal") or os.path.lexists(path / "run.json")


def _is_unreadable(path: Path) -> bool:
    try:
        RunFolder(path).load_record()
    except (Error, OSError):
        return True
    return False


def _is_sweep(path: Path) -> bool:
    return os.path.lexists(path / GROUP_FILE)

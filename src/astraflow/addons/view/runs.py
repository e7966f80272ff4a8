"""The runs that a viewer shows, and their names.

Names in URLs are looked up here, so a path never comes from a request.
"""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.addons.view.index import RunIndex
from astraflow.addons.view.late_summary import LateSummary
from astraflow.addons.view.remote import RemoteRun
from astraflow.addons.view.token_text import TokenText
from astraflow.recipe.run_folder import RunFolder

__all__ = ["ShownRun", "ShownRuns"]

_MAX_RUNS = 200
_PLAIN = re.compile(r"[^\w.-]+")


@dataclass(frozen=True, slots=True)
class ShownRun:
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


class ShownRuns:
    """The runs of a viewer. Call `close` at the end. Example: `ShownRuns([Path("runs")]).all()`."""

    def __init__(self, roots: Sequence[Path], remotes: Sequence[RemoteRun] = ()) -> None:
        """Shows `roots` (run folders, or folders of them) and `remotes`, which `close` closes as well."""
        self._roots = [root.resolve() for root in roots]
        self._remotes = {remote.folder.path: remote for remote in remotes}
        self._runs: dict[Path, ShownRun] = {}
        self._lock = threading.Lock()

    def all(self) -> list[ShownRun]:
        """Returns the runs that exist now, up to 200. A run keeps its name.

        A run whose folder is gone is forgotten, so that a new folder at its path gets an index of its own.
        """
        with self._lock:
            for path in [path for path in self._runs if not path.is_dir()]:
                self._forget(path)
            for path in (*self._remotes, *_run_folders(self._roots)):
                if path not in self._runs and len(self._runs) < _MAX_RUNS:
                    self._runs[path] = self._shown(path)
            return [run for path, run in self._runs.items() if path.is_dir()]

    def get(self, name: str) -> ShownRun | None:
        """Returns the run with a name; None if there is none."""
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

    def _shown(self, path: Path) -> ShownRun:
        taken = {run.name for run in self._runs.values()}
        remote = self._remotes.get(path)
        plain = _PLAIN.sub("-", remote.url.partition("://")[2] if remote else path.name) or "run"
        name = plain
        number = 2
        while name in taken:
            name = f"{plain}-{number}"
            number += 1
        folder = RunFolder(path)
        return ShownRun(
            name, folder, RunIndex(path), TokenText(folder), threading.Lock(), LateSummary(folder), remote
        )


def _run_folders(roots: Sequence[Path]) -> list[Path]:
    found: list[Path] = []
    for root in roots:
        if _is_run(root):
            found.append(root)
        elif root.is_dir():
            found += sorted(path.resolve() for path in root.iterdir() if _is_run(path))
    return found


def _is_run(path: Path) -> bool:
    return (path / "journal").is_dir()

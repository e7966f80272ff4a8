"""Trackio: a local dashboard with the interface of Weights & Biases."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from astraflow.addons.trackers.library_tracker import LibraryTracker
from astraflow.metrics import MetricRow
from astraflow.recipe.trackers import TrackedRun

__all__ = ["TrackioConfig", "TrackioTracker"]


class TrackioConfig(LibraryTracker):
    """Trackio, a local dashboard (`trackio show`). Needs `astraflow[trackio]`."""

    name: Literal["trackio"] = "trackio"
    project: str = ""
    """Project; default: the recipe's name."""
    group: str = ""
    """Group of the run within the project."""
    space: str = ""
    """Id of a Hugging Face Space that shows the dashboard; default: this machine only."""

    def make(self, run: TrackedRun) -> "TrackioTracker":
        """Makes the tracker, and opens its run."""
        return TrackioTracker(self, run)


class TrackioTracker:
    """Implements `Tracker`. Trackio identifies a run by its name, so the name ends with a stable id."""

    def __init__(self, config: TrackioConfig, run: TrackedRun) -> None:
        # Any: the library is not installed where types are checked.
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(
            project=config.project or run.project,
            name=f"{run.name}-{run.id}",
            group=config.group or None,
            space_id=config.space or None,
            config=dict(run.recipe),
            resume="allow",
            embed=False,
        )

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs each row at its policy's step."""
        for row in map(MetricRow.from_flat, rows):
            self._trackio.log(dict(row.named), step=row.step)

    def write_episodes(self, row: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> None:
        """Logs a table."""
        columns = list(episodes[0])
        data = [[each[name] for name in columns] for each in episodes]
        table = self._trackio.Table(columns=columns, data=data)
        self._trackio.log({f"{row['policy']}/eval/{row['eval_set']}/episodes": table}, step=row["step"])

    def close(self) -> None:
        """Ends the run, which writes the remaining data."""
        self._trackio.finish()

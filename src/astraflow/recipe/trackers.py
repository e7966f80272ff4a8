"""Trackers of a recipe, which show the metrics of a run in addition to `metrics.jsonl`."""

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow import added
from astraflow.config import Use, Variant, load_component
from astraflow.protocols import Tracker

__all__ = ["TrackedRun", "TrackerVariant", "check_tracker", "tracker_key"]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as its trackers see it.

    Example of a tracker that continues the same run after a resume: `board.open(run_id=run.id)`.
    """

    project: str
    """Name of the recipe."""
    name: str
    """Name of the run folder."""
    run_folder: Path
    folder: Path
    """The tracker's own folder, which exists. What the tracker keeps there is still there after a resume."""
    recipe: Mapping[str, Any]
    """The resolved recipe, as plain data."""

    @property
    def id(self) -> str:
        """An id for this run in this tracker. It is made at first use and stays the same after a resume."""
        return self.keep("id", secrets.token_hex(4))

    def keep(self, name: str, value: str) -> str:
        """Returns the text that an earlier start kept under `name`. If there is none, keeps and returns
        `value`."""
        path = self.folder / name
        if not path.is_file():
            part = path.with_name(f".{name}.part")
            part.write_text(value, encoding="utf-8")
            os.replace(part, path)
        return path.read_text(encoding="utf-8")


class TrackerVariant(Variant):
    """Base of the config of a tracker that an installed package adds."""

    def check(self) -> None:
        """Checks, without importing a library, that the tracker can be made on this machine.

        Raises: ConfigError if it can't.
        """

    def make(self, run: TrackedRun) -> Tracker:
        """Makes the tracker, with its run open. Called in the tracker's own process."""
        raise NotImplementedError


def tracker_key(config: TrackerVariant | Use) -> str:
    """Returns the name of a tracker in messages and in the run folder, e.g. `wandb`, or `my_trackers-Board`
    for the user's own class."""
    return re.sub(r"[^\w.]", "-", config.use) if isinstance(config, Use) else config.name


def check_tracker(config: TrackerVariant | Use) -> None:
    """Checks that a tracker of the recipe can be made on this machine.

    Raises: ConfigError if it can't, if the user's own class can't be loaded or does not take its arguments,
    or if nothing installed runs trackers.
    """
    added.require("trackers_page")
    if isinstance(config, Use):
        load_component(config, where="trackers")
    else:
        config.check()

"""Trackers of a recipe: where the metrics of a run are shown in addition to `metrics.jsonl`."""

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from astraflow.config import Use, Variant, check_args, load_attr
from astraflow.errors import ConfigError
from astraflow.protocols import Tracker
from astraflow.user_input.installed import added_to, loaded, where_to_find

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
    """The tracker's own folder, which exists; what it keeps there is found again after a resume."""
    recipe: Mapping[str, Any]
    """The resolved recipe, as plain data."""

    @property
    def id(self) -> str:
        """An id for this run in this tracker: made at first use, and the same after each resume."""
        return self.kept("id", secrets.token_hex(4))

    def kept(self, name: str, value: str) -> str:
        """The text that was kept under `name` in an earlier start; `value`, which is kept from now on, if
        none was."""
        path = self.folder / name
        if not path.is_file():
            part = path.with_name(f".{name}.part")
            part.write_text(value, encoding="utf-8")
            os.replace(part, path)
        return path.read_text(encoding="utf-8")


class TrackerVariant(Variant):
    """Base of a tracker's config that an installed package adds."""

    def check(self) -> None:
        """Raises: ConfigError if the tracker can't be made on this machine. Imports no library."""

    def make(self, run: TrackedRun) -> Tracker:
        """The tracker, with its run open. Called in the tracker's own process."""
        raise NotImplementedError


def tracker_key(config: TrackerVariant | Use) -> str:
    """What names a tracker in messages and in the run folder, e.g. `wandb`, or `my_trackers-Board` for a
    class of the user's own."""
    return re.sub(r"[^\w.]", "-", config.use) if isinstance(config, Use) else config.name


def check_tracker(config: TrackerVariant | Use) -> None:
    """Raises: ConfigError if the tracker can't be made on this machine, or a class of the user's own can't
    be loaded or does not take its arguments, or if nothing installed runs trackers."""
    if not any(map(loaded, added_to("astraflow.pages").select(name="trackers"))):
        raise ConfigError(f"trackers: {tracker_key(config)} {where_to_find('trackers')}")
    if isinstance(config, Use):
        check_args(load_attr(config.use, where="trackers.use"), config.args, where="trackers.args")
    else:
        config.check()

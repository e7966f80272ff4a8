"""What a tracker knows of the run whose metrics it gets."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["TrackedRun"]


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

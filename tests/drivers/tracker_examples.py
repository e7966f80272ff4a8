"""Trackers as a user might write them, and worse; `tracker_driver` names them in recipes."""

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.recipe.trackers import TrackedRun


class Notebook:
    """Writes what it gets to files in its own folder."""

    def __init__(self, run: TrackedRun, *, prefix: str = "") -> None:
        self._folder = run.folder
        self._note("opened", f"{prefix}{run.project} {run.name} {run.id}")

    def _note(self, name: str, text: str) -> None:
        with (self._folder / name).open("a") as file:
            file.write(f"{text}\n")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            self._note("rows", json.dumps(row))

    def close(self) -> None:
        self._note("closed", "closed")


class Album(Notebook):
    """Keeps sample episodes too."""

    def write_episodes(self, row: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> None:
        self._note("episodes", json.dumps([row["step"], row["eval_set"], list(episodes)]))


class Hanging(Notebook):
    """Takes a row, then hangs in the second call, as a client without a network may."""

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if (self._folder / "rows").exists():
            time.sleep(3600)
        super().write(rows)


class HangingAtTheEnd(Notebook):
    """Takes everything, and never closes."""

    def close(self) -> None:
        time.sleep(3600)


class Failing(Notebook):
    """Cannot be opened: the server refuses the key."""

    def __init__(self, run: TrackedRun) -> None:
        raise PermissionError("the key is not valid")


class Dying(Notebook):
    """Dies without a word while it takes the first rows; works from the second start on."""

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if not (self._folder / "died").exists():
            (self._folder / "died").touch()
            os._exit(11)
        super().write(rows)


class Asking(Notebook):
    """Asks a question on standard input, as a login does."""

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        input("key? ")

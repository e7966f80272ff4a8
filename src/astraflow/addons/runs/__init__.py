"""Runs as data frames: `astraflow.runs.load("runs/*").metrics()` in a notebook."""

from astraflow.addons.runs.frames import Runs, load

__all__ = ["Runs", "load"]

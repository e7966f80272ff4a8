"""Finds what installed packages add to AstraFlow, through entry points of the groups `astraflow.*`.

AstraFlow's own add-ons are found in the same way. An installation may leave some of them out. Their entry
points are then skipped.
"""

import sys
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, entry_points, requires
from typing import Any

from astraflow.added import is_left_out, needs_text
from astraflow.errors import ConfigError

__all__ = ["find_entries", "load_entry", "source_of", "where_to_find"]

_ADD_ONS = "astraflow.addons."


def find_entries(group: str) -> EntryPoints:
    """Returns a group's entry points. The first call reads the metadata of all installed packages."""
    return _read_entries(tuple(sys.path)).select(group=group)


@cache
def _read_entries(_: tuple[str, ...]) -> EntryPoints:
    """Returns the entry points of all groups `astraflow.*`. The search path is the key of the cache."""
    every = entry_points()
    groups = [group for group in every.groups if group.startswith("astraflow.")]
    return EntryPoints(entry for group in groups for entry in every.select(group=group))


def load_entry(entry: EntryPoint) -> Any | None:
    """Loads the object that an entry point names; None if this installation leaves out its add-on.

    Raises: ConfigError that names the package if it can't be loaded.
    """
    try:
        return entry.load()
    except (ImportError, AttributeError) as err:
        if isinstance(err, ModuleNotFoundError) and is_left_out(err):
            return None
        raise ConfigError(f"{source_of(entry)} does not load: {err}") from err


def source_of(entry: EntryPoint) -> str:
    """Returns the entry point and its package, for messages."""
    package = entry.dist.name if entry.dist is not None else "an installed package"
    return f"{entry.value} ({package}, entry point {entry.name!r} of {entry.group})"


def where_to_find(name: str) -> str:
    """Returns what the user must install to get something of this name; empty if AstraFlow doesn't know.

    Example: `needs a package: pip install "astraflow[paced]"`.
    """
    for entry in _read_entries(tuple(sys.path)):
        if entry.name == name and entry.value.startswith(_ADD_ONS) and load_entry(entry) is None:
            return needs_text(entry.module.removeprefix(_ADD_ONS))
    try:
        packages = requires("astraflow") or []
    except PackageNotFoundError:
        return ""
    if any(package.startswith("astraflow-") and package.endswith(f"'{name}'") for package in packages):
        return f'needs a package: pip install "astraflow[{name}]"'
    return ""

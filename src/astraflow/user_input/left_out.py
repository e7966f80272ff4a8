"""Add-ons that an installation of AstraFlow was built without.

AstraFlow's entry points name the variants and commands of all of its add-ons. Those whose modules are not in
this installation are skipped, and whoever asks for one by name is told which add-on has it.
"""

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

__all__ = ["addon_with", "is_left_out"]

_ADDONS = "astraflow.addons."


def is_left_out(entry: EntryPoint) -> bool:
    """Whether an entry point is part of an add-on that is not in this installation."""
    if not entry.module.startswith(_ADDONS):
        return False
    try:
        return find_spec(entry.module) is None
    except ModuleNotFoundError:  # a package above the module is missing, too
        return True


def addon_with(name: str) -> str:
    """The add-on that has a variant or command of this name, if it was left out; empty otherwise."""
    for entry in entry_points(name=name):
        if is_left_out(entry):
            return ".".join(entry.module.split(".")[:3])
    return ""

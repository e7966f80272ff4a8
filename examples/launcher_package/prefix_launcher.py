"""The config of a launcher that a package adds to AstraFlow.

After `pip install examples/launcher_package`, a recipe names it: `launcher: {name: prefix, commands: {...}}`.
"""

from typing import ClassVar, Literal

from astraflow.protocols import Launcher
from astraflow.recipe.launcher_variant import LauncherVariant


class PrefixLauncherConfig(LauncherVariant):
    """Put a command in front of the commands of some processes."""

    spans_machines: ClassVar[bool] = False
    name: Literal["prefix"] = "prefix"
    commands: dict[str, str]
    """Name of a process, with `*` for any text, and the command to put in front of its own."""

    def make(self) -> Launcher:
        from own_launcher import PrefixLauncher  # only the machine that starts a run needs it

        return PrefixLauncher(self.commands)

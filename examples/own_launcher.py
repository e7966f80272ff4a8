"""A launcher that puts a command, such as `nice -n 5` or `taskset -c 0`, before each process's own command.

The command must replace itself with the process by exec, as `nice` does, so that signals reach the process.
Try it: astraflow run examples/own_launcher.yaml
"""

import shlex
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatch

from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import ProcessHandle, ProcessSpec

__all__ = ["PrefixLauncher"]


class PrefixLauncher:
    """`commands` maps process names, in which `*` matches any text, to the command to put first."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands
        self._local = LocalLauncher()

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process; if no name matches, its own command runs unchanged."""
        for name, command in self._commands.items():
            if fnmatch(spec.name, name):
                spec = replace(spec, argv=(*shlex.split(command), *spec.argv))
        return await self._local.start(spec)

    def close(self) -> None:
        """Does nothing: all processes have ended by now."""
        self._local.close()

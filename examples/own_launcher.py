"""A launcher: starts processes through commands of your own, such as `nice -n 5` or `taskset -c 0`.

The command must become the process (as `nice` does, by exec), so that its signals reach it.
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
    """`commands`: from names of processes, with `*` for any text, to what is put before their own command."""

    def __init__(self, commands: Mapping[str, str]) -> None:
        self._commands = commands
        self._local = LocalLauncher()

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process; one that no name matches is started as it is."""
        for name, command in self._commands.items():
            if fnmatch(spec.name, name):
                spec = replace(spec, argv=(*shlex.split(command), *spec.argv))
        return await self._local.start(spec)

    def close(self) -> None:
        """All processes have ended."""
        self._local.close()

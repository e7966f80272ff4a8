"""A host: holds one process of a run on another machine than the launcher's.

The host starts the process with a local launcher, so the process ends when the host ends, whether because the
launcher has ended the host or because the launcher is gone. Ray makes an actor of `ProcessHost` and calls its
methods; for SSH and Slurm, `host_main` calls them.
"""

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import astraflow
from astraflow.errors import ConfigError, ServiceError
from astraflow.processes.local_launcher import LocalLauncher
from astraflow.protocols import LifeReporter, ProcessHandle, ProcessLife, ProcessSpec
from astraflow.service.process import MODULE_PATH_VARIABLE

__all__ = ["News", "ProcessHost", "relocate"]

_NEWS_EVERY_S = 1.0
"""Time between two reports to the launcher."""
_MAX_LOG_BYTES = 256 * 1024
"""Largest output of the process in one report; more output takes several reports."""


@dataclass(frozen=True, slots=True)
class News:
    """The state of a process, and what it has written."""

    log: bytes
    """Its output from the requested offset."""
    life: ProcessLife
    code: int | None = None
    """Its exit code, once it has ended and all of its output was reported."""


class ProcessHost:
    """Holds one process. The launcher calls the methods from another machine.

    Example: `host = ProcessHost(); pid = await host.start(spec, {}, astraflow.__version__)`.
    """

    def __init__(self) -> None:
        self._launcher = LocalLauncher()
        self._handle: ProcessHandle | None = None
        self._ended: asyncio.Task[int] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="astraflow-"))
        self._log_path = self._folder

    async def start(self, spec: ProcessSpec, files: Mapping[Path, bytes], version: str) -> int:
        """Starts the process, with the contents of the files that it reads. Returns: its process id.

        `version`: that of the launcher's AstraFlow. Raises: ConfigError if this machine has another version.
        """
        if version != astraflow.__version__:
            raise ConfigError(
                f"this machine has astraflow {astraflow.__version__}, and the launcher has {version}; "
                "install the same version on all machines"
            )
        here = relocate(spec, files, self._folder)
        self._log_path = here.log_path
        self._handle = await self._launcher.start(here)
        self._ended = asyncio.create_task(self._handle.wait())
        return self._handle.pid

    async def news(self, offset: int) -> News:
        """Waits for a second, or until the process ends. Returns: what has happened."""
        handle, end = self._require_process()
        await asyncio.wait({end}, timeout=_NEWS_EVERY_S)
        # Checked before the output is read. If the process has ended by now, no output can follow.
        is_over = end.done()
        with self._log_path.open("rb") as file:
            file.seek(offset)
            log = file.read(_MAX_LOG_BYTES)
        if is_over:
            return News(log, ProcessLife(), None if log else end.result())
        return News(log, handle.life() if isinstance(handle, LifeReporter) else ProcessLife())

    async def silence(self, longest_s: float) -> str:
        """Does the same as `ProcessHandle.silence`."""
        handle, _ = self._require_process()
        return await handle.silence(longest_s)

    async def terminate(self) -> None:
        """Asks the process to stop."""
        self.terminate_now()

    def terminate_now(self) -> None:
        """Asks the process to stop. For signal handlers, which can't await."""
        self._require_process()[0].terminate()

    async def kill(self) -> None:
        """Kills the process."""
        self._require_process()[0].kill()

    async def end(self, grace_s: float) -> None:
        """Asks the process to stop. Kills it if it still runs after `grace_s`."""
        handle, end_of_process = self._require_process()
        handle.terminate()
        await asyncio.wait({end_of_process}, timeout=grace_s)
        handle.kill()
        await end_of_process

    async def clean(self) -> None:
        """Removes the files of the process from this machine. This is the last call, after the process has
        ended."""
        self._launcher.close()
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    def _require_process(self) -> tuple[ProcessHandle, "asyncio.Task[int]"]:
        if self._handle is None or self._ended is None:
            raise ServiceError("this host holds no process yet; call start first")
        return self._handle, self._ended


def relocate(spec: ProcessSpec, files: Mapping[Path, bytes], folder: Path) -> ProcessSpec:
    """Adapts a process to this machine, which has none of the launcher's files.

    Writes the files that the process reads, and creates its scratch folders, below `folder`. Arguments and
    variables with their paths get the new paths. The process runs under this machine's Python, and finds the
    user's own modules in the current folder.
    """
    places: dict[str, str] = {}
    for idx, (path, content) in enumerate(files.items()):
        place = folder / f"reads-{idx}" / path.name
        place.parent.mkdir()
        place.write_bytes(content)
        places[str(path)] = str(place)
    for idx, path in enumerate(spec.scratch):
        place = folder / f"scratch-{idx}"
        place.mkdir()
        places[str(path)] = str(place)
    env = {name: places.get(value, value) for name, value in spec.env.items()}
    return replace(
        spec,
        argv=(sys.executable, *(places.get(argument, argument) for argument in spec.argv[1:])),
        env={**env, MODULE_PATH_VARIABLE: str(Path.cwd())},
        log_path=folder / "log" / spec.log_path.name,
        scratch=tuple(Path(places[str(path)]) for path in spec.scratch),
        reads=tuple(Path(places[str(path)]) for path in files),
    )

"""The service under test, as the kit handles it: the kit can start it, ask it to stop, and kill it."""

import asyncio
import os
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from astraflow.errors import ConfigError

__all__ = ["Candidate", "Command", "Joining"]


class Candidate(Protocol):
    """One service under test. It can be started again each time it has ended."""

    @property
    def can_restart(self) -> bool:
        """Whether `start` can be called again."""
        ...

    async def start(self) -> None:
        """Starts the service. Its command line contains the kit's address."""
        ...

    async def stop(self) -> None:
        """Asks the service to stop, as SIGTERM does."""
        ...

    async def kill(self) -> None:
        """Ends the service at once, as kill -9 does."""
        ...

    async def ended(self) -> int:
        """Waits until the service ends. Returns the exit code."""
        ...


class Command:
    """A command line with placeholders such as `{name}`. `kill` ends all processes that the command started.

    Example: `Command("astraflow join {url} --name probe", {"url": url}, log=Path("candidate.log"))`.
    """

    can_restart = True

    def __init__(self, line: str, values: Mapping[str, str], *, env: Mapping[str, str], log: Path) -> None:
        """Raises: ConfigError if the line has a placeholder that `values` lacks."""
        try:
            self._argv = [part.format_map(dict(values)) for part in shlex.split(line)]
        except (KeyError, ValueError, IndexError) as err:
            known = ", ".join(f"{{{name}}}" for name in values)
            raise ConfigError(f"candidate {line!r}: {err}; it may name {known}") from err
        self._env = {**os.environ, **env}
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the command in its own session. Raises: ConfigError if the command cannot be started."""
        with self._log.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._argv, env=self._env, stdout=log, stderr=log, start_new_session=True
                )
            except OSError as err:
                raise ConfigError(f"candidate {self._argv[0]!r} cannot be started: {err.strerror}") from err

    async def stop(self) -> None:
        """Sends SIGTERM only to the command itself."""
        if self._process is not None and self._process.returncode is None:
            self._process.terminate()

    async def kill(self) -> None:
        """Sends SIGKILL to the command and to all processes that it started."""
        if self._process is None or self._process.returncode is not None:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def ended(self) -> int:
        """Waits until the command ends. Returns the exit code."""
        assert self._process is not None
        return await self._process.wait()


class Joining:
    """A service that somebody starts by hand, and that joins the kit at its address.

    The kit cannot start or end it.
    """

    can_restart = False

    async def start(self) -> None:
        """Does nothing, because somebody else starts the service."""

    async def stop(self) -> None:
        """Does nothing."""

    async def kill(self) -> None:
        """Does nothing."""

    async def ended(self) -> int:
        """Never returns, because the kit cannot see the process."""
        await asyncio.Event().wait()
        return 0

"""A server that an engine started: its process, its last output, and its end.

    loop   consumes                  produces             waits for           woken by
    read   the server's output       log lines, `tail`    output              the server
    wait   the keeper's exit code    `ended`              the keeper's end    the kernel

A keeper (`keeper.py`) runs between this process and the server, so that no server outlives its engine. The
keeper's standard output is the server's output, and the keeper's end is the server's end.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from astraflow.addons.inference_servers import keeper
from astraflow.addons.inference_servers.config import PASSED_ON_PREFIX, REFERENCE
from astraflow.errors import ConfigError
from astraflow.service.loopback import proxy_exemptions
from astraflow.service.memory import MemoryRecord

__all__ = ["ServerProcess", "server_environment", "server_program"]

_log = logging.getLogger(__name__)

_TAIL_LINES = 12
"""Number of the last lines of output that an error message quotes."""
_KEPT_LINES = 600
"""Number of lines kept. A traceback through several processes is long, and its cause is in the middle."""
_MAX_LINE_CHARS = 4096
"""Number of characters kept per line. A server may print a prompt, or a progress bar without line ends."""
# The limit on the length of the name keeps the search linear in the length of a line.
_ERROR = re.compile(r"\b[A-Z]\w{0,99}: \S")
_LOWER_LEVEL = re.compile(r"\b(?:DEBUG|INFO|WARNING)\b")
"""Lines of these levels don't report errors, although vLLM's warnings name the errors that may follow."""
_READ_BYTES = 1 << 16
_LOOK_EVERY_S = 1.0
_OUTPUT_S = 5.0
"""Time to read the rest of a server's output after its end."""
_PRIVATE_PREFIXES = ("ASTRAFLOW_", "PYTHONPATH", "PYTHONHOME")
"""Variables that the server must not get: tokens of the run, and paths to this environment's packages, which
would hide those of the server's own environment."""


def server_program(python: str) -> str:
    """Returns the program's absolute path, because the server runs in its own folder.

    Raises: ConfigError if the program doesn't exist.
    """
    found = shutil.which(str(Path(python).expanduser()))
    if found is None:
        raise ConfigError(
            f"rollout.engine.python = {python!r} isn't a program on this machine; expected the Python of an "
            "environment that has the server installed (docs/models.md#engines says how to make one)"
        )
    return str(Path.cwd() / found)


def server_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Returns this process's environment without its private variables, plus `extra`.

    A value in `extra` that refers to a variable is replaced with that variable's value.
    Raises: ConfigError if a reference names a variable that is not set.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE_PREFIXES)}
    variables = {**inherited, **{name: _looked_up(name, value) for name, value in extra.items()}}
    return variables | proxy_exemptions(variables)  # servers call themselves, e.g. to warm up


def _looked_up(name: str, value: str) -> str:
    """Returns the value or, if it refers to a variable, the value of that variable.

    A variable that the launcher passed on takes precedence over one of this machine.
    Raises: ConfigError if neither is set.
    """
    reference = REFERENCE.fullmatch(value)
    if reference is None:
        return value
    for variable in (PASSED_ON_PREFIX + reference[1], reference[1]):
        if variable in os.environ:
            return os.environ[variable]
    raise ConfigError(
        f"rollout.engine.env.{name} = {value!r}: {reference[1]} is not set here; set it before the service "
        "starts"
    )


class ServerProcess:
    """One start of a server. Example: `server = await ServerProcess.start(...)`; `await server.stop()`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, pid: int) -> None:
        self._name = name
        self._keeper = process
        self.pid = pid
        self.ended = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._memory = MemoryRecord()
        self._memory.look(0.0)
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._wait())]

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], *, env: Mapping[str, str], folder: Path
    ) -> "ServerProcess":
        """Starts a program in `folder`, which the keeper deletes if this process dies.

        Raises: ConfigError if the program can't be started.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            keeper.__file__,
            str(folder),
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=server_environment(env),
            cwd=folder,
            start_new_session=True,  # an interrupt at the terminal must not end the keeper
        )
        assert process.stderr is not None
        try:
            pid, _, problem = (await process.stderr.readline()).decode().strip().partition(" ")
        except asyncio.CancelledError:
            process.kill()  # a server that already runs dies with its keeper
            raise
        server = cls(name, process, int(pid) if pid.isdecimal() else 0)
        if server.pid == 0:
            await server.stop()
            raise ConfigError(
                f"{name}: cannot start {argv[0]!r}: {problem or 'its keeper ended'}; expected the path of a "
                "Python that has the server installed"
            )
        _log.info("%s: started as process %d", name, server.pid)
        return server

    @property
    def end(self) -> str:
        """A description of how the server ended."""
        code = self._keeper.returncode
        if code is None:
            return "runs"
        # The keeper's exit code is 128 + N for a server that was killed by signal N.
        if code == 128 + signal.SIGKILL:
            return f"was {self._memory.cause(0.0, 0, 'use fewer services, or a smaller model')}"
        return f"was killed by signal {code - 128}" if code > 128 else f"ended with exit code {code}"

    def tail(self) -> str:
        """Returns the server's last error, if it printed one, and its last lines of output."""
        lines = list(self._lines)
        errors = [line for line in lines if _names_error(line)]
        last = [f"its last error: {errors[-1].strip()}"] if errors else []
        tail = ["its last lines:", *lines[-_TAIL_LINES:]] if lines else ["it printed nothing"]
        return "\n".join([*last, *tail])

    async def stop(self, *, keeps_folder: bool = False) -> None:
        """Ends the server and everything that it started, and returns when they are gone."""
        assert self._keeper.stdin is not None
        if keeps_folder and not self.ended.is_set():
            with contextlib.suppress(OSError, RuntimeError):  # the keeper may be ending right now
                self._keeper.stdin.write(keeper.KEEP)
        self._keeper.stdin.close()  # tells the keeper to end the server
        try:
            async with asyncio.timeout(2 * keeper.GRACE_S):
                await self.ended.wait()
        except TimeoutError:
            _log.warning("%s: process %d does not end; it is killed", self._name, self.pid)
            self.kill()
            with contextlib.suppress(ProcessLookupError):
                self._keeper.kill()  # it may be stopped, and then it wouldn't notice
            await self.ended.wait()
        # Not until its end: a process that left the server's session may hold the output open.
        await asyncio.wait(self._tasks, timeout=_OUTPUT_S)

    def kill(self) -> None:
        """Kills the server and everything that it started. `ended` is set soon afterwards."""
        if self._keeper.returncode is None and self.pid:
            self._kill_session()

    def _kill_session(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _read(self) -> None:
        """Logs the server's output line by line, and keeps the last lines."""
        assert self._keeper.stdout is not None
        rest = ""
        while data := await self._keeper.stdout.read(_READ_BYTES):
            *lines, rest = (rest + data.decode(errors="replace")).split("\n")
            rest = rest[:_MAX_LINE_CHARS]
            for line in lines:
                self._lines.append(line[:_MAX_LINE_CHARS])
                _log.info("%s | %s", self._name, self._lines[-1])

    async def _wait(self) -> None:
        # Before Python 3.13, one long wait may go on until nobody holds the keeper's output open.
        while self._keeper.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY_S):
                    await self._keeper.wait()
        if self._keeper.returncode < 0 and self.pid:
            self._kill_session()  # when the keeper is killed, only its direct child dies with it
        self.ended.set()


def _names_error(line: str) -> bool:
    """Checks whether a line contains something like `ValueError: no such head`. Takes linear time."""
    names = (match[0].rpartition(":")[0] for match in _ERROR.finditer(line))
    return any(name.endswith(("Error", "Exception")) for name in names) and not _LOWER_LEVEL.search(line)

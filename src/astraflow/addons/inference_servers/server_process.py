"""A server that an engine started: its process, its last output, and its end.

A keeper (`service.kept_process`) runs between this process and the server, so that no server outlives its
engine. `ended` is set when the server and all that it has started are gone.
"""

import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from astraflow.addons.inference_servers.config import PASSED_ON_PREFIX, REFERENCE
from astraflow.errors import ConfigError
from astraflow.service.keeper import KEEP
from astraflow.service.kept_process import Care, KeptProcess, OutputLines
from astraflow.service.loopback import proxy_exemptions
from astraflow.service.memory import MemoryRecord
from astraflow.service.restarts import end_text

__all__ = ["EngineServerProcess", "server_environment", "server_program"]

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
_GRACE_S = 20.0
"""A server that still runs this long after SIGTERM is killed. It then leaves shared memory behind."""
_OUTPUT_S = 5.0
"""Time to read the rest of a server's output after its end."""
_PRIVATE_PREFIXES = ("ASTRAFLOW_", "PYTHONPATH", "PYTHONHOME")
"""Variables that the server must not get: tokens of the run, and paths to this environment's packages, which
would hide those of the server's own environment."""


def server_program(python: str) -> str:
    """Returns the program's absolute path, because the server runs in its own folder.

    Raises: ConfigError if the program doesn't exist.
    """
    path = shutil.which(str(Path(python).expanduser()))
    if path is None:
        raise ConfigError(
            f"rollout.engine.python = {python!r} isn't a program on this machine; expected the Python of an "
            "environment that has the server installed (docs/models.md#engines says how to make one)"
        )
    return str(Path.cwd() / path)


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


class EngineServerProcess:
    """One start of a server. Example: `server = await ServerProcess.start(...)`; `await server.stop()`."""

    def __init__(self, process: KeptProcess, output: OutputLines) -> None:
        self._process = process
        self._output = output
        self.ended = process.ended
        self._memory = MemoryRecord()
        self._memory.look(0.0)

    @classmethod
    async def start(
        cls, name: str, argv: Sequence[str], *, env: Mapping[str, str], folder: Path
    ) -> "EngineServerProcess":
        """Starts a program in `folder`, which the keeper deletes if this process dies.

        Raises: ConfigError if the program can't be started; DeadlineError if its keeper can't.
        """
        output = OutputLines(
            partial(_log.info, "%s | %s", name), num_kept=_KEPT_LINES, max_chars=_MAX_LINE_CHARS
        )
        with output.writer() as fd:
            process = await KeptProcess.start(
                argv,
                env=server_environment(env),
                folder=folder,
                stdout=fd,
                stderr=fd,
                care=Care(grace_s=_GRACE_S, removed=str(folder)),
            )
        server = cls(process, output)
        if not process.pid:
            await server.stop()
            raise ConfigError(
                f"{name}: cannot start {argv[0]!r}: {process.problems.get('start') or 'its keeper ended'}; "
                "expected the path of a Python that has the server installed"
            )
        _log.info("%s: started as process %d", name, process.pid)
        return server

    @property
    def end(self) -> str:
        """A description of how the server ended."""
        code = self._process.code
        advice = "use fewer services, or a smaller model"
        return "runs" if code is None else end_text(code, self._memory, advice)

    def tail(self) -> str:
        """Returns the server's last error, if it printed one, and its last lines of output."""
        lines = list(self._output.last)
        errors = [line for line in lines if _names_error(line)]
        last = [f"its last error: {errors[-1].strip()}"] if errors else []
        tail = ["its last lines:", *lines[-_TAIL_LINES:]] if lines else ["it printed nothing"]
        return "\n".join([*last, *tail])

    async def stop(self, *, keeps_folder: bool = False) -> None:
        """Ends the server and everything that it started, and returns when they are gone."""
        await self._process.end(KEEP if keeps_folder else b"")
        await self._output.until_end(_OUTPUT_S)


def _names_error(line: str) -> bool:
    """Checks whether a line contains something like `ValueError: no such head`. Takes linear time."""
    names = (match[0].rpartition(":")[0] for match in _ERROR.finditer(line))
    return any(name.endswith(("Error", "Exception")) for name in names) and not _LOWER_LEVEL.search(line)

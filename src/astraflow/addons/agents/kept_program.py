"""Runs agent programs on this machine as it is, each under a keeper, in a light box.

In the box, no secret of the run can be reached. The keeper kills everything that the program started when the
program ends, takes too long or is cancelled, and when this process dies.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec

import astraflow
from astraflow.addons.agents.config import ProgramConfig
from astraflow.addons.agents.program_start import ProgramEnded, ProgramStart
from astraflow.addons.sandbox.inside import keeper
from astraflow.addons.sandbox.inside.enter import boot_code
from astraflow.errors import ConfigError

__all__ = ["KeptPrograms"]

_log = logging.getLogger(__name__)

_MAX_STATUS_BYTES = 65_536
"""The capacity of a pipe on Linux, so the keeper can always write its status before anybody reads it."""
_PACKAGE = str(Path(astraflow.__file__).parent.parent)
"""The folder from which the keeper imports."""
_MAX_OUTPUT_BYTES = 1 << 18
"""Bytes that are read from the end of an output: at least the characters that anybody is shown of it."""
_HIDDEN_PATTERNS = ("astraflow-agents-*", "astraflow-vllm-*", "astraflow-sglang-*")
"""Temporary folders that a program must not see: those of other programs, and those of engine servers, which
hold sockets and weights."""


class KeptPrograms:
    """Runs the programs of a workflow under keepers, in a box unless `box: none`.

    Example: `programs = KeptPrograms(config, private=(run_dir,))`, then `await programs.run(start)`.
    """

    def __init__(self, config: ProgramConfig, *, private: tuple[Path, ...]) -> None:
        """`private`: files and folders that no program may see."""
        self._config = config
        self._private = private
        self._probing = asyncio.Lock()
        self._problem: str | None = None
        """Why this machine has no box: None before the first try, empty if it has one."""

    async def is_boxed(self) -> bool:
        """Whether programs run in a box.

        Raises: ConfigError if the recipe requires a box and this machine cannot make one.
        """
        if self._config.box == "none":
            return False
        async with self._probing:
            if self._problem is None:
                self._problem = await self._probed()
        if self._problem and self._config.box == "required":
            raise ConfigError(
                f"workflow.run.box = required, but this machine cannot make a box: {self._problem}; allow "
                "user namespaces here, or set box to preferred, and trust the program with the run's secrets"
            )
        return not self._problem

    async def run(self, start: ProgramStart) -> ProgramEnded:
        """Runs a program to its end. Afterwards, nothing that it started is left, even if this is cancelled.

        Raises: ConfigError as `is_boxed`.
        """
        is_boxed = await self.is_boxed()
        with tempfile.TemporaryDirectory(prefix="agent-", dir=_parent()) as name:
            folder = Path(name)
            (folder / "task.json").write_bytes(start.task)
            ended = await self._ended(
                self._config.command, folder, start.variables(folder), is_boxed=is_boxed
            )
            result = folder / "result.json"
            return replace(
                ended,
                stdout=_end_of(folder / "stdout"),
                stderr=_end_of(folder / "stderr"),
                result=result.read_bytes() if result.is_file() else None,
            )

    async def _probed(self) -> str:
        """Tries a box with an empty program. Returns why this machine cannot make one; empty if it can."""
        with tempfile.TemporaryDirectory(prefix="agent-", dir=_parent()) as name:
            command = (sys.executable, "-I", "-S", "-c", "")
            (Path(name) / "task.json").touch()
            ended = await self._ended(command, Path(name), dict(os.environ), is_boxed=True)
        problem = ended.box_problem or ended.start_problem
        if ended.is_late:
            problem = f"its first program took longer than {self._config.timeout_s:g} s"
        if problem and self._config.box != "required":
            _log.warning(
                "AGENT PROGRAMS RUN WITHOUT A BOX (%s): they can read the tokens of this run and the keys of "
                "other episodes; each episode counts this as the metric `unboxed`",
                problem,
            )
        return problem

    async def _ended(
        self, command: tuple[str, ...], folder: Path, env: dict[str, str], *, is_boxed: bool
    ) -> ProgramEnded:
        """Runs a program under a keeper. Afterwards, nothing that the program started is left."""
        specification = json.dumps(
            {
                "argv": command,
                "is_boxed": is_boxed,
                "hidden": [str(path) for path in self._hidden()],
                "own": [str(folder)],
                "read_only": sorted({sys.prefix, str(Path(astraflow.__file__).parent)}),
            }
        )
        control_read, control = os.pipe()
        status, status_write = os.pipe()
        try:
            process = await _started(specification, folder, env, (control_read, status_write))
        except BaseException:
            os.close(control)
            os.close(status)
            raise
        finally:
            os.close(control_read)
            os.close(status_write)
        is_late = False
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await process.wait()
        except TimeoutError:
            is_late = True
        finally:
            os.close(control)  # the keeper now kills what is left, and ends
            await _gone(process)
            reported = os.read(status, _MAX_STATUS_BYTES)
            os.close(status)
        return replace(_status(reported, process.returncode or 0), is_late=is_late)

    def _hidden(self) -> list[Path]:
        """Paths that no program may see: the run's secrets, other programs' folders, and engines' sockets."""
        temporary = Path(tempfile.gettempdir())
        found = [path for pattern in _HIDDEN_PATTERNS for path in temporary.glob(pattern)]
        found += [path for path in self._private if path.exists()]
        return sorted({path.resolve() for path in found})


async def _started(
    specification: str, folder: Path, env: dict[str, str], fds: tuple[int, int]
) -> asyncio.subprocess.Process:
    """Starts the keeper of a program; the program inherits its input and outputs.

    The outputs are files and not pipes, because a child that outlives the program could hold pipes open.
    `env` is a dict because uvloop takes no other mapping.
    """
    with (
        (folder / "task.json").open("rb") as stdin,
        (folder / "stdout").open("wb") as stdout,
        (folder / "stderr").open("wb") as stderr,
    ):
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            boot_code(_PACKAGE, keeper.__name__, ""),
            specification,
            *map(str, fds),
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env=env,
            pass_fds=fds,
            start_new_session=True,
        )


async def _gone(process: asyncio.subprocess.Process) -> None:
    """Waits for a keeper that has been told to end. A keeper that does not end in time is killed."""
    try:
        async with asyncio.timeout(2 * keeper.LIMIT_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _status(reported: bytes, keeper_code: int) -> ProgramEnded:
    """Reads the keeper's report. A keeper that was killed reports nothing; its program counts as failed."""
    if not reported:
        return ProgramEnded(keeper_code or 1)
    status = msgspec.json.decode(reported, type=dict[str, int | str])
    return ProgramEnded(
        int(status["code"]),
        start_problem=str(status.get("start", "")),
        box_problem=str(status.get("box", "")),
    )


def _parent() -> Path:
    """The folder that holds the folders of this user's programs. In its box, a program sees only its own one.

    Raises: ConfigError if the folder belongs to somebody else, or others may enter it.
    """
    path = Path(tempfile.gettempdir()) / f"astraflow-agents-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    # 0o040700 is a folder, and not a link to one, with mode 700.
    if found.st_uid != os.getuid() or found.st_mode & 0o170777 != 0o040700:
        raise ConfigError(
            f"{path} is not this user's own folder of mode 700; delete it, or set TMPDIR to another folder"
        )
    return path


def _end_of(path: Path) -> str:
    """The end of an output."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_OUTPUT_BYTES))
        return file.read().decode("utf-8", "replace")

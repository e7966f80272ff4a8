"""Runs agent programs on this machine, each under a keeper and in a light box.

In the box, the secrets of the run are hidden. The keeper kills everything that the program has started when
the program ends, takes too long, or is cancelled, and when this process dies.
"""

import asyncio
import logging
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import astraflow
from astraflow.addons.agents.config import ProgramConfig
from astraflow.addons.agents.program_start import ProgramEnd, ProgramStart
from astraflow.addons.sandbox.inside import light_box
from astraflow.errors import ConfigError
from astraflow.service.kept_process import Care, KeptProcess

__all__ = ["KeptPrograms"]

_log = logging.getLogger(__name__)

_MAX_OUTPUT_BYTES = 1 << 18
"""Number of bytes that are read from the end of an output: enough for all the characters that are used."""
_HIDDEN_PATTERNS = ("astraflow-agents-*", "astraflow-vllm-*", "astraflow-sglang-*")
"""Temporary folders that a program must not see: those of other programs, and those of engine servers, with
their sockets and weights."""


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
        """Why this machine cannot make a box; None before the first attempt, empty if it can."""

    async def is_boxed(self) -> bool:
        """Whether programs run in a box.

        Raises: ConfigError if the recipe requires a box and this machine cannot make one.
        """
        if self._config.box == "none":
            return False
        async with self._probing:
            if self._problem is None:
                self._problem = await self._probe()
        if self._problem and self._config.box == "required":
            raise ConfigError(
                f"workflow.run.box = required, but this machine cannot make a box: {self._problem}; allow "
                "user namespaces here, or set box to preferred, and trust the program with the run's secrets"
            )
        return not self._problem

    async def run(self, start: ProgramStart) -> ProgramEnd:
        """Runs a program to its end. Afterwards, nothing that it started is left, even if this is cancelled.

        Raises: ConfigError, like `is_boxed`.
        """
        is_boxed = await self.is_boxed()
        with tempfile.TemporaryDirectory(prefix="agent-", dir=_parent()) as name:
            folder = Path(name)
            (folder / "task.json").write_bytes(start.task)
            end = await self._run_under_keeper(
                self._config.command, folder, start.variables(folder), is_boxed=is_boxed
            )
            result = folder / "result.json"
            return replace(
                end,
                stdout=_read_tail(folder / "stdout"),
                stderr=_read_tail(folder / "stderr"),
                result=result.read_bytes() if result.is_file() else None,
            )

    async def _probe(self) -> str:
        """Runs an empty program in a box. Returns why this machine cannot make a box; empty if it can."""
        with tempfile.TemporaryDirectory(prefix="agent-", dir=_parent()) as name:
            command = (sys.executable, "-I", "-S", "-c", "")
            (Path(name) / "task.json").touch()
            end = await self._run_under_keeper(command, Path(name), dict(os.environ), is_boxed=True)
        problem = end.box_problem or end.start_problem
        if end.is_late:
            problem = f"its first program took longer than {self._config.timeout_s:g} s"
        if problem and self._config.box != "required":
            _log.warning(
                "AGENT PROGRAMS RUN WITHOUT A BOX (%s): they can read the tokens of this run and the keys of "
                "other episodes; each episode counts this as the metric `unboxed`",
                problem,
            )
        return problem

    async def _run_under_keeper(
        self, command: tuple[str, ...], folder: Path, env: dict[str, str], *, is_boxed: bool
    ) -> ProgramEnd:
        """Runs a program under a keeper. Afterwards, nothing that the program started is left.

        The outputs are files and not pipes, because a child that outlives the program could keep pipes open.
        """
        box = {
            "hidden": [str(path) for path in self._hidden()],
            "own": [str(folder)],
            "read_only": sorted({sys.prefix, str(Path(astraflow.__file__).parent)}),
        }
        with (
            (folder / "task.json").open("rb") as stdin,
            (folder / "stdout").open("wb") as stdout,
            (folder / "stderr").open("wb") as stderr,
        ):
            process = await KeptProcess.start(
                command,
                env=env,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                care=Care(walls=light_box.__name__, box=box if is_boxed else None),
            )
        is_late = False
        try:
            async with asyncio.timeout(self._config.timeout_s):
                await process.ended.wait()
        except TimeoutError:
            is_late = True
        finally:
            code = await process.end()
        problems = process.problems
        return ProgramEnd(
            code,
            is_late=is_late,
            start_problem=problems.get("start", ""),
            box_problem=problems.get("box", ""),
        )

    def _hidden(self) -> list[Path]:
        """Paths that no program may see: the run's secrets, other programs' folders, and engines' sockets."""
        temporary = Path(tempfile.gettempdir())
        paths = [path for pattern in _HIDDEN_PATTERNS for path in temporary.glob(pattern)]
        paths += [path for path in self._private if path.exists()]
        return sorted({path.resolve() for path in paths})


def _parent() -> Path:
    """The parent of the folders of this user's programs. In its box, a program sees only its own folder.

    Raises: ConfigError if the folder belongs to somebody else, or is accessible to others.
    """
    path = Path(tempfile.gettempdir()) / f"astraflow-agents-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    # 0o040700 is a folder (and not a link to one) with mode 700.
    if status.st_uid != os.getuid() or status.st_mode & 0o170777 != 0o040700:
        raise ConfigError(
            f"{path} is not this user's own folder of mode 700; delete it, or set TMPDIR to another folder"
        )
    return path


def _read_tail(path: Path) -> str:
    """Reads the end of an output."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _MAX_OUTPUT_BYTES))
        return file.read().decode("utf-8", "replace")

"""Runs agent programs in the sandbox. Each sees only its own files, and can reach only the policies."""

import asyncio
import errno
import os
from pathlib import Path, PurePosixPath

from astraflow.addons.agents.config import ProgramConfig
from astraflow.addons.agents.program_start import ProgramEnd, ProgramStart
from astraflow.addons.sandbox.backends import BoxMaker, chosen_maker
from astraflow.addons.sandbox.command import CommandLimits
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.openings import openings_for
from astraflow.errors import ConfigError, SandboxError

__all__ = ["SandboxedPrograms"]

_MIB = 1 << 20
_FOLDER = PurePosixPath("/tmp")
"""The folder of a program in its box."""


class SandboxedPrograms:
    """Runs the programs of a workflow with `box: sandbox`, each in a separate box.

    Example: `programs = SandboxedPrograms(config, private=(run_dir,))`, then `await programs.run(start)`.
    """

    def __init__(self, config: ProgramConfig, *, private: tuple[Path, ...]) -> None:
        """`private`: files and folders that no program may see, even if they are in its own folder."""
        self._config = config
        self._private = private
        self._choosing = asyncio.Lock()
        self._maker: BoxMaker | None = None
        self._limits = CommandLimits(
            wall_s=config.timeout_s,
            memory_bytes=config.sandbox.memory_mb * _MIB,
            disk_bytes=config.sandbox.disk_mb * _MIB,
            output_bytes=config.sandbox.output_mb * _MIB,
            num_processes=config.sandbox.num_processes,
        )

    async def is_boxed(self) -> bool:
        """Always true. Raises: ConfigError if this machine has no usable sandbox."""
        await self._choose_maker()
        return True

    async def run(self, start: ProgramStart) -> ProgramEnd:
        """Runs a program to its end. Afterwards, nothing of it is left, even if this is cancelled.

        Raises: ConfigError if this machine has no usable sandbox, or the program does not exist.
        """
        maker = await self._choose_maker()
        config = self._config
        env = start.variables(_FOLDER)
        openings = await asyncio.to_thread(
            openings_for,
            config.command,
            folder=Path.cwd(),
            path=env.get("PATH", os.defpath),
            gateway=start.gateway,
            visible=[Path(each) for each in config.sandbox.visible],
            private=self._private,
        )
        command = openings.command(
            config.command,
            # The folders of the service's user don't exist in the box.
            {**env, "HOME": str(_FOLDER), "TMPDIR": str(_FOLDER), "PWD": openings.folder},
            limits=self._limits,
            stdin=start.task,
            files={"task.json": start.task},
            result=env["ASTRAFLOW_RESULT_FILE"],
        )
        try:
            box = await maker.make(openings)
        except SandboxError as err:
            return ProgramEnd(box_problem=str(err))
        try:
            end = await box.execute(command)
        except SandboxError as err:
            return ProgramEnd(box_problem=str(err))
        finally:
            await box.close()
        return ProgramEnd(
            end.code,
            end.stdout,
            end.stderr,
            end.result,
            is_late=end.is_late,
            is_full=end.is_full,
            start_problem=_explain(end.unstartable),
        )

    async def _choose_maker(self) -> BoxMaker:
        async with self._choosing:
            if self._maker is None:
                try:
                    self._maker = await chosen_maker(
                        SandboxConfig(backend=self._config.sandbox.backend), for_agents=True
                    )
                except ConfigError as err:
                    raise ConfigError(f"workflow.run.box = sandbox: {err}") from err
            return self._maker


def _explain(problem: str) -> str:
    """Why a program could not be started, with a hint for root, which may not expect a lack of permission."""
    if problem == os.strerror(errno.EACCES) and os.geteuid() == 0:
        return f"{problem}; in the sandbox, even root's programs can use only files that everybody may use"
    return problem

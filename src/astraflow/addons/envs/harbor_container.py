"""Harbor task folders in containers: each episode has a container of the task's own image.

    tasks:
      environments:
        bench:
          use: "astraflow.addons.envs.harbor_container:ContainerHarbor"
          args: {path: data/terminal-bench}
      sources: {tasks: {name: environment}}
    workflow: {name: environment, max_turns: 31}

The folders are those of Terminal-Bench, or any others of Harbor's format. `podman` gets the image that a task
names, or else builds the folder's Dockerfile, and runs the policy's commands in it. Tasks that need more than
a container are left out, with a warning. Everything else is as in `astraflow.addons.envs.harbor`.
"""

import asyncio
import hashlib
import logging
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from astraflow.addons.envs.harbor import Harbor, HarborEpisode
from astraflow.addons.envs.harbor_folder import HarborTask, harbor_task, read_folder
from astraflow.addons.sandbox.shell import CommandResult, Ran, ShellCommand
from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import Observation
from astraflow.types import Task

__all__ = ["ContainerHarbor"]

_log = logging.getLogger(__name__)

_STARTING_S = 120.0
"""Time limit of starting or removing a container, and of copying files into it."""
_BUILDING_S = 1_800.0
"""Time limit of building or getting an image."""
_MAX_OUTPUT = 64 * 1024
"""Size of each output of a command. The rest is dropped."""
_LATE = 124
"""Exit code of `timeout` for a command whose time is over."""


class ContainerHarbor(Harbor):
    """All Harbor task folders in a folder, each episode in a container of its own.

    Example: `ContainerHarbor(path="data/terminal-bench")`.
    """

    def __init__(
        self,
        *,
        path: str,
        engine: str = "podman",
        form: Literal["full", "bare"] = "full",
        max_commands: int = 30,
        command_s: float = 120.0,
        reward: str = "reward",
        heldout_frac: float = 0.2,
    ) -> None:
        """`path`: the folder with the task folders. `engine`: the program that runs containers, `podman` or
        one with the same commands. For the other arguments, see `HarborEnvironment` and `Harbor`.

        Raises: ConfigError.
        """
        super().__init__(
            path=path,
            form=form,
            max_commands=max_commands,
            command_s=command_s,
            reward=reward,
            heldout_frac=heldout_frac,
        )
        self._engine = engine
        self._folders = Path(path)
        self._images: dict[str, asyncio.Task[str]] = {}
        """The image of each task, by its folder. It is built once."""

    def tasks(self, split: str) -> Sequence[Task]:
        if shutil.which(self._engine) is None:
            raise ConfigError(
                f"the tasks in {self._folders} run in containers, but the program {self._engine!r} is not "
                "installed here; install podman (on Debian: apt-get install podman)"
            )
        return super().tasks(split)

    async def open(self) -> None:
        """Checks that containers can run. Raises: ConfigError if they can't."""
        try:
            await self._call(["info"], limit_s=_STARTING_S)
        except RolloutError as err:
            raise ConfigError(f"no container can run here: {err}") from err

    async def close(self) -> None:
        for building in self._images.values():
            building.cancel()
        await asyncio.gather(*self._images.values(), return_exceptions=True)

    def _task_folders(self) -> list[Path]:
        found: list[Path] = []
        for folder in super()._task_folders():
            try:
                self._read(folder)
            except ConfigError as err:
                _log.warning("the task %s is left out: %s", folder.name, err)
            else:
                found.append(folder)
        return found

    def _read(self, folder: Path) -> HarborTask:
        return harbor_task(read_folder(folder, in_container=True), str(folder), in_container=True)

    async def reset(self, task: Task, seed: int) -> tuple[HarborEpisode, Observation]:
        del seed
        episode, shown = await self._begin(task)
        made = episode.task
        if task.spec not in self._images:
            self._images[task.spec] = asyncio.create_task(self._image(self._folders / task.spec, made))
        image = await asyncio.shield(self._images[task.spec])
        limits = [f"--memory={made.memory_mb}m", f"--cpus={made.cpus:g}"]
        network = [] if made.has_network else ["--network=none"]
        command = [
            "run",
            "--detach",
            "--rm",
            "--init",
            *limits,
            *network,
            "--entrypoint=sleep",
            image,
            "infinity",
        ]
        container = await self._call(command, limit_s=_STARTING_S)
        episode.state = container.strip()
        return episode, shown

    async def end(self, state: HarborEpisode) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        await self._call(["rm", "--force", "--time=0", state.state.decode()], limit_s=_STARTING_S)

    async def _run(self, state: HarborEpisode, commands: Sequence[ShellCommand], *, is_kept: bool) -> Ran:
        del is_kept  # the container keeps the files
        container = state.state.decode()
        ended = [await self._run_one(container, command) for command in commands]
        return Ran(ended, state.state, "")

    async def _run_one(self, container: str, command: ShellCommand) -> CommandResult:
        for folder in command.cleared:
            place = shlex.quote(folder)
            await self._execute(
                container, f"rm -rf {place}; mkdir -p {place}", folder="/", limit_s=_STARTING_S
            )
        if command.files:
            await self._call(["cp", "-", f"{container}:/"], command.files, limit_s=_STARTING_S)
        limited = f"timeout -k 5 {command.timeout_s:.1f} bash -c {shlex.quote(command.command)}"
        code, stdout, stderr = await self._execute(
            container, limited, folder=command.folder, env=dict(command.env), limit_s=command.timeout_s + 60
        )
        found: dict[str, bytes | None] = {}
        for path in command.reads:
            read, content, _ = await self._execute(
                container, f"cat {shlex.quote(path)}", folder="/", limit_s=_STARTING_S
            )
            found[path] = None if read else content
        return CommandResult(code, code == _LATE, stdout[:_MAX_OUTPUT], stderr[:_MAX_OUTPUT], found)

    async def _image(self, folder: Path, made: HarborTask) -> str:
        """Builds or gets the image of a task, and returns its name."""
        if made.image:
            missing, _, _ = await self._start(["image", "exists", made.image], b"", _STARTING_S)
            if missing:
                await self._call(["pull", "--quiet", made.image], limit_s=_BUILDING_S)
            return made.image
        name = _image_name(folder)
        build = ["build", "--quiet", f"--tag={name}", str(folder / "environment")]
        await self._call(build, limit_s=_BUILDING_S)
        return name

    async def _execute(
        self, container: str, command: str, *, folder: str, limit_s: float, env: dict[str, str] | None = None
    ) -> tuple[int, bytes, bytes]:
        variables = [f"--env={name}={value}" for name, value in (env or {}).items()]
        words = ["exec", f"--workdir={folder}", *variables, container, "bash", "-c", command]
        return await self._start(words, b"", limit_s)

    async def _call(self, words: list[str], given: bytes = b"", *, limit_s: float) -> bytes:
        """Calls the engine. Raises: RolloutError with what it says if it fails."""
        code, stdout, stderr = await self._start(words, given, limit_s)
        if code:
            said = (stderr or stdout)[-500:].decode(errors="replace").strip()
            raise RolloutError(f"`{self._engine} {words[0]}` failed with code {code}: {said}")
        return stdout

    async def _start(self, words: list[str], given: bytes, limit_s: float) -> tuple[int, bytes, bytes]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._engine, *words, stdin=pipe, stdout=pipe, stderr=pipe
        )
        try:
            async with asyncio.timeout(limit_s):
                stdout, stderr = await process.communicate(given)
        except TimeoutError as err:
            raise RolloutError(f"`{self._engine} {words[0]}` took longer than {limit_s:.0f} s") from err
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, stdout, stderr


def _image_name(folder: Path) -> str:
    digest = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()
    return f"astraflow-harbor-{digest[:16]}"

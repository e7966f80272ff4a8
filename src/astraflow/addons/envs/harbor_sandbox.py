"""The sandbox as an environment for Harbor: `harbor run` runs its tasks in boxes, without a container engine.

    harbor run --path my-tasks --agent oracle -e astraflow.addons.envs.harbor_sandbox:SandboxEnvironment

Harbor keeps a container per trial. Here a trial keeps only files: each command is a fork in a box, which
begins with the files of the previous command. Processes end with their command, and there is one user. Tasks
that need more are refused before the trial starts, as in `astraflow.addons.envs.harbor`.

This module is used in Harbor's own Python (3.12 or newer). Harbor is imported when the class is first
accessed.

Source: harbor/environments/base.py of Harbor 0.25.
"""

import asyncio
import importlib
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from astraflow.addons.envs.harbor_folder import HarborImage, harbor_image, read_folder
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.shell import (
    BoxFile,
    CommandResult,
    ShellCommand,
    ShellLimits,
    archive,
    files_at,
    run_commands,
    shell_sandbox,
)
from astraflow.errors import ConfigError

__all__ = ["sandbox_environment"]

_BASE = "harbor.environments.base"
_CAPABILITIES = "harbor.environments.capabilities"
_MIB = 1 << 20
_LONGEST_S = 3_000.0
"""Time limit of a command for which Harbor sets none."""
_MEMORY_MB = 2_048
"""Memory of a task that sets none."""
_MAX_OUTPUT = _MIB
"""Largest size of each output of a command. It isn't small, because Harbor lists files with commands."""
_OWN_USERS = (None, "root", 0)
"""Users that Harbor may name. All of them are the box's only user."""


class _SandboxEnvironment:
    """Runs the commands of a trial in boxes. Harbor's base class is added when Harbor is imported."""

    environment_dir: Path
    task_env_config: Any

    def __init__(
        self,
        *given: Any,
        without_network: bool = False,
        disk_mb: int = 64,
        backend: Literal["auto", "bubblewrap", "namespaces"] = "auto",
        **settings: Any,
    ) -> None:
        """`without_network`: whether tasks that may use the network run without it, or are refused.
        `disk_mb`: largest size of all files of a trial, in MiB. The other arguments are Harbor's.

        Raises: ConfigError if the task needs something that the sandbox doesn't support.
        """
        self._without_network = without_network
        self._disk_mb = disk_mb
        self._sandbox = shell_sandbox(SandboxConfig(num_boxes=1, backend=backend))
        self._state = b""
        self._turn = asyncio.Lock()
        self._image = HarborImage()
        cast("Any", super()).__init__(*given, **settings)

    @staticmethod
    def type() -> str:
        """Harbor's name for this kind of environment."""
        return "astraflow"

    @property
    def capabilities(self) -> Any:
        """A box has no network."""
        return cast("Any", importlib.import_module(_CAPABILITIES)).EnvironmentCapabilities(
            disable_internet=True
        )

    @property
    def _harbor(self) -> Any:
        """This object, for access to the members of Harbor's base class."""
        return self

    def _validate_definition(self) -> None:
        """Reads the image. Harbor calls this method in its constructor."""
        where = str(self.environment_dir.parent)
        mode = self._harbor.network_policy.network_mode.value
        if mode != "no-network" and not self._without_network:
            raise ConfigError(
                f"{where}: a box has no network ({mode}); if the task does not need it, pass "
                "`--ek without_network=true`"
            )
        config = self.task_env_config
        self._image = harbor_image(
            read_folder(self.environment_dir),
            where,
            docker_image=config.docker_image,
            workdir=config.workdir,
        )

    # --- a trial --------------------------------------------------------------------------------------

    async def start(self, force_build: bool) -> None:
        """Begins with the files of the image. `force_build` has no effect, because nothing is built."""
        await self._sandbox.open()
        self._state = archive(self._image.files, [self._image.folder])
        await self._harbor.ensure_dirs(self._harbor._mount_targets(writable_only=True))

    async def stop(self, delete: bool) -> None:
        """Ends the box. Nothing of it is left, whatever `delete` is."""
        await self._sandbox.close()
        self._state = b""

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> Any:
        """Runs a command.

        Raises: RuntimeError if it takes too long, as in Harbor; ConfigError for an unknown user.
        """
        name = self._harbor._resolve_user(user)
        if name not in _OWN_USERS:
            raise ConfigError(f"the user {name!r} does not exist: a box has only one user")
        merged: Mapping[str, str] = self._harbor._merge_env(env) or {}
        variables = {**self._image.env, **merged}
        folder = cwd or self._image.folder
        result = await self._run(ShellCommand(command, folder, variables, timeout_sec or _LONGEST_S))
        if result.is_late:
            raise RuntimeError(f"Command timed out after {timeout_sec} seconds")
        return cast("Any", importlib.import_module(_BASE)).ExecResult(
            stdout=result.stdout.decode(errors="replace"),
            stderr=result.stderr.decode(errors="replace"),
            return_code=result.code,
        )

    async def _run(self, command: ShellCommand) -> CommandResult:
        """Runs a command and saves the files that it leaves. Raises: RuntimeError if that is not possible."""
        config = self.task_env_config
        limits = ShellLimits(
            memory_bytes=(config.memory_mb or _MEMORY_MB) * _MIB,
            disk_bytes=min(config.storage_mb or self._disk_mb, self._disk_mb) * _MIB,
            output_bytes=_MAX_OUTPUT,
        )
        async with self._turn:
            ran = await run_commands(self._sandbox, self._state, [command], limits=limits)
            if ran.problem:
                raise RuntimeError(f"the files that a command left cannot be saved: {ran.problem}")
            self._state = ran.state
        return ran.results[0]

    # --- files ----------------------------------------------------------------------------------------

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        """Copies a file into the trial."""
        await self._put({target_path: await asyncio.to_thread(_read, Path(source_path))}, [])

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        """Copies the files of a folder into the trial. Raises: ConfigError for links, or too many files."""
        files = await asyncio.to_thread(read_folder, Path(source_dir))
        await self._put({f"{target_dir}/{name}": file for name, file in files.items()}, [target_dir])

    async def _put(self, files: Mapping[str, BoxFile], folders: list[str]) -> None:
        await self._run(ShellCommand("true", "/tmp", files=archive(files, folders)))

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        """Copies a file out of the trial. Raises: FileNotFoundError if it does not exist, or is a link."""
        file = files_at(self._state, source_path).get(".")
        if file is None:
            raise FileNotFoundError(f"the trial has no file {source_path}")
        await asyncio.to_thread(_write, {Path(target_path): file})

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        """Copies the files of a folder out of the trial. Links are left out."""
        files = files_at(self._state, source_dir)
        await asyncio.to_thread(Path(target_dir).mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(_write, {Path(target_dir) / name: file for name, file in files.items()})


def _read(path: Path) -> BoxFile:
    return BoxFile(path.read_bytes(), bool(path.stat().st_mode & 0o100))


def _write(files: Mapping[Path, BoxFile]) -> None:
    for path, file in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.content)
        path.chmod(0o755 if file.is_executable else 0o644)


@cache
def sandbox_environment() -> type:
    """Makes the class `SandboxEnvironment`. Raises: ImportError if Harbor is not installed."""
    base: Any = importlib.import_module(_BASE)
    return types.new_class(
        "SandboxEnvironment",
        (_SandboxEnvironment, base.BaseEnvironment),
        exec_body=lambda names: names.update(__module__=__name__, __doc__=_SandboxEnvironment.__doc__),
    )


def __getattr__(name: str) -> type:
    if name == "SandboxEnvironment":
        return sandbox_environment()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

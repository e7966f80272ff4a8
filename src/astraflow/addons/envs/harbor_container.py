"""Containers for Harbor tasks: each episode has a container of the task's own image.

`podman`, or a program with the same commands, gets the image that a task names, or else builds the folder's
Dockerfile, and runs the policy's commands in it.
"""

import asyncio
import hashlib
import logging
import os
import secrets
import shlex
import time
from collections.abc import Sequence
from contextlib import suppress

from astraflow.addons.envs.harbor_folder import HarborTask
from astraflow.addons.sandbox.shell import CommandResult, ShellCommand, ShellRun
from astraflow.errors import ConfigError, RolloutError

__all__ = ["Containers"]

_log = logging.getLogger(__name__)

_STARTING_S = 120.0
"""Time limit of starting or removing a container, and of copying files into it."""
_BUILDING_S = 1_800.0
"""Time limit of building or getting an image."""
_MAX_OUTPUT = 64 * 1024
"""Size of each output of a command. The rest is dropped."""
_LATE = (124, 128 + 9)
"""Exit codes of `timeout` for a command whose time is over: it ended by itself then, or was killed."""


class Containers:
    """Runs the commands of each episode in a container. The state of an episode is its container's name."""

    def __init__(self, engine: str) -> None:
        """`engine`: the program that runs containers."""
        self._engine = engine
        self._images: dict[str, asyncio.Task[str]] = {}
        """The image of each task, by its folder. It is built once, or again after a failure."""
        self._removals: set[asyncio.Task[None]] = set()
        """The removals of containers, which go on when the episodes that caused them are cancelled."""

    async def open(self) -> None:
        """Checks that containers can run. Raises: ConfigError if they can't."""
        try:
            await self._call(["info"], limit_s=_STARTING_S)
        except RolloutError as err:
            raise ConfigError(f"no container can run here: {err}") from err

    async def close(self) -> None:
        """Ends the building of images, and waits until all containers that episodes have left are removed."""
        for building in self._images.values():
            building.cancel()
        await asyncio.gather(*self._images.values(), *self._removals, return_exceptions=True)

    async def begin(self, task: HarborTask) -> bytes:
        """Starts a container, and returns its name. If this fails or is cancelled, no container is left."""
        building = self._images.get(task.source)
        if building is None or (building.done() and (building.cancelled() or building.exception())):
            self._images[task.source] = asyncio.create_task(self._image(task))
        image = await asyncio.shield(self._images[task.source])
        limits = [f"--memory={task.memory_mb}m", f"--cpus={task.cpus:g}"]
        network = [] if task.has_network else ["--network=none"]
        name = f"astraflow-{secrets.token_hex(8)}"
        command = [
            "run",
            "--detach",
            "--rm",
            "--init",
            f"--name={name}",
            *limits,
            *network,
            "--entrypoint=sleep",
            image,
            "infinity",
        ]
        starting = asyncio.create_task(self._call(command, limit_s=_STARTING_S))
        try:
            await asyncio.shield(starting)
        except BaseException:
            self._remove(name, after=starting)
            raise
        return name.encode()

    async def end(self, state: bytes) -> None:
        """Removes a container."""
        await asyncio.shield(self._remove(state.decode()))

    def _remove(self, name: str, *, after: asyncio.Task[bytes] | None = None) -> asyncio.Task[None]:
        """Removes a container in the background, once it has started or failed to start."""

        async def remove() -> None:
            if after is not None:
                await asyncio.wait({after})
            await self._call(["rm", "--force", "--time=0", name], limit_s=_STARTING_S)

        removal = asyncio.create_task(remove())
        self._removals.add(removal)
        removal.add_done_callback(self._forget)
        return removal

    def _forget(self, removal: asyncio.Task[None]) -> None:
        self._removals.discard(removal)
        if not removal.cancelled() and (error := removal.exception()) is not None:
            _log.warning("a container may be left: %s", error)

    async def run(
        self, task: HarborTask, state: bytes, commands: Sequence[ShellCommand], *, is_kept: bool
    ) -> ShellRun:
        """Runs commands. The container keeps the files, whatever `is_kept` is."""
        del task, is_kept
        return ShellRun([await self._run_one(state.decode(), command) for command in commands], state, "")

    async def _run_one(self, container: str, command: ShellCommand) -> CommandResult:
        for folder in command.cleared:
            place = shlex.quote(folder)
            await self._execute(
                container, f"rm -rf {place}; mkdir -p {place}", folder="/", limit_s=_STARTING_S
            )
        if command.files:
            await self._call(["cp", "-", f"{container}:/"], command.files, limit_s=_STARTING_S)
        limited = f"timeout -k 5 {command.timeout_s:.1f} bash -c {shlex.quote(command.command)}"
        began_s = time.monotonic()
        code, stdout, stderr = await self._execute(
            container, limited, folder=command.folder, env=dict(command.env), limit_s=command.timeout_s + 60
        )
        is_late = code in _LATE and time.monotonic() - began_s >= command.timeout_s
        contents: dict[str, bytes | None] = {}
        for path in command.reads:
            read, content, _ = await self._execute(
                container, f"cat {shlex.quote(path)}", folder="/", limit_s=_STARTING_S
            )
            contents[path] = None if read else content
        return CommandResult(code, is_late, stdout, stderr, contents)

    async def _image(self, task: HarborTask) -> str:
        """Builds or gets the image of a task, and returns its name."""
        if task.image:
            missing, _, _ = await self._start(["image", "exists", task.image], b"", _STARTING_S)
            if missing:
                await self._call(["pull", "--quiet", task.image], limit_s=_BUILDING_S)
            return task.image
        name = _image_name(task.source)
        build = ["build", "--quiet", f"--tag={name}", f"{task.source}/environment"]
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
            output = (stderr or stdout)[-500:].decode(errors="replace").strip()
            raise RolloutError(f"`{self._engine} {words[0]}` failed with code {code}: {output}")
        return stdout

    async def _start(self, words: list[str], given: bytes, limit_s: float) -> tuple[int, bytes, bytes]:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            self._engine, *words, stdin=pipe, stdout=pipe, stderr=pipe
        )
        try:
            async with asyncio.timeout(limit_s):
                _, stdout, stderr, _ = await asyncio.gather(
                    _write(process.stdin, given),
                    _read(process.stdout),
                    _read(process.stderr),
                    process.wait(),
                )
        except TimeoutError as err:
            raise RolloutError(f"`{self._engine} {words[0]}` took longer than {limit_s:.0f} s") from err
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return process.returncode or 0, stdout, stderr


async def _write(stream: asyncio.StreamWriter | None, content: bytes) -> None:
    assert stream is not None
    with suppress(ConnectionError):
        stream.write(content)
        await stream.drain()
    stream.close()


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    """Reads a stream to its end, and returns the beginning of it."""
    assert stream is not None
    kept = b""
    while part := await stream.read(_MAX_OUTPUT):
        kept += part[: _MAX_OUTPUT - len(kept)]
    return kept


def _image_name(folder: str) -> str:
    digest = hashlib.sha256(os.path.abspath(folder).encode()).hexdigest()
    return f"astraflow-harbor-{digest[:16]}"

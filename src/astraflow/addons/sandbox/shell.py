"""Runs shell commands in the boxes of a sandbox.

Conversations don't own boxes. Each call of `run_commands` is one program in any free box: it starts with the
files that the previous call left, and returns the files that it leaves. Thousands of conversations can thus
share a few boxes, and between two calls, a conversation is only some kilobytes of files. Processes that a
command starts end with the command.
"""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.addons.sandbox.inside import shell as inside
from astraflow.addons.sandbox.openings import openings_of_a_shell
from astraflow.addons.sandbox.pool import Sandbox
from astraflow.addons.sandbox.verdict import BoxLimits
from astraflow.errors import ConfigError, SandboxError
from astraflow.service.loopback import proxy_exemptions

__all__ = [
    "FOLDERS",
    "BoxFile",
    "CommandResult",
    "ShellCommand",
    "ShellLimits",
    "ShellRun",
    "archive",
    "checked_path",
    "files_at",
    "run_commands",
    "shell_sandbox",
]

FOLDERS = (
    "app",
    "data",
    "logs",
    "oracle",
    "solution",
    "tests",
    "testbed",
    "work",
    "workdir",
    "workspace",
)
"""Folders in the root, in addition to /tmp, in which commands can write."""
_PRELOADED = ("base64", "contextlib", "io", "json", "select", "signal", "stat", "subprocess", "tarfile")
_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
"""Environment variables of each command."""
_MAX_PROCESSES = 64
_STARTING_S = 10.0
"""More than the program around the commands needs for its own work on a busy machine."""
_MIB = 1 << 20
_MAX_STATE = 32 * _MIB
"""Largest total size of the files that are kept between two calls: the outputs of a box hold no more."""
_SMALLEST_MEMORY = 256 * _MIB
"""The program around the commands has the same memory limit, and it is an interpreter with libraries."""


@dataclass(frozen=True, slots=True)
class BoxFile:
    """A file that is put into a box."""

    content: bytes
    is_executable: bool = False


@dataclass(frozen=True, slots=True)
class ShellLimits:
    """The limits of commands.

    Example: `ShellLimits(memory_bytes=2 << 30)`.
    """

    memory_bytes: int = 2048 * _MIB
    """Address space of each process. At least 256 MiB, which the program around the commands needs."""
    disk_bytes: int = 64 * _MIB
    """Total size of all files. At most 32 MiB of files can be kept between two calls."""
    output_bytes: int = 64 * 1024
    """Size of each output and of each file that is read. The rest is dropped."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command, with its preparation and the files that are read after it.

    Example: `ShellCommand("wc -l < words.txt > count.txt", folder="/app")`.
    """

    command: str
    folder: str = "/app"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 60.0
    files: bytes = b""
    """An `archive` of files that are written into the box before the command runs."""
    cleared: Sequence[str] = ()
    """Paths of folders that are emptied before `files` are written."""
    reads: Sequence[str] = ()
    """Paths of files that are read after the command ends."""


class CommandResult(msgspec.Struct, frozen=True):
    """How a command ended."""

    code: int
    """Exit code, or minus the signal that ended it, or 124 if its time was over."""
    is_late: bool
    stdout: bytes
    stderr: bytes
    found: dict[str, bytes | None]
    """Content of each file in `reads`, by path; None for a file that doesn't exist."""


class ShellRun(msgspec.Struct, frozen=True):
    """The results of commands, and the files that they left."""

    results: list[CommandResult]
    state: bytes
    """The files that they left, as a tar archive."""
    problem: str
    """Why the files could not be kept; empty if they were."""


def shell_sandbox(config: SandboxConfig) -> Sandbox:
    """Returns a sandbox whose boxes run shell commands."""
    return Sandbox(config, preloaded=_PRELOADED, openings=openings_of_a_shell(FOLDERS))


def archive(files: Mapping[str, BoxFile], folders: Sequence[str] = ()) -> bytes:
    """Packs files, given by their absolute paths, and folders for a box. Equal files give equal bytes.

    Raises: ConfigError for a path at which commands cannot write.
    """
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for path in sorted(folders):
            entry = tarfile.TarInfo(_member(path))
            entry.type = tarfile.DIRTYPE
            entry.mode = 0o755
            tar.addfile(entry)
        for path, file in sorted(files.items()):
            entry = tarfile.TarInfo(_member(path))
            entry.size = len(file.content)
            entry.mode = 0o755 if file.is_executable else 0o644
            tar.addfile(entry, io.BytesIO(file.content))
    return sink.getvalue()


def files_at(state: bytes, path: str) -> dict[str, BoxFile]:
    """Returns the files at and below a path among the files that commands left.

    The keys are paths relative to `path`. A file at `path` itself is named `.`. Only regular
    files are returned, because commands decide what the archive holds, and links could point anywhere.

    Raises: ConfigError for a path at which commands cannot write.
    """
    place = PurePosixPath(_member(path))
    files: dict[str, BoxFile] = {}
    with tarfile.open(fileobj=io.BytesIO(state)) as tar:
        for entry in tar:
            name = PurePosixPath(entry.name)
            is_plain = entry.isfile() and not entry.issparse() and ".." not in name.parts
            file = tar.extractfile(entry) if is_plain and name.is_relative_to(place) else None
            if file is not None:
                files[str(name.relative_to(place))] = BoxFile(file.read(), bool(entry.mode & 0o100))
    return files


def checked_path(path: str) -> str:
    """Returns a path in its shortest form.

    Raises: ConfigError if it isn't an absolute path at which commands can write.
    """
    parts = PurePosixPath(path).parts
    if ".." in parts or "\0" in path:
        raise ConfigError(
            f"the path {path[:200]!r} contains '..' or a zero byte; write an absolute path without them"
        )
    if parts[:1] != ("/",) or parts[1:2] == () or parts[1] not in (*FOLDERS, "tmp"):
        places = ", ".join(f"/{name}" for name in ("tmp", *FOLDERS))
        raise ConfigError(f"commands in a box cannot write at {path[:200]!r}, only below {places}")
    return str(PurePosixPath(path))


def _member(path: str) -> str:
    """Returns the position of a path relative to the folder of a program, `/tmp`."""
    return checked_path(path).removeprefix("/tmp").lstrip("/")


async def run_commands(
    sandbox: Sandbox,
    state: bytes,
    commands: Sequence[ShellCommand],
    *,
    limits: ShellLimits,
    is_kept: bool = True,
) -> ShellRun:
    """Runs commands in sequence in one box.

    `state`: the initial files, as an `archive` or as the `state` that other commands left. `is_kept`: whether
    to return the files that the commands leave.

    Raises: SandboxError if the box failed or ran out of memory.
    """
    steps = [
        {
            "command": each.command,
            "folder": each.folder,
            "env": {**_ENV, "PWD": each.folder, **each.env, **proxy_exemptions(each.env)},
            "timeout_s": each.timeout_s,
            "cleared": list(each.cleared),
            "reads": list(each.reads),
            "size": len(each.files),
        }
        for each in commands
    ]
    max_state = min(limits.disk_bytes, _MAX_STATE) if is_kept else 0
    head: dict[str, Any] = {
        "folders": FOLDERS,
        "size": len(state),
        "steps": steps,
        "max_output": limits.output_bytes,
        "max_state": max_state,
    }
    encoded = json.dumps(head).encode()
    stdin = b"".join([len(encoded).to_bytes(8, "big"), encoded, state, *(each.files for each in commands)])
    verdict = await sandbox.run(_SOURCE, {}, stdin, _limits(commands, limits, max_state))
    if not verdict.has_passed:
        raise SandboxError(
            f"the box did not run the commands to the end: {verdict.reason}: {verdict.stderr[-500:]}"
        )
    try:
        return msgspec.json.decode(verdict.stdout, type=ShellRun)
    except msgspec.DecodeError as err:
        raise SandboxError(f"the box sent a result that cannot be decoded: {err}") from err


_SOURCE = Path(inside.__file__).read_text(encoding="utf-8")


def _limits(commands: Sequence[ShellCommand], limits: ShellLimits, max_state: int) -> BoxLimits:
    """Returns the limits of the program around the commands."""
    wall_s = sum(each.timeout_s for each in commands) + _STARTING_S
    read = sum(2 + len(each.reads) for each in commands) * limits.output_bytes
    return BoxLimits(
        cpu_s=3600.0,  # wall time limits each command
        wall_s=min(wall_s, 3600.0),
        memory_bytes=max(limits.memory_bytes, _SMALLEST_MEMORY),
        disk_bytes=limits.disk_bytes,
        # The files come as a tar archive, which adds headers, and base64 turns each 3 bytes into 4.
        output_bytes=_MIB + (max_state + max_state // 8 + read) * 4 // 3,
        num_processes=_MAX_PROCESSES,
        runs_commands=True,
    )

"""Commands of a shell in the boxes of a sandbox.

A box is not kept for them. Each command is a program, a fork in any free box, which begins with the files
that the last one left and hands on what it leaves. So thousands of conversations share a few boxes, and what
lies between two commands is some kilobytes of files. What a command started ends with it.
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
from astraflow.addons.sandbox.verdict import Limits
from astraflow.errors import ConfigError, SandboxError
from astraflow.service.loopback import proxy_exemptions

__all__ = [
    "FOLDERS",
    "BoxFile",
    "CommandResult",
    "Ran",
    "ShellCommand",
    "ShellLimits",
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
"""Folders of the root, other than /tmp, in which commands can write."""
_PRELOADED = ("base64", "contextlib", "io", "json", "select", "signal", "stat", "subprocess", "tarfile")
_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
"""Variables of each command."""
_MAX_PROCESSES = 64
_STARTING_S = 10.0
"""More than the program around the commands takes for itself, on a busy machine."""
_MIB = 1 << 20
_MAX_STATE = 32 * _MIB
"""Files that are kept between two commands: the outputs of a box hold no more."""
_SMALLEST_MEMORY = 256 * _MIB
"""The program around the commands has the same limit, and is an interpreter with libraries."""


@dataclass(frozen=True, slots=True)
class BoxFile:
    """A file that is put into a box."""

    content: bytes
    is_executable: bool = False


@dataclass(frozen=True, slots=True)
class ShellLimits:
    """What commands may use.

    Example: `ShellLimits(memory_bytes=2 << 30)`.
    """

    memory_bytes: int = 2048 * _MIB
    """Addresses of each process."""
    disk_bytes: int = 64 * _MIB
    """All files together; at most 32 MiB of them are kept between two commands."""
    output_bytes: int = 64 * 1024
    """Of each output, and of each file that is read; the rest is dropped."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A command, and what happens before and after it.

    Example: `ShellCommand("wc -l < words.txt > count.txt", folder="/app")`.
    """

    command: str
    folder: str = "/app"
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 60.0
    files: bytes = b""
    """An `archive` of files that are put into the box before it."""
    cleared: Sequence[str] = ()
    """Paths of folders that are made empty before that."""
    reads: Sequence[str] = ()
    """Paths of files that are read afterwards."""


class CommandResult(msgspec.Struct, frozen=True):
    """How a command ended."""

    code: int
    """Exit code; minus the signal that ended it; 124 if its time was over."""
    is_late: bool
    stdout: bytes
    stderr: bytes
    found: dict[str, bytes | None]
    """The files that were to be read; None if there was none."""


class Ran(msgspec.Struct, frozen=True):
    """What became of commands."""

    ended: list[CommandResult]
    state: bytes
    """The files that they left."""
    problem: str
    """Why the files could not be kept; empty if they could."""


def shell_sandbox(config: SandboxConfig) -> Sandbox:
    """A sandbox whose boxes run commands of a shell."""
    return Sandbox(config, preloaded=_PRELOADED, openings=openings_of_a_shell(FOLDERS))


def archive(files: Mapping[str, BoxFile], folders: Sequence[str] = ()) -> bytes:
    """Files by their absolute paths, and folders, as a box takes them. The same files give the same bytes.

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
    """The files at a path and below it, among those that commands left, by their paths relative to it; the
    file at the path itself is named `.`. Anything but a regular file is left out: a command may have made it.

    Raises: ConfigError for a path at which commands cannot write.
    """
    place = PurePosixPath(_member(path))
    found: dict[str, BoxFile] = {}
    with tarfile.open(fileobj=io.BytesIO(state)) as tar:
        for entry in tar:
            name = PurePosixPath(entry.name)
            is_plain = entry.isfile() and not entry.issparse() and ".." not in name.parts
            file = tar.extractfile(entry) if is_plain and name.is_relative_to(place) else None
            if file is not None:
                found[str(name.relative_to(place))] = BoxFile(file.read(), bool(entry.mode & 0o100))
    return found


def checked_path(path: str) -> str:
    """An absolute path at which commands can write, in its shortest form. Raises: ConfigError."""
    parts = PurePosixPath(path).parts
    if ".." in parts or "\0" in path:
        raise ConfigError(f"the path {path[:200]!r} leads out of its folder")
    if parts[:1] != ("/",) or parts[1:2] == () or parts[1] not in (*FOLDERS, "tmp"):
        places = ", ".join(f"/{name}" for name in ("tmp", *FOLDERS))
        raise ConfigError(f"commands in a box cannot write at {path[:200]!r}, only below {places}")
    return str(PurePosixPath(path))


def _member(path: str) -> str:
    """The place of a path below the folder of a program."""
    return checked_path(path).removeprefix("/tmp").lstrip("/")


async def run_commands(
    sandbox: Sandbox,
    state: bytes,
    commands: Sequence[ShellCommand],
    *,
    limits: ShellLimits,
    is_kept: bool = True,
) -> Ran:
    """Runs commands in sequence in one box.

    `state`: the files with which they begin, an `archive` or what other commands left. `is_kept`: whether the
    files that they leave are asked for.

    Raises: SandboxError if the box broke, or its memory did not suffice.
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
        raise SandboxError(f"commands were not run to their end: {verdict.reason}: {verdict.stderr[-500:]}")
    try:
        return msgspec.json.decode(verdict.stdout, type=Ran)
    except msgspec.DecodeError as err:
        raise SandboxError(f"a box does not answer as it should: {err}") from err


_SOURCE = Path(inside.__file__).read_text(encoding="utf-8")


def _limits(commands: Sequence[ShellCommand], limits: ShellLimits, max_state: int) -> Limits:
    """The limits of the program around the commands."""
    wall_s = sum(each.timeout_s for each in commands) + _STARTING_S
    read = sum(2 + len(each.reads) for each in commands) * limits.output_bytes
    return Limits(
        cpu_s=3600.0,  # each command is ended by the clock
        wall_s=min(wall_s, 3600.0),
        memory_bytes=max(limits.memory_bytes, _SMALLEST_MEMORY),
        disk_bytes=limits.disk_bytes,
        output_bytes=_MIB + (max_state + max_state // 8 + read) * 4 // 3,
        num_processes=_MAX_PROCESSES,
        runs_commands=True,
    )

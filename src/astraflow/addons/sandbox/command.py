"""An agent program for a box, its limits, and how it ended."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MAX_RESULT_BYTES", "BoxCommand", "CommandEnd", "CommandLimits"]

MAX_RESULT_BYTES = 1 << 20
"""Upper bound on the part of a program's result file that a box sends."""


@dataclass(frozen=True, slots=True)
class CommandLimits:
    """The limits of one agent program.

    Example: `CommandLimits(wall_s=240, disk_bytes=64 << 20)`.
    """

    wall_s: float
    """Seconds from start to end."""
    memory_bytes: int = 4 << 30
    """Address space of each of its processes. Their resident memory is smaller."""
    disk_bytes: int = 256 << 20
    """Total size of what it writes to /tmp."""
    output_bytes: int = 16 << 20
    """Size of each of its two outputs."""
    num_processes: int = 128
    """Number of processes and threads at a time."""


@dataclass(frozen=True, slots=True)
class BoxCommand:
    """An agent program.

    Example: `BoxCommand("/usr/bin/python3", ("python3", "agent.py"), {"HOME": "/tmp"}, folder="/home/me",
    kept=(), stdin=b"{}", files={"task.json": b"{}"}, result="/tmp/result.json", limits=CommandLimits(60))`.
    """

    program: str
    """Path of its file, which the box shows."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    folder: str
    """Its current folder: a folder that the box shows, or /tmp."""
    kept: tuple[str, ...]
    """Paths below /tmp that the box shows and that stay visible in the program's own /tmp."""
    stdin: bytes
    files: Mapping[str, bytes]
    """The files in its /tmp, by name."""
    result: str
    """Path of the result file that it may write."""
    limits: CommandLimits


@dataclass(frozen=True, slots=True)
class CommandEnd:
    """How an agent program ended."""

    code: int
    """Exit code, or minus the signal that ended it."""
    stdout: str
    """What it printed, as UTF-8 with replacements, up to the limit."""
    stderr: str
    result: bytes | None
    """Content of the result file that it left; None if it left none."""
    is_late: bool
    """Whether it was ended because its time was over."""
    is_full: bool
    """Whether it was ended because it printed more than its limits allow."""
    unstartable: str = ""
    """Why it could not be started; empty if it was."""

"""The limits of a program in a box, and the verdict on it."""

import math
import signal
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath

from astraflow.addons.sandbox.inside.program import EXIT_MEMORY, EXIT_OUTPUT
from astraflow.errors import ConfigError, LateScoreError, RolloutError

__all__ = ["MAX_STDIN_BYTES", "BoxLimits", "Kind", "Program", "ProgramReport", "ProgramVerdict", "verdict_of"]

MAX_STDIN_BYTES = 64 << 20
"""Largest standard input of one program, in bytes."""
_MAX_SOURCE_BYTES = 1 << 20
"""A completion of 100,000 tokens has about half a megabyte."""
_MAX_FILES = 64
_MAX_NAME = 256
_LARGEST = {
    "cpu_s": 3600.0,
    "wall_s": 3600.0,
    "memory_bytes": 64 << 30,
    "disk_bytes": 4 << 30,
    "output_bytes": 64 << 20,
    "num_processes": 256,
}
_BUSY = 1.5
"""From this slowdown on, other processes used a part of the CPU."""
_COMPUTING_FRAC = 0.5
"""A program that is late on a busy machine was computing if it used this share of the available CPU time."""
_OUT_OF_MEMORY = -signal.SIGKILL
"""Nothing in the box can send this signal to a program, so the kernel sent it because memory ran out."""
_SMALLEST_MEMORY = 64 << 20
"""A bare interpreter uses about 40 MB of address space."""


class Kind(StrEnum):
    """How a program ended."""

    PASSED = "passed"
    """It ended by itself with exit code 0. Callers judge whether its output is right."""
    FAILED = "failed"
    """It raised an exception, or exited with another code."""
    TIMEOUT = "timeout"
    """It was ended because its wall or CPU time was used up."""
    MEMORY = "memory"
    """It ran out of memory."""
    OUTPUT = "output"
    """It printed or wrote more than its limits allow."""
    CRASH = "crash"
    """A signal ended it, such as SIGSEGV."""
    REFUSED = "refused"
    """It was not run, or it was ended because it asked the kernel for something that no solution needs: the
    network, other processes, other programs, mounts, keys, or tracing."""


@dataclass(frozen=True, slots=True)
class BoxLimits:
    """The limits of one program.

    Example: `BoxLimits(cpu_s=2, memory_bytes=256 << 20)`.
    """

    cpu_s: float = 4.0
    """CPU seconds per process. The kernel counts whole seconds, so a process may end up to a second later."""
    wall_s: float = 10.0
    """Seconds from start to end."""
    memory_bytes: int = 512 << 20
    """Memory that it may use. What it only reserves doesn't count, such as the stacks of its threads. If it
    may start processes, or if this machine doesn't show the sizes of processes, this limits the address space
    of each process instead."""
    disk_bytes: int = 16 << 20
    """Total size of all its files."""
    output_bytes: int = 1 << 20
    """Size of each of its two outputs."""
    num_processes: int = 1
    """Number of processes at a time. Each process has its own limits of CPU time and memory."""
    runs_commands: bool = False
    """Whether it runs shell commands. If true, it may start programs, including its own files, and forbidden
    system calls fail instead of ending it."""

    def __post_init__(self) -> None:
        for name, largest in _LARGEST.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and 0 < value <= largest):
                raise ConfigError(f"limits.{name} = {value}; expected more than 0, at most {largest}")
        if self.memory_bytes < _SMALLEST_MEMORY:
            raise ConfigError(
                f"limits.memory_bytes = {self.memory_bytes}; an interpreter needs {_SMALLEST_MEMORY} bytes"
            )


@dataclass(frozen=True, slots=True)
class Program:
    """A checked program, ready for a box."""

    source: bytes
    files: dict[str, bytes]
    stdin: bytes
    limits: BoxLimits
    refusal: str = ""
    """Why it is not run; empty if it is. Only its source can cause this, since only that comes from a
    model."""

    @classmethod
    def of(
        cls, source: str, files: dict[str, str | bytes], stdin: str | bytes, limits: BoxLimits
    ) -> "Program":
        """Checks a program.

        Source that is too long becomes a `refusal`, because the source comes from a model.

        Raises: ConfigError if files or input are invalid, because they come from the caller.
        """
        data = source.encode(errors="surrogatepass")
        refusal = ""
        if len(data) > _MAX_SOURCE_BYTES:
            refusal = f"the program has {len(data)} bytes; at most {_MAX_SOURCE_BYTES} are run"
        given = {name: _bytes(content) for name, content in files.items()}
        _check_files(given, limits)
        read = _bytes(stdin)
        if len(read) > MAX_STDIN_BYTES:
            raise ConfigError(f"stdin has {len(read)} bytes; a program gets at most {MAX_STDIN_BYTES}")
        return cls(data, given, read, limits, refusal)


@dataclass(frozen=True, slots=True)
class ProgramVerdict:
    """The result of a program.

    Example: `ProgramVerdict(Kind.PASSED, stdout="5\\n", stderr="", cpu_s=0.01, peak_bytes=14_000_000)`.
    """

    kind: Kind
    stdout: str
    """Its output, as UTF-8 with replacements, up to the limit."""
    stderr: str
    cpu_s: float
    peak_bytes: int
    """Largest resident memory of its first process; a bare interpreter uses about 14 MB."""
    reason: str = ""
    """How it ended, as text for people, such as `exit code 1`, `SIGSEGV`, or `10 s are over`."""
    fault: str = ""
    """What the machine lacked. The verdict then says nothing about the program, and a retry may help. Empty
    if the machine provided what the limits allow."""

    @property
    def has_passed(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.kind is Kind.PASSED

    def raise_fault(self, what: str) -> None:
        """Raises an error if the machine is to blame for the result of the program, which `what` describes.

        Raises: LateScoreError if the machine was too busy; RolloutError if it had no memory.
        """
        if self.fault and self.kind is Kind.TIMEOUT:
            raise LateScoreError(f"{what} was not run to its end: {self.fault}")
        if self.fault:
            raise RolloutError(f"{what} was not run to its end: {self.fault}")

    @property
    def is_hostile(self) -> bool:
        """Whether its box must not be reused, because the program did something that no solution does."""
        return self.kind in {Kind.REFUSED, Kind.CRASH}


@dataclass(frozen=True, slots=True)
class ProgramReport:
    """How a program ended, as reported by the zygote of its box."""

    code: int
    """Exit code, or minus the signal that ended it."""
    is_late: bool
    is_full: bool
    """Whether an output was larger than allowed."""
    cpu_s: float
    wall_s: float
    peak_bytes: int
    problem: str = ""
    """Why it could not be started; empty if it was."""
    is_over_memory: bool = False
    """Whether it was ended because it used more memory than allowed."""
    slowdown: float = 1.0
    """For a late program, the ratio of wall time to CPU time of a short computation right after its end."""


def _bytes(content: str | bytes) -> bytes:
    return content.encode(errors="surrogatepass") if isinstance(content, str) else content


def _check_files(files: dict[str, bytes], limits: BoxLimits) -> None:
    if len(files) > _MAX_FILES:
        raise ConfigError(f"{len(files)} files for one program; at most {_MAX_FILES} are allowed")
    for name in files:
        path = PurePosixPath(name)
        is_inside = name and not path.is_absolute() and ".." not in path.parts and "\0" not in name
        if not is_inside or len(name) > _MAX_NAME or str(path) in {".", "main.py"}:
            raise ConfigError(
                f"a program's file has the name {name[:_MAX_NAME]!r}; expected a relative path without `..` "
                "that is not the program's own, main.py"
            )
    total = sum(len(content) for content in files.values())
    if total > limits.disk_bytes:
        raise ConfigError(
            f"the files of a program have {total} bytes; limits.disk_bytes = {limits.disk_bytes}"
        )


def verdict_of(report: ProgramReport, limits: BoxLimits, stdout: bytes, stderr: bytes) -> ProgramVerdict:
    """Returns the verdict on a program that has ended."""
    kind, reason = _judged(report, limits)
    return ProgramVerdict(
        kind,
        stdout.decode(errors="replace"),
        stderr.decode(errors="replace"),
        cpu_s=report.cpu_s,
        peak_bytes=report.peak_bytes,
        reason=reason,
        fault=_fault(report, limits, kind, reason),
    )


def _fault(report: ProgramReport, limits: BoxLimits, kind: Kind, reason: str) -> str:
    """Returns what the machine lacked; empty if it lacked nothing.

    A program that waited instead of computing is itself to blame for being late.
    """
    if report.is_late and not report.is_full and report.slowdown >= _BUSY:
        if _COMPUTING_FRAC * report.wall_s <= report.cpu_s * report.slowdown and report.cpu_s <= limits.cpu_s:
            return f"the machine was busy: {report.cpu_s:.2f} s of CPU time in {limits.wall_s:g} s"
        return ""
    is_to_blame = report.code != _OUT_OF_MEMORY or _is_over_memory(report, limits)
    return reason if kind is Kind.MEMORY and not is_to_blame else ""


def _is_over_memory(report: ProgramReport, limits: BoxLimits) -> bool:
    return report.is_over_memory or report.peak_bytes > limits.memory_bytes


def _judged(report: ProgramReport, limits: BoxLimits) -> tuple[Kind, str]:
    if report.is_full:
        return Kind.OUTPUT, f"an output has more than {limits.output_bytes} bytes"
    if _is_over_memory(report, limits):
        return Kind.MEMORY, f"it used more than {limits.memory_bytes} bytes of memory"
    if report.is_late:
        return Kind.TIMEOUT, f"{limits.wall_s:g} s are over"
    if report.cpu_s > limits.cpu_s:
        return Kind.TIMEOUT, f"it used {report.cpu_s:.2f} s of CPU time, {limits.cpu_s:g} s are allowed"
    if report.code in _KINDS_BY_CODE:
        return _KINDS_BY_CODE[report.code]
    if report.code < 0:
        return Kind.CRASH, signal.Signals(-report.code).name
    return (Kind.FAILED, f"exit code {report.code}") if report.code else (Kind.PASSED, "exit code 0")


_KINDS_BY_CODE = {
    EXIT_MEMORY: (Kind.MEMORY, "MemoryError"),
    EXIT_OUTPUT: (Kind.OUTPUT, "its folder is full"),
    -signal.SIGSYS: (Kind.REFUSED, "it asked the kernel for what boxes refuse"),
    _OUT_OF_MEMORY: (Kind.MEMORY, "the machine had no more memory"),
}

"""What the operating system knows about a process on this machine and about the processes that it started.

A stopped process (SIGSTOP, a debugger, job control) neither works nor ends, and keeps what it holds. Services
start further processes: agent programs, scorers, environments, the server of an engine.

A process without signs of life doesn't necessarily hang. On a busy machine, it may be ready to run all the
time and get no processor.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

__all__ = [
    "LOOK_S",
    "MAX_STOPPED_LOOKS",
    "STOPPED",
    "CpuUse",
    "ProcessState",
    "Starvation",
    "cpu_use",
    "memory_of",
    "state_of",
    "stopped_children",
]

ProcessState = Literal["running", "stopped", "gone"]

STOPPED = "stopped (SIGSTOP, or a debugger)"
"""The state's name in messages."""
LOOK_S = 1.0
"""Time between two looks at a process on which others depend."""
MAX_STOPPED_LOOKS = 5
"""Looks in a row after which a stopped process counts as lost. Whoever looks may have been stopped, too."""
_MAX_SHOWN = 80
"""Largest number of characters of a command line in a message."""
_STARVED_FRAC = 0.2
"""Share of one core below which a process starves. A process that hangs in a busy loop gets more, unless six
others want the same core."""


def state_of(pid: int) -> ProcessState:
    """Whether a process runs, is stopped, or is gone. A process that we may not inspect counts as running."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.AccessDenied:
        return "running"
    if status in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}:
        return "stopped"
    return "gone" if status in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD} else "running"


def memory_of(pid: int) -> int:
    """The bytes of memory that a process uses; 0 if it is gone, or if we may not inspect it."""
    try:
        return psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return 0


def stopped_children(pid: int) -> dict[int, str]:
    """The stopped descendants of a process: id -> command. Empty if the process is gone."""
    try:
        children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return {}
    return {child: _command(child) for child in children if state_of(child) == "stopped"}


def _command(pid: int) -> str:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        command = ""
    return command if len(command) <= _MAX_SHOWN else f"{command[:_MAX_SHOWN]}..."


@dataclass(frozen=True, slots=True)
class CpuUse:
    """The processor time of a process up to one moment."""

    used_s: float
    """CPU seconds of all its threads since they started."""
    is_ready: bool
    """Whether at least one thread runs, or would run if it got a processor."""


def cpu_use(pid: int) -> CpuUse | None:
    """Measures the processor time of a process. None if the process is gone, and on systems other than Linux,
    which don't list threads."""
    ticks = 0
    states: set[str] = set()
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # the thread has ended
        states.add(fields[0])
        ticks += int(fields[11]) + int(fields[12])  # in user mode, in the kernel: proc(5)
    return CpuUse(ticks / os.sysconf("SC_CLK_TCK"), "R" in states) if states else None


class Starvation:
    """Tells a silent process that hangs from one that is ready to run but gets hardly any processor time.

    Passive: the caller passes measurements. One object covers one silence.
    Example: `starvation.look(now_s, cpu_use(pid))` every few seconds; `starvation.text` is empty if the
    process hangs.
    """

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        """Time and CPU seconds at the first measurement."""
        self._num_looks = 0
        self._num_ready = 0
        self.text = ""
        """How little time the process gets; empty if it isn't starved, or if that is unknown."""

    def look(self, now_s: float, use: CpuUse | None) -> None:
        """Takes one more measurement, at the time `now_s` of any one clock."""
        if use is None:
            return
        if self._first is None:
            self._first = (now_s, use.used_s)
        self._num_looks += 1
        self._num_ready += use.is_ready
        first_s, used_s = self._first
        passed_s = now_s - first_s
        share = (use.used_s - used_s) / passed_s if passed_s > 0 else 1.0
        # A process that waits for a lock or a disk uses no time either, but it isn't ready to run.
        is_starved = share < _STARVED_FRAC and 2 * self._num_ready > self._num_looks
        self.text = f"it is ready to run, and got {share:.0%} of a core" if is_starved else ""

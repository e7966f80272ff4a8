"""What the system knows about a process of this machine: whether it is stopped, and which of its own are.

A stopped process (SIGSTOP, a debugger, job control) neither works nor ends, and holds whatever it held. A
service starts processes of its own: programs of agents, scorers, environments, the server of an engine.

A process that shows no sign of life need not hang: on a busy machine it may be ready to run all the time and
get no processor.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

__all__ = ["STOPPED", "CpuUse", "ProcessState", "Starvation", "cpu_use", "state_of", "stopped_children"]

ProcessState = Literal["running", "stopped", "gone"]

STOPPED = "stopped (SIGSTOP, or a debugger)"
"""How messages call the state."""
_MAX_SHOWN = 80
"""Characters of a command line that a message repeats."""
_STARVED_FRAC = 0.2
"""Share of one core. A process that hangs in a loop gets more, unless six others want the same core."""


def state_of(pid: int) -> ProcessState:
    """Whether a process runs, is stopped, or is gone; one that may not be looked at counts as running."""
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.AccessDenied:
        return "running"
    if status in {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}:
        return "stopped"
    return "gone" if status in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD} else "running"


def stopped_children(pid: int) -> dict[int, str]:
    """The stopped ones among the processes that a process started, directly or not: id -> command.

    Empty where the system does not list children (other systems than Linux).
    """
    return {child: _command(child) for child in _descendants(pid) if state_of(child) == "stopped"}


def _descendants(pid: int) -> Iterator[int]:
    pids = [pid]
    while pids:
        for child in _children(pids.pop()):
            yield child
            pids.append(child)


def _children(pid: int) -> list[int]:
    """The kernel lists children by the thread that started them. A thread may end while this looks."""
    children: list[int] = []
    for thread in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(text) for text in thread.read_text(encoding="ascii").split()]
        except OSError:
            continue
    return children


def _command(pid: int) -> str:
    try:
        command = " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        command = ""
    return command if len(command) <= _MAX_SHOWN else f"{command[:_MAX_SHOWN]}..."


# --- processor time ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CpuUse:
    """What a process does with processors at one moment."""

    used_s: float
    """CPU seconds of all its threads so far."""
    is_ready: bool
    """Whether one of its threads runs, or would if it got a processor."""


def cpu_use(pid: int) -> CpuUse | None:
    """What a process does with processors now. None if it is gone, or where the system does not list threads
    (other systems than Linux)."""
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
    """Whether a silent process is ready to run and gets hardly any processor time. Passive.

    Example: `starvation.look(now_s, cpu_use(pid))` now and then; `starvation.text` is empty if it hangs.
    """

    def __init__(self) -> None:
        self._first: tuple[float, float] | None = None
        """Time and CPU seconds at the first look."""
        self._num_looks = 0
        self._num_ready = 0
        self.text = ""
        """In words; empty if the process does not wait for a processor, or nothing is known."""

    def look(self, now_s: float, use: CpuUse | None) -> None:
        """Notes what it does now."""
        if use is None:
            return
        if self._first is None:
            self._first = (now_s, use.used_s)
        self._num_looks += 1
        self._num_ready += use.is_ready
        first_s, used_s = self._first
        passed_s = now_s - first_s
        share = (use.used_s - used_s) / passed_s if passed_s > 0 else 1.0
        is_starved = share < _STARVED_FRAC and 2 * self._num_ready > self._num_looks
        self.text = f"it is ready to run, and got {share:.0%} of a core" if is_starved else ""

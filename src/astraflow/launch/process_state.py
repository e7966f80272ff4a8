"""What the system knows about a process of this machine: whether it is stopped, and which of its own are.

A stopped process (SIGSTOP, a debugger, job control) neither works nor ends, and holds whatever it held. A
service starts processes of its own: programs of agents, scorers, environments, the server of an engine.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import psutil

__all__ = ["STOPPED", "ProcessState", "state_of", "stopped_children"]

ProcessState = Literal["running", "stopped", "gone"]

STOPPED = "stopped (SIGSTOP, or a debugger)"
"""How messages call the state."""
_MAX_SHOWN = 80
"""Characters of a command line that a message repeats."""


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

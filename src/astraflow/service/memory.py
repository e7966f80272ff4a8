"""The memory of this machine: its limit, how much is left, and whether the kernel killed a process to free
some.

A control group may have less memory than the machine, and so may each group above it. This reads the files
of both versions of control groups. Outside Linux, only psutil's figures are known.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["MemoryReading", "MemoryRecord", "available_bytes", "control_groups", "limit_bytes", "read_memory"]

_ROOT = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_EVENTS = ("memory.events", "memory.oom_control")
"""Files of a group that count the kernel's kills, in version 2 and 1."""
_VMSTAT = Path("/proc/vmstat")
_NEWS_S = 5.0
"""A kill counts as the cause of an end if the kernel counted it at most this long before."""
_LITTLE_LEFT = 0.1
"""Share of the memory below which a machine is likely to have run out of it."""


def limit_bytes() -> int:
    """The memory of this machine, or less if a control group limits it."""
    limits = [_number(folder, "memory.max", "memory.limit_in_bytes") for folder in control_groups("memory")]
    return min([psutil.virtual_memory().total, *[limit for limit in limits if limit is not None]])


def available_bytes() -> int:
    """Memory that this process can still allocate: what the machine has left, or less if a control group
    limits it."""
    available = psutil.virtual_memory().available
    for folder in control_groups("memory"):
        limit = _number(folder, "memory.max", "memory.limit_in_bytes")
        used = _number(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            # Before the kernel refuses memory, it reclaims pages of files that have not been used recently.
            files = _field(folder / "memory.stat", "total_inactive_file", "inactive_file") or 0
            available = min(available, max(limit - used + files, 0))
    return available


def control_groups(controller: str, root: Path = _ROOT, own: Path = _OWN_GROUPS) -> Iterator[Path]:
    """Yields the folders of this process's control groups, e.g. for `memory`: the innermost group first.

    In a container, the path may be the host's. Then only the group that is mounted at the root is there.
    """
    for line in _text(own).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            base = root
        elif controller in controllers.split(","):
            base = root / controller
        else:
            continue
        folder = base / path.strip("/")
        while folder != base:
            if folder.is_dir():
                yield folder
            folder = folder.parent
        yield base


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The state of this machine's memory at one moment."""

    limit: int
    available: int
    own_kills: int | None
    """Processes of this control group that the kernel has killed for lack of memory; None if unknown."""
    all_kills: int | None
    """The same of the whole machine, including other containers; None if unknown."""


def read_memory() -> MemoryReading:
    """Reads the present state."""
    groups = list(control_groups("memory"))
    counts = [_field(folder / name, "oom_kill") for folder in groups for name in _EVENTS]
    own = [count for count in counts if count is not None]
    return MemoryReading(
        limit=limit_bytes(),
        available=available_bytes(),
        own_kills=own[0] if own else None,
        all_kills=_field(_VMSTAT, "oom_kill"),
    )


class MemoryRecord:
    """Remembers the last seconds, to tell why a process was killed. Passive, apart from reading files.

    Example: `record.look(now_s)` twice per second; when a process has been killed by SIGKILL that nobody
    here sent, `record.cause(now_s, used_bytes)`.
    """

    def __init__(self, read: Callable[[], MemoryReading] = read_memory) -> None:
        self._read = read
        self._readings: deque[tuple[float, MemoryReading]] = deque()

    def look(self, now_s: float) -> None:
        """Takes a reading, and forgets those that are too old to matter."""
        self._readings.append((now_s, self._read()))
        # The last one that is too old stays: it has the counts from before the time that matters.
        while len(self._readings) > 2 and self._readings[1][0] < now_s - _NEWS_S:
            self._readings.popleft()

    def cause(self, now_s: float, used_bytes: int, advice: str) -> str:
        """Why a process that used `used_bytes` was killed, as far as that can be known.

        `advice` is added if memory was the cause, or probably was.
        """
        lowest = min((reading.available for _, reading in self._readings), default=None)
        self.look(now_s)
        before = self._readings[0][1]
        after = self._readings[-1][1]
        left = after.available if lowest is None else min(lowest, after.available)
        used = f"; it used {used_bytes / 1e9:.1f} GB" if used_bytes else ""
        remedy = f"; {advice}" if advice else ""
        if _has_grown(before.own_kills, after.own_kills):
            return f"killed by the kernel for lack of memory{used}{remedy}"
        if _has_grown(before.all_kills, after.all_kills):
            return f"probably killed by the kernel for lack of memory{used}{remedy}"
        if left < _LITTLE_LEFT * after.limit:
            free = f"{left / 1e9:.1f} of {after.limit / 1e9:.1f} GB were left"
            return f"probably killed for lack of memory, because only {free}{used}{remedy}"
        return f"killed by signal 9 (SIGKILL), which AstraFlow didn't send{used}"


def _has_grown(before: int | None, after: int | None) -> bool:
    return before is not None and after is not None and after > before


def _number(folder: Path, *names: str) -> int | None:
    """The number in the first of these files that exists; None if there is none, or no limit."""
    for name in names:
        if (text := _text(folder / name).strip()).isdecimal():
            return int(text)
    return None


def _field(path: Path, *names: str) -> int | None:
    """The first of these fields in a file with a name and a number per line; None if it has none of them."""
    fields = dict(line.split(maxsplit=1) for line in _text(path).splitlines() if " " in line)
    return next((int(fields[name]) for name in names if name in fields), None)


def _text(path: Path) -> str:
    """The text of a kernel file; empty if it does not exist (another system, or another cgroup version)."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""

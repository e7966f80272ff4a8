"""Prints the results of a benchmark: tables for people, and one JSON object as the last line.

It also measures how much of the machine *other* programs used at the same time. A benchmark competes with
them for cores, so its figures are meaningless if they used many. Every table therefore states that load, and
`others_load` in the JSON is the largest of these values. Above `MOST_LOAD`, there is no verdict. The
measurement begins when a benchmark imports this module.
"""

import contextlib
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = [
    "MOST_LOAD",
    "Laps",
    "Memory",
    "OthersLoad",
    "OwnMemory",
    "Runs",
    "interleaved",
    "report",
    "show_table",
    "tree_cpu_s",
]

MOST_LOAD = 0.5
"""Number of cores that other programs may use if a benchmark is to give a verdict: a quarter of a machine
with two cores. At a load of 10, a race on such a machine showed more than twice its true ratio."""


@dataclass(frozen=True, slots=True)
class Runs:
    """The values of one figure in several runs. Example: `str(Runs((1.9, 1.8, 2.1)))`."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The value that represents all runs."""
        return statistics.median(self.values)

    def __str__(self) -> str:
        if len(self.values) == 1:
            return _number(self.median)
        low, high = _number(min(self.values)), _number(max(self.values))
        return f"{_number(self.median)} ({low}..{high}, {len(self.values)} runs)"


def interleaved(runs: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, Runs]:
    """Measures the seconds of each run. The runs alternate, so that other load on the machine affects all
    equally."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: Runs(tuple(values)) for name, values in seconds.items()}


# --- the load of others ---------------------------------------------------------------------------


class OthersLoad:
    """The number of cores that processes outside a process tree use.

    `root` is the process at the root of the tree (0: this process).

    The load is the machine's CPU time (`/proc/stat`) minus that of the process and its descendants.
    Interrupts are left out on both sides, because their time doesn't belong to any process. A descendant
    whose parent was killed counts as an outside process.

    Example: `load = OthersLoad(); work(); print(load.lap())`.
    """

    def __init__(self, root: int = 0) -> None:
        self._root = root
        self._at = (time.monotonic(), _others_cpu_s(root))

    def lap(self) -> float:
        """Returns the number of cores used since the last lap, or since the start."""
        began_s, others_s = self._at
        self._at = (time.monotonic(), _others_cpu_s(self._root))
        return max(0.0, self._at[1] - others_s) / max(self._at[0] - began_s, 1e-9)


def tree_cpu_s(root: int = 0) -> float:
    """Returns the CPU seconds of a process (0: this one), its live descendants, and all processes that they
    waited for."""
    process = psutil.Process(root or None)
    seconds = 0.0
    for each in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            seconds += sum(each.cpu_times()[:4])
    return seconds


def _others_cpu_s(root: int) -> float:
    """Returns the CPU seconds of the machine since its start, without those of a process tree."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.steal - tree_cpu_s(root)


class Laps:
    """The load of other programs lap by lap, and the largest so far.

    A lap shorter than `shortest_s` is merged with the next one. CPU times are counted in ticks of 10 ms, so a
    few milliseconds between two tables would look like several cores.
    """

    def __init__(self, load: OthersLoad, *, shortest_s: float = 1.0) -> None:
        self._load = load
        self._shortest_s = shortest_s
        self._began_s = time.monotonic()
        self._cores = 0.0
        self.largest = 0.0

    def lap(self) -> float:
        """Returns the cores used since the last lap, or the value of the last lap if this one is too
        short."""
        now_s = time.monotonic()
        if now_s - self._began_s >= self._shortest_s:
            self._began_s = now_s
            self._cores = self._load.lap()
            self.largest = max(self.largest, self._cores)
        return self._cores


_SINCE_IMPORT = Laps(OthersLoad())


# --- memory ---------------------------------------------------------------------------------------


class Memory:
    """Follows the memory of a process tree, in a thread, until `close`.

    Each shared page counts once. Without `counts_root`, only the descendants of the root count.
    """

    def __init__(self, root: int, *, counts_root: bool = True, every_s: float = 0.5) -> None:
        self.peak_mb = 0.0
        self._root = psutil.Process(root)
        self._counts_root = counts_root
        self._every_s = every_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._ended.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._ended.wait(self._every_s):
            self.peak_mb = max(self.peak_mb, self._now_mb())

    def _now_mb(self) -> float:
        total = 0
        for process in (*self._root.children(recursive=True), *[self._root] * self._counts_root):
            with contextlib.suppress(psutil.Error):  # it has just ended
                total += process.memory_full_info().pss
        return total / 2**20


class OwnMemory:
    """The most by which this process's own memory, without mapped files, grows in a block.

    Example: `with OwnMemory() as memory: load()`, then `memory.growth` in bytes.
    """

    growth = 0

    def __enter__(self) -> "OwnMemory":
        self._before = self._now()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.growth = max(self.growth, self._now() - self._before)
            if self._is_over.wait(0.001):
                return

    @staticmethod
    def _now() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


# --- output ---------------------------------------------------------------------------------------


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table as plain text, and the load of other programs since the previous table. Numbers are
    rounded."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(title)
    for i, row in enumerate(cells):
        print("  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
        if i == 0:
            print("  " + "  ".join("-" * width for width in widths))
    print(f"  others used {_SINCE_IMPORT.lap():.2f} of {os.cpu_count()} cores meanwhile")


def report(
    figures: Mapping[str, object],
    *,
    at_least: Mapping[str, float] | None = None,
    at_most: Mapping[str, float] | None = None,
    laps: Laps = _SINCE_IMPORT,
) -> None:
    """Prints the last line of a benchmark's output: one JSON object.

    A figure of several runs is represented by its median; `NAME_min`, `NAME_max`, and `NAME_runs` are added.
    `at_least` and `at_most` are targets; targets of figures that were not measured don't count. `verdict` is
    `met`, `missed`, or `measured` without a target. It is null if other programs used more than `MOST_LOAD`
    cores.
    """
    laps.lap()
    flat: dict[str, object] = {"others_load": round(laps.largest, 2), "verdict": None}
    for name, value in figures.items():
        flat |= _spread(name, value) if isinstance(value, Runs) else {name: value}
    bounds = [(name, "at least", bound) for name, bound in (at_least or {}).items() if name in flat]
    bounds += [(name, "at most", bound) for name, bound in (at_most or {}).items() if name in flat]
    missed = [bound for bound in bounds if not _is_met(flat[bound[0]], bound)]
    for name, side, bound in missed:
        value = flat[name]
        shown = f"{value:.4g}" if isinstance(value, float) else value
        print(f"missed: {name} is {shown}, its target {side} {bound:g}")
    if laps.largest > MOST_LOAD:
        print(f"no verdict: others used {laps.largest:.1f} cores; run nothing else at the same time")
    else:
        flat["verdict"] = "missed" if missed else "met" if bounds else "measured"
    print(json.dumps(flat, sort_keys=True), flush=True)


def _is_met(value: object, bound: tuple[str, str, float]) -> bool:
    """Checks whether a figure meets its target. One that could not be measured (None) never does."""
    if not isinstance(value, int | float):
        return False
    return value >= bound[2] if bound[1] == "at least" else value <= bound[2]


def _spread(name: str, runs: Runs) -> dict[str, object]:
    return {
        name: runs.median,
        f"{name}_min": min(runs.values),
        f"{name}_max": max(runs.values),
        f"{name}_runs": len(runs.values),
    }


def _cell(value: object) -> str:
    return _number(value) if isinstance(value, float) else str(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"

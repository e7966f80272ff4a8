"""Prints what a benchmark measured: a table for people, then, as the last line, one JSON object."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

__all__ = ["interleaved", "report", "show_table"]


def interleaved(runs: Mapping[str, Callable[[], object]], *, repeats: int) -> dict[str, float]:
    """Median seconds of each run; the runs alternate, so that other load on the machine meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table of plain text; numbers are rounded to what can be read."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(title)
    for i, row in enumerate(cells):
        print("  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
        if i == 0:
            print("  " + "  ".join("-" * width for width in widths))


def report(figures: Mapping[str, object]) -> None:
    """The last line of a benchmark's output: one JSON object."""
    print(json.dumps(dict(figures), sort_keys=True), flush=True)


def _cell(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"

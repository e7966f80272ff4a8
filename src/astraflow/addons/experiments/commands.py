"""Implements `astraflow sweep` and `astraflow compare`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from astraflow.addons.experiments.comparison import Comparison
from astraflow.addons.experiments.comparison import compare as compare_results
from astraflow.addons.experiments.group_request import GroupRequest, open_group
from astraflow.addons.experiments.output import draw_comparison, markdown, print_comparison
from astraflow.addons.experiments.results import read_results
from astraflow.addons.experiments.sweep import Sweep, redo
from astraflow.errors import DataError
from astraflow.report.terminal_text import printable

__all__ = ["comparison_of", "run_sweep", "show_comparison"]

_INTERRUPTED = 130
_PLAIN_WIDTH = 180


def comparison_of(places: Sequence[Path]) -> Comparison:
    """Compares the runs at or below some folders. Raises: DataError if they can't be compared."""
    return compare_results(read_results(places))


def show_comparison(places: Sequence[Path], *, as_markdown: bool, png: Path | None) -> None:
    """Prints a comparison, and draws it if asked. Raises: ConfigError, DataError, OSError."""
    comparison = comparison_of(places)
    if as_markdown:
        sys.stdout.write(markdown(comparison))
    else:
        console = Console()
        print_comparison(comparison, console if console.is_terminal else Console(width=_PLAIN_WIDTH))
    if png is not None:
        draw_comparison(comparison, png)
        sys.stderr.write(f"wrote {png}\n")


def run_sweep(request: GroupRequest, *, jobs: int, again: Sequence[str]) -> int:
    """Runs a sweep to its end and shows the comparison; returns the exit code.

    Raises: ConfigError, DataError.
    """
    folder, group = open_group(request)
    if again:
        group = redo(folder, group, again)
    sweep = Sweep(folder, group, _tell)
    _tell(f"{len(group.members)} runs in {folder}")
    if not sweep.run(jobs=jobs):
        _tell(f"stopped; `astraflow sweep {folder}` continues")
        return _INTERRUPTED
    try:
        show_comparison([folder], as_markdown=False, png=None)
    except DataError as err:
        _tell(str(err))
    for name, why in sweep.group.failed.items():
        _tell(f"{name} failed ({why}); `astraflow sweep {folder} --redo {name}` runs it again")
    _tell(f"page: astraflow view {folder}; picture: astraflow compare {folder} --png comparison.png")
    return 1 if sweep.group.failed else 0


def _tell(line: str) -> None:
    sys.stdout.write(f"{printable(line)}\n")
    sys.stdout.flush()

"""Shows a comparison: as tables in a terminal, as Markdown, and as a picture for a paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from astraflow.addons.experiments.comparison import Comparison
from astraflow.addons.experiments.intervals import Interval
from astraflow.errors import ConfigError
from astraflow.report.overview import duration_text
from astraflow.report.terminal_text import printable

__all__ = ["draw_comparison", "interval_text", "markdown", "print_comparison"]

_NUM_COLORS = 8
"""Colors of the style; color-blind readers can tell them apart."""


def interval_text(interval: Interval) -> str:
    """`0.612 [0.580, 0.644]`, or `0.612` if the interval is unknown."""
    if interval.low is None or interval.high is None:
        return f"{interval.mean:.3f}"
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _variant_rows(comparison: Comparison) -> list[list[str]]:
    return [
        [
            variant.label,
            str(len(variant.runs)),
            *(interval_text(variant.figures[name]) for name in comparison.figures),
        ]
        for variant in comparison.variants
    ]


def _member_rows(comparison: Comparison) -> list[list[str]]:
    return [
        [
            member.name,
            member.state,
            member.seed,
            str(member.steps),
            duration_text(member.wall_s),
            *(
                "\u2013" if (value := member.finals.get(name)) is None else f"{value:.3f}"
                for name in comparison.figures
            ),
        ]
        for member in comparison.members
    ]


def _tables(comparison: Comparison) -> list[tuple[list[str], list[list[str]]]]:
    """Headers and rows of all tables: variants, runs and, if there are any, the keys that differ."""
    tables = [
        (["variant", "runs", *comparison.figures], _variant_rows(comparison)),
        (["run", "state", "seed", "steps", "time", *comparison.figures], _member_rows(comparison)),
    ]
    if comparison.keys:
        header = ["key that differs", *(variant.label for variant in comparison.variants)]
        rows = [[key, *(variant.values[key] for variant in comparison.variants)] for key in comparison.keys]
        tables.append((header, rows))
    return tables


def _sentences(comparison: Comparison) -> list[str]:
    """The difference of two variants says it all; of several variants, the verdict comes first."""
    first = [comparison.verdict.text] if len(comparison.variants) > 2 else []
    return [*first, *comparison.sentences]


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Prints all tables and sentences. Text from recipes is made safe for the terminal."""
    for header, rows in _tables(comparison):
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in header:
            table.add_column(Text(printable(name)), overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        console.print(table)
        console.print()
    for sentence in _sentences(comparison):
        console.print(printable(sentence), highlight=False, markup=False)
    for note in comparison.notes:
        console.print(printable(note), style="dim", highlight=False, markup=False)


def markdown(comparison: Comparison) -> str:
    """Returns the tables and sentences as Markdown."""
    parts = [_markdown_table(header, rows) for header, rows in _tables(comparison)]
    lines = [*_sentences(comparison), *comparison.notes]
    if lines:
        parts.append("\n".join(f"- {_plain(line)}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(_plain(cell) for cell in line)} |" for line in lines)


def _plain(text: str) -> str:
    """Keeps a text in one cell and on one line."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def draw_comparison(comparison: Comparison, out: Path) -> None:
    """Draws each figure over the steps: the mean of each variant, and a band over its seeds.

    Raises: ConfigError without matplotlib; OSError.
    """
    try:
        from matplotlib import style
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as err:
        raise ConfigError('a picture needs a package: pip install "astraflow[plot]"') from err
    num = len(comparison.figures)
    with style.context("astraflow.addons.plot.astraflow"):
        figure = Figure(figsize=(5.5 * min(num, 2), 3.6 * -(-num // 2)), layout="constrained")
        FigureCanvasAgg(figure)
        grid: Any = figure.subplots(-(-num // 2), min(num, 2), squeeze=False)
        panels: list[Any] = list(grid.flat)
        for axis, name in zip(panels, comparison.figures, strict=False):
            _draw_figure(axis, comparison, name)
        for axis in panels[num:]:
            axis.set_visible(False)
        if len(comparison.variants) > 1:
            panels[0].legend()
        figure.savefig(out, dpi=200, format="png")


def _draw_figure(axis: Any, comparison: Comparison, name: str) -> None:
    for idx, variant in enumerate(comparison.variants):
        points = variant.bands[name]
        color = f"C{idx % _NUM_COLORS}"
        steps = [point.step for point in points]
        is_short = len(points) < 20
        axis.plot(
            steps,
            [point.mean for point in points],
            color=color,
            linestyle="-" if idx < _NUM_COLORS else "--",
            marker="o" if is_short else "",
            markersize=3,
            label=f"{variant.label} ({len(variant.runs)})".replace("$", r"\$"),
        )
        if known := [(p.step, p.low, p.high) for p in points if p.low is not None and p.high is not None]:
            at, low, high = zip(*known, strict=True)
            axis.fill_between(at, low, high, color=color, alpha=0.2, linewidth=0)
    axis.set(xlabel="step", title=name.replace("$", r"\$"))

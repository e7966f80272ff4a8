"""Curves as SVG, for reports that must be a single file without scripts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Line", "svg_chart"]

_WIDTH = 460
_HEIGHT = 190
_LEFT = 52
_BOTTOM = 26
_TOP = 8
_RIGHT = 8
_NUM_COLORS = 8
_MAX_POINTS = 600
"""Maximum number of points per line, which is more than a screen can show."""


@dataclass(frozen=True, slots=True)
class Line:
    """One curve."""

    label: str
    points: Sequence[tuple[float, float]]
    error: Sequence[float] = ()
    """Half the length of each point's error bar; empty for none."""


def svg_chart(title: str, lines: Sequence[Line]) -> str:
    """Draws a figure with its legend as HTML; empty if no line has a finite point."""
    lines = [finite for line in lines if (finite := _finite(line)).points]
    if not lines:
        return ""
    x_low, x_high = _limits([x for line in lines for x, _ in line.points])
    edges = [y + sign * error for line in lines for (_, y), error in _with_errors(line) for sign in (-1, 1)]
    y_low, y_high = _limits(edges)

    def x_of(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y_of(y: float) -> float:
        return _HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (_HEIGHT - _BOTTOM - _TOP)

    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">']
    for share in (0.0, 0.5, 1.0):
        value = y_low + share * (y_high - y_low)
        y = y_of(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{value:.3g}</text>')
        step = x_low + share * (x_high - x_low)
        anchor = ("start", "middle", "end")[round(2 * share)]
        parts.append(f'<text x="{x_of(step):.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{step:.4g}</text>')
    for idx, line in enumerate(lines):
        look = f"c{idx % _NUM_COLORS}"
        path = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline class="{look}" points="{path}"/>')
        for (x, y), error in _with_errors(line):
            if error:
                ends = f'y1="{y_of(y - error):.1f}" y2="{y_of(y + error):.1f}"'
                parts.append(f'<line class="{look}" x1="{x_of(x):.1f}" x2="{x_of(x):.1f}" {ends}/>')
    parts.append("</svg>")
    legend = "".join(
        f'<li class="c{idx % _NUM_COLORS}">{escape(line.label)} <b>{line.points[-1][1]:.4g}</b></li>'
        for idx, line in enumerate(lines)
    )
    return f"<figure><figcaption>{escape(title)}</figcaption>{''.join(parts)}<ul>{legend}</ul></figure>"


def _with_errors(line: Line) -> list[tuple[tuple[float, float], float]]:
    errors = line.error or (0.0,) * len(line.points)
    return list(zip(line.points, errors, strict=True))


def _finite(line: Line) -> Line:
    """Drops points that can't be drawn, and thins out the line if it has too many."""
    kept = [each for each in _with_errors(line) if all(map(math.isfinite, (*each[0], each[1])))]
    every = -(-len(kept) // _MAX_POINTS) or 1
    kept = [each for idx, each in enumerate(kept) if idx % every == 0 or idx + 1 == len(kept)]
    return Line(line.label, [point for point, _ in kept], [error for _, error in kept])


def _limits(values: Sequence[float]) -> tuple[float, float]:
    """Returns the limits of an axis: the smallest and largest value, widened if they are equal."""
    low = min(values)
    high = max(values)
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    room = abs(low) or 1.0
    return low - room / 2, high + room / 2

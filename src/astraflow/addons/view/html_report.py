"""Writes a report on runs as one HTML file: facts, curves, and episodes from before and after training.

The file has no scripts and loads nothing, so it can be archived, sent, and opened anywhere.
"""

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

import msgspec

from astraflow.addons.experiments.recipe_lines import recipe_lines
from astraflow.addons.view.svg_chart import Line, svg_chart
from astraflow.addons.view.tables_copy import messages_of
from astraflow.errors import Error, JournalError
from astraflow.recipe.run_folder import RunFolder

__all__ = ["ReportedRun", "html_report"]

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Content security policy: no scripts, and nothing loaded from elsewhere."""
_NUM_SAMPLES = 3
_MAX_TEXT = 4000


class _Chart(msgspec.Struct, frozen=True):
    """One figure: the metrics in it with their words, or the held-out score."""

    title: str
    lines: dict[str, str] | None


class _Question(msgspec.Struct, frozen=True):
    """The curves that answer a question, as the page groups them."""

    question: str
    good: str
    charts: tuple[_Chart, ...]


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run and its index."""

    name: str
    folder: RunFolder
    database: sqlite3.Connection


def html_report(runs: Sequence[ReportedRun]) -> str:
    """Makes the report, which also names the parts of a run that can't be read. Raises: sqlite3.Error."""
    rows = {run.name: _metric_rows(run.database) for run in runs}
    title = escape(", ".join(run.name for run in runs))
    style = _asset("report.css").decode()
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        f"<title>{title}</title><style>{style}</style></head><body><h1>{title}</h1>",
        _facts(runs),
        *_curves(rows),
    ]
    if len(runs) > 1:
        parts.append(_differences(runs))
    parts += [_samples(run) for run in runs]
    return "\n".join([*parts, "</body></html>\n"])


def _asset(name: str) -> bytes:
    return resources.files("astraflow.addons.view").joinpath("assets", name).read_bytes()


def _metric_rows(database: sqlite3.Connection) -> list[dict[str, Any]]:
    return [
        msgspec.json.decode(row[0]) for row in database.execute("SELECT columns FROM metrics ORDER BY id")
    ]


def _curves(rows: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """Draws the curves by question. A question without any curve is left out."""
    parts: list[str] = []
    for each in msgspec.json.decode(_asset("questions.json"), type=tuple[_Question, ...]):
        charts = "".join(svg_chart(*_chart(rows, chart)) for chart in each.charts)
        if charts:
            parts.append(f'<h2>{escape(each.question)}</h2><p class="good">{escape(each.good)}</p>')
            parts.append(f'<div class="charts">{charts}</div>')
    return parts


def _chart(rows: Mapping[str, list[dict[str, Any]]], chart: _Chart) -> tuple[str, list[Line]]:
    if chart.lines is None:
        return f"{chart.title} (bars: 2 standard errors)", _eval_lines(rows)
    return chart.title, [
        line for name, words in chart.lines.items() for line in _step_lines(rows, name, words)
    ]


def _step_lines(runs: Mapping[str, list[dict[str, Any]]], name: str, words: str) -> list[Line]:
    lines: list[Line] = []
    for run, rows in runs.items():
        steps = [row for row in rows if row["kind"] == "step" and isinstance(row.get(name), int | float)]
        for policy in dict.fromkeys(row["policy"] for row in steps):
            points = [(row["step"], row[name]) for row in steps if row["policy"] == policy]
            lines.append(Line(_label(runs, run, f"{policy}, {words}"), points))
    return lines


def _eval_lines(runs: Mapping[str, list[dict[str, Any]]]) -> list[Line]:
    lines: list[Line] = []
    for run, rows in runs.items():
        evals = [row for row in rows if row["kind"] == "eval" and row.get("score_mean") is not None]
        for policy, name in dict.fromkeys((row["policy"], row["eval_set"]) for row in evals):
            own = [row for row in evals if (row["policy"], row["eval_set"]) == (policy, name)]
            points = [(row["step"], row["score_mean"]) for row in own]
            errors = [2 * row["score_stderr"] for row in own]
            lines.append(Line(_label(runs, run, f"{policy} on {name}"), points, errors))
    return lines


def _label(runs: Mapping[str, object], run: str, name: str) -> str:
    return f"{run}: {name}" if len(runs) > 1 else name


# --- tables ---------------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Makes a table. Columns of numbers are aligned on the right."""
    looks = [
        ' class="n"' if rows and all(_is_figure(row[idx]) for row in rows) else ""
        for idx in range(len(header))
    ]
    head = "".join(f"<th{look}>{escape(str(cell))}</th>" for look, cell in zip(looks, header, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{look}>{escape(str(cell))}</td>" for look, cell in zip(looks, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _is_figure(cell: object) -> bool:
    return str(cell).replace(",", "").replace(".", "").isdecimal()


def _facts(runs: Sequence[ReportedRun]) -> str:
    """Makes a table with one row per run: its state and the counts from its index."""
    rows: list[list[object]] = []
    for run in runs:
        try:
            record = run.folder.load_record()
            told = [record.state, record.reason, f"{record.wall_s:,.0f}"]
        except (Error, OSError) as err:
            told = ["unknown", str(err), ""]
        num = run.database.execute("SELECT max(id) FROM episodes").fetchone()[0] or 0
        notes = "; ".join(row[0] for row in run.database.execute("SELECT text FROM notes"))
        rows.append([run.name, *told, f"{num:,}", notes])
    return _table(("run", "state", "why", "seconds", "episodes", "notes"), rows)


def _differences(runs: Sequence[ReportedRun]) -> str:
    recipes: list[dict[str, str]] = []
    for run in runs:
        try:
            recipes.append(recipe_lines(run.folder))
        except (Error, OSError):
            recipes.append({})
    keys = sorted({key for recipe in recipes for key in recipe})
    rows = [[key, *(recipe.get(key, "\u2013") for recipe in recipes)] for key in keys]
    differing = [row for row in rows if len(set(row[1:])) > 1]
    names = [run.name for run in runs]
    return "<h2>Where their recipes differ</h2>" + (
        _table(("key", *names), differing) if differing else "<p>nowhere</p>"
    )


# --- episodes -------------------------------------------------------------------------------------


def _samples(run: ReportedRun) -> str:
    """Shows episodes of the same tasks from the first and the last version that were evaluated."""
    query = (
        "SELECT e.newest AS version, t.name AS task, e.score, e.sample FROM episodes e "
        "JOIN tasks t ON t.id = e.task WHERE e.kind = 1 AND e.sample IS NOT NULL ORDER BY e.id"
    )
    kept: dict[int, dict[str, tuple[float, int]]] = {}
    for version, task, score, sample in run.database.execute(query):
        kept.setdefault(version, {}).setdefault(task, (score, sample))
    if not kept:
        return ""
    first = kept[min(kept)]
    last = kept[max(kept)]
    both = [task for task in first if task in last]
    # Tasks whose score changed come first because they are the most informative.
    chosen = sorted(both, key=lambda task: first[task][0] == last[task][0])[:_NUM_SAMPLES]
    parts = [f"<h2>Episodes of {escape(run.name)}</h2>"]
    for task in chosen:
        for version, (score, sample) in ((min(kept), first[task]), (max(kept), last[task])):
            parts.append(f"<h3>{escape(task)} <small>version {version}, score {score:g}</small></h3>")
            parts.append(_messages(run, sample))
    return "\n".join(parts)


def _messages(run: ReportedRun, sample: int) -> str:
    try:
        messages = messages_of(run.folder.journal, sample)
    except JournalError as err:
        return f"<p>{escape(str(err))}</p>"
    return "".join(
        f"<b>{escape(each.name or each.role)}</b><pre>{escape(each.content[:_MAX_TEXT])}</pre>"
        for each in messages
    )

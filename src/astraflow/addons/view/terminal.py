"""Shows episodes in a terminal: many in a table, or one in full. All text is made safe for the terminal."""

import math
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from astraflow.addons.view.conversation import without_ends
from astraflow.addons.view.episode import EpisodeView, Tokens
from astraflow.addons.view.search import EpisodeDict
from astraflow.report.terminal_text import printable

__all__ = ["print_episode", "print_table"]

_COLUMNS = (
    "id",
    "episode",
    "task",
    "policy",
    "versions",
    "reward",
    "advantage",
    "tokens",
    "end",
    "completion",
)
_NUMBERS = {"id", "reward", "advantage", "tokens"}
_MAX_TEXT = 60
"""Maximum number of characters of an episode's completion in the table."""
_UNLIKELY = (0.01, "bold red"), (0.1, "red"), (0.5, "yellow")
"""(probability, style of tokens below it)."""


def print_table(rows: Iterable[EpisodeDict], console: Console) -> int:
    """Prints one line per episode and returns their number."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in _COLUMNS:
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    num = 0
    for row in rows:
        num += 1
        text = " ".join(without_ends(str(row.get("completion", ""))).split())
        text = printable(text)
        text = text if len(text) <= _MAX_TEXT else f"{text[: _MAX_TEXT - 1]}\u2026"
        table.add_row(*(Text(cell) for cell in (*_cells(row), text)))
    console.print(table)
    return num


def _cells(row: EpisodeDict) -> list[str]:
    kind = "e" if row["kind"] == "eval" else ""
    versions = f"{row['oldest_version']}..{row['newest_version']}"
    if row["oldest_version"] == row["newest_version"]:
        versions = _number_text(row["newest_version"])
    end = row["error"] or f"{row['finish'] or ''} {row['fate'] or ('' if kind else 'live')}".strip()
    return [
        str(row["id"]),
        f"{kind}{row['group']}.{row['episode']}.{row['attempt']}",
        printable(row["task"] or ""),
        printable(row["policy"] or ""),
        versions,
        _number_text(row["reward"]),
        _number_text(row["advantage"]),
        _number_text(row["tokens"]),
        printable(end),
    ]


def _number_text(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.3g}"


def print_episode(view: EpisodeView, console: Console) -> None:
    """Prints one episode: its facts, its messages, and its tokens colored by probability."""
    facts = [
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {printable(str(value))}"
        for name, value in view.row.items()
        if value is not None
    ]
    console.print(Text(", ".join(facts)), soft_wrap=True)
    for problem in (*view.problems, view.failure):
        if problem:
            console.print(Text(printable(problem, keeps_lines=True), style="red"), soft_wrap=True)
    for message in view.messages:
        console.print(Text(f"\n{printable(message.name or message.role)}", style="bold"))
        console.print(Text(printable(message.content, keeps_lines=True)), soft_wrap=True)
    if view.tokens is not None:
        console.print(Text("\ntokens (sampled ones in colour: the less likely, the redder)", style="bold"))
        console.print(_coloured(view.tokens), soft_wrap=True)
    if view.metrics:
        metrics = ", ".join(f"{printable(name)} {value:.4g}" for name, value in view.metrics.items())
        console.print(Text(f"\n{metrics}", style="dim"), soft_wrap=True)


def _coloured(tokens: Tokens) -> Text:
    text = Text()
    for piece, mask, logprob in zip(tokens.pieces, tokens.mask, tokens.logprobs, strict=True):
        style = "dim"
        if mask:
            probability = math.exp(min(0.0, logprob))
            style = next((style for bound, style in _UNLIKELY if probability < bound), "green")
        text.append(printable(piece, keeps_lines=True), style=style)
    if tokens.num_left_out:
        text.append(f"\n... {tokens.num_left_out} more tokens", style="dim")
    return text

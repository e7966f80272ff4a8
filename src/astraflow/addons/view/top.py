"""Draws a run in a terminal: once for `astraflow status`, and again and again for `astraflow top`."""

import asyncio
import contextlib
import sys
import time
from pathlib import Path

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from astraflow.addons.view.answer import answer_of_summary
from astraflow.addons.view.screen import answer_text, render, services_text
from astraflow.addons.view.status import RunStatus, run_status
from astraflow.errors import UnavailableError
from astraflow.report.report import summary_table
from astraflow.report.terminal_text import printable

__all__ = ["show_status", "show_top", "state_text"]

_PLAIN_WIDTH = 180
"""Columns where there is no terminal."""


def show_status(where: str, token_file: Path | None, *, as_json: bool = False) -> int:
    """Prints the state of a run; `where` is a run folder or a URL.

    Returns the exit code: 1 if a run that should be running does not answer.
    """
    status = asyncio.run(run_status(where, token_file))
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(status), indent=2).decode() + "\n")
    else:
        console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        console.print(state_text(status), soft_wrap=True)
    return 0 if status.dataflow or status.summary else 1


def show_top(where: str, token_file: Path | None, console: Console, *, every_s: float) -> None:
    """Draws the screen of a run until the run has ended, or Ctrl-C is pressed.

    Raises: DataError if `where` is not a run folder.
    """
    is_over = False
    with contextlib.suppress(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
        while not is_over:
            try:
                status = asyncio.run(run_status(where, token_file))
            except UnavailableError as err:
                live.update(Text(printable(str(err)), style="bold red"), refresh=True)
            else:
                live.update(state_text(status), refresh=True)
                is_over = status.state != "running" and status.dataflow is None
            time.sleep(0.0 if is_over else every_s)


def state_text(status: RunStatus) -> RenderableType:
    """The live screen or, of a run that has ended, why it ended, its results, and how to resume it."""
    if status.dataflow is not None:
        lines = [f"pool: {status.pool}" if status.pool else "", _progress_text(status)]
        texts = [Text(printable(line)) for line in lines if line]
        return Group(render(status.overview(), status.dataflow.now_s), *texts)
    parts: list[RenderableType] = [Text(printable(alarm.text), style="bold red") for alarm in status.alarms]
    reason = f": {status.reason}" if status.reason else ""
    if status.state == "running":
        reason = ", but its dataflow does not answer"
    parts.append(Text(printable(f"{status.where} is {status.state}{reason}", keeps_lines=True)))
    if status.summary is None:
        parts.append(services_text(status.services))
    else:
        parts += [answer_text(answer_of_summary(status.summary)), summary_table(status.summary)]
        if status.state != "finished":
            parts.append(Text("to resume it, use `astraflow run` with the same recipe"))
    return Group(*parts)


def _progress_text(status: RunStatus) -> str:
    """Says what became of the episodes of services that left or died; empty if there were none."""
    progress = status.progress
    if progress is None or not (progress.num_resumed_tokens or progress.num_resampled_tokens):
        return ""
    return (
        f"resumed: {progress.num_resumed_tokens:,} tokens of lost attempts were reused by other services, "
        f"{progress.num_resampled_tokens:,} reported tokens were sampled again"
    )

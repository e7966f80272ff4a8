"""`astraflow top`: the live screen of `astraflow run`, for a run that is already running."""

import asyncio
import contextlib
import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from astraflow.addons.view.answer import answer_of_summary
from astraflow.addons.view.screen import answer_text, render
from astraflow.addons.view.status import RunStatus, run_status
from astraflow.errors import UnavailableError
from astraflow.report.report import summary_table
from astraflow.report.terminal_text import printable

__all__ = ["show_top", "state_text"]


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
    """The live screen or, of a run that has ended, its results."""
    if status.dataflow is not None:
        return render(status.overview(), status.dataflow.now_s)
    reason = f": {status.reason}" if status.reason else ""
    shown: list[RenderableType] = [Text(printable(alarm.text), style="bold red") for alarm in status.alarms]
    shown.append(Text(printable(f"{status.where} is {status.state}{reason}")))
    if status.summary is not None:
        shown += [answer_text(answer_of_summary(status.summary)), summary_table(status.summary)]
    return Group(*shown)

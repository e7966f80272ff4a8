"""How a run is shown while it lasts: the interface of its views and pages, and the view that prints lines."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TextIO

from rich.console import Console

from astraflow.processes.supervisor import ServiceState
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.overview import RunOverview, eval_line, idle_line, step_line
from astraflow.report.terminal_text import printable
from astraflow.report.watch.watchdog import NO_ALARMS, AlarmUpdate, cleared_text
from astraflow.types import EvalRecord, StatusReply, StepRecord

__all__ = ["PlainView", "RunPage", "ShownRun", "View"]

_PLAIN_EVERY_S = 2.0
"""Shortest time between two lines about steps; evaluations and notes are always printed."""

_FIRST_IDLE_S = 15.0
_LONGEST_IDLE_S = 60.0
"""Without any other line, a plain view says after 15, 30, and then every 60 seconds what is waited for."""


class View:
    """Shows a run. This base class shows nothing.

    All calls come from one event loop and return at once.
    """

    def step(self, record: StepRecord) -> None:
        """A step was committed."""

    def evaluated(self, record: EvalRecord) -> None:
        """An evaluation round finished."""

    def recall(self, record: EvalRecord) -> None:
        """An evaluation round that finished before this start of the run."""

    def status(
        self, status: StatusReply | None, services: Sequence[ServiceState], update: AlarmUpdate = NO_ALARMS
    ) -> None:
        """The dataflow's state (None while it does not answer), the processes, and what is wrong."""

    def note(self, text: str) -> None:
        """A message to show once."""

    def close(self) -> None:
        """Shows nothing more."""


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A run that `astraflow run` is about to start, as its pages see it."""

    name: str
    where: str
    """Its folder, as the user wrote it."""
    folder: RunFolder
    terminal: Console | None
    """The terminal that a page may use; None without one, or with `--plain`."""
    has_link: bool
    """Whether the recipe allows a page that a browser can open."""


class RunPage:
    """Shows a run while it lasts, which is the time in its `async with`.

    An entry point of the group `astraflow.pages` names a function that gets a `ShownRun` and returns a page,
    or None if it has none for that run.
    """

    url: str = ""
    """Where a browser finds the page while the run lasts; empty for a page in the terminal."""
    view: View | None = None
    """Takes the place of the plain lines, also before and after the run's `async with`."""

    async def __aenter__(self) -> Self:
        """Raises: OSError if the page can't be offered."""
        return self

    async def __aexit__(self, *_: object) -> None: ...


class PlainView(View):
    """Lines of text: a step at most every two seconds, and every evaluation, restart and note."""

    def __init__(self, name: str, where: str, out: TextIO, *, clock: Callable[[], float] = time.time) -> None:
        self._out = out
        self._clock = clock
        self._run = RunOverview(name, where, clock())
        self._last_line_s = 0.0
        self._last_said_s = clock()
        self._idle_s = _FIRST_IDLE_S

    def step(self, record: StepRecord) -> None:
        """Prints the step, unless another step was printed just before."""
        self._run.add_step(record)
        now_s = self._clock()
        if now_s - self._last_line_s >= _PLAIN_EVERY_S:
            self._last_line_s = now_s
            self._idle_s = _FIRST_IDLE_S
            self.note(step_line(self._run, record, now_s))

    def evaluated(self, record: EvalRecord) -> None:
        """Prints the score."""
        self._run.add_eval(record)
        self.note(eval_line(record))

    def recall(self, record: EvalRecord) -> None:
        """Stores the score without printing it again."""
        self._run.add_eval(record)

    def status(
        self, status: StatusReply | None, services: Sequence[ServiceState], update: AlarmUpdate = NO_ALARMS
    ) -> None:
        """Prints restarts and the begin and end of problems. If nothing else happens, prints what is waited
        for."""
        self._run.update(status, services)
        self._run.alarms = update.alarms
        news = (
            *self._run.new_restarts(services),
            *(f"warning ({alarm.rule}): {alarm.text}" for alarm in update.raised),
            *(cleared_text(alarm) for alarm in update.cleared),
        )
        for text in news:
            self.note(text)
        now_s = self._clock()
        if now_s - self._last_said_s >= self._idle_s:
            self._idle_s = min(2 * self._idle_s, _LONGEST_IDLE_S)
            self.note(idle_line(self._run, now_s))

    def note(self, text: str) -> None:
        """Prints it."""
        self._last_said_s = self._clock()
        with contextlib.suppress(OSError):  # nobody reads any more, but the run continues
            self._out.write(printable(text) + "\n")
            self._out.flush()

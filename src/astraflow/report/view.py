"""How a run is shown while it lasts: the interface of its views and pages, and the view that prints lines."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from astraflow import added
from astraflow.recipe.run_folder import RunFolder
from astraflow.recipe.service_state import ServiceState
from astraflow.report.overview import RunOverview, eval_line, idle_line, step_line
from astraflow.report.terminal_text import printable
from astraflow.report.watch.watchdog import NO_ALARMS, AlarmUpdate, cleared_text
from astraflow.types import EvalRecord, StatusReply, StepRecord

if TYPE_CHECKING:
    from astraflow.recipe.recipe import Recipe

__all__ = ["FINISHED_S", "INTERRUPTED_S", "PlainView", "RunPage", "ShownRun", "View", "make_pages"]

FINISHED_S = 20.0
"""Time that pages have to show the last rows of a run that is over."""
INTERRUPTED_S = 3.0
"""The same for an interrupted run, which ends within 5 s. Trackers get the rest when it is resumed."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """A run that is about to start, as its pages see it."""

    recipe: "Recipe"
    where: str
    """Its folder, as the user wrote it."""
    folder: RunFolder
    module_path: Sequence[str] = ()
    """Where the recipe's own modules are found."""
    terminal: Console | None = None
    """The terminal that a page may use; None without one, with `--plain`, or if a program starts the run."""
    has_link: bool = False
    """Whether a page for a browser is wanted."""


class RunPage:
    """Shows a run while it lasts: in the terminal, in a browser, or elsewhere; and reports on it afterwards.

    Pages come from add-ons (`added.page_makers`).
    """

    view: View | None = None
    """Takes the place of the plain lines, also before the page is open and after it is closed."""

    async def open(self, note: Callable[[str], None]) -> None:
        """Starts. `note` shows a message to a person; any thread may call it.

        Raises: OSError if the page can't be offered.
        """

    def wake(self) -> None:
        """`metrics.jsonl` has new rows. Must not block."""

    def evaluated(self, record: EvalRecord) -> None:
        """An evaluation round finished during this start of the run. Must not block."""

    async def settle(self) -> None:
        """Returns when the page's work is done. The run is over, and its processes end afterwards."""

    def kill(self) -> None:
        """Ends the page's processes at once."""

    async def close(self, deadline_s: float) -> None:
        """No more rows will come. Takes at most about `deadline_s` to show the last ones, then ends."""

    def report(self) -> None:
        """Writes files about the run, which has ended. Called on a page that may never have been open.

        Raises: JournalError or OSError, which are logged.
        """


def make_pages(run: ShownRun) -> list[RunPage]:
    """The pages that add-ons have for a run."""
    made = [make_page(run) for make_page in added.page_makers()]
    return [page for page in made if page is not None]


class PlainView(View):
    """Lines of text: a step at most every two seconds, and every evaluation, restart and note."""

    def __init__(self, name: str, where: str, out: TextIO, *, clock: Callable[[], float] = time.time) -> None:
        self._out = out
        self._clock = clock
        self._run = RunOverview(name, where, clock())
        self._last_line_s = 0.0
        self._last_text_s = clock()
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
        if now_s - self._last_text_s >= self._idle_s:
            self._idle_s = min(2 * self._idle_s, _LONGEST_IDLE_S)
            self.note(idle_line(self._run, now_s))

    def note(self, text: str) -> None:
        """Prints it."""
        self._last_text_s = self._clock()
        with contextlib.suppress(OSError):  # nobody reads any more, but the run continues
            self._out.write(printable(text) + "\n")
            self._out.flush()

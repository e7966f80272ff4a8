"""The trackers of a run as one of its pages."""

import asyncio
from collections.abc import Callable

from astraflow.addons.trackers.tracking import Trackers
from astraflow.report.view import RunPage, ShownRun

__all__ = ["TrackersPage", "make_page"]


class TrackersPage(RunPage):
    """Hands the rows of `metrics.jsonl` over to the trackers of the recipe."""

    def __init__(self, run: ShownRun) -> None:
        self._run = run
        self._trackers: Trackers | None = None

    async def open(self, note: Callable[[str], None]) -> None:
        """Starts the processes of the trackers."""
        run = self._run
        self._trackers = Trackers(run.recipe, run.folder, note, module_path=run.module_path)
        self._trackers.start()

    def wake(self) -> None:
        """Tells the processes that there are new rows."""
        if self._trackers is not None:
            self._trackers.wake()

    def kill(self) -> None:
        """Ends the processes immediately."""
        if self._trackers is not None:
            self._trackers.kill()

    async def close(self, deadline_s: float) -> None:
        """Waits until the trackers have processed all rows, at most `deadline_s` seconds."""
        if self._trackers is not None:
            await asyncio.to_thread(self._trackers.close, deadline_s)


def make_page(run: ShownRun) -> TrackersPage | None:
    """Makes the page of a run's trackers; None if its recipe has none."""
    return TrackersPage(run) if run.recipe.trackers else None

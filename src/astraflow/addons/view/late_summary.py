"""The summary of a run that ended without writing one, such as a killed run.

It is computed from the whole journal, which takes minutes for millions of episodes. The page therefore
doesn't wait for it: the summary is computed once, in a thread, and shown when it is there.
"""

import threading

from astraflow.errors import Error
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.report import load_summary
from astraflow.report.summary import Summary

__all__ = ["LateSummary"]


class LateSummary:
    """The summary of one run folder. Example: `LateSummary(folder).now()` returns None until it is known."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._of = -1.0
        """When the `run.json` was written whose end is summarized here."""
        self._summary: Summary | None = None
        self._thread: threading.Thread | None = None
        self.problem = ""
        """Why the summary can't be computed; empty as long as it may be."""

    def now(self) -> Summary | None:
        """Returns the summary, or None while it is computed, or if it can't be.

        Raises: DataError if the run's summary or record is broken.
        """
        if self._folder.summary.is_file():
            return load_summary(self._folder)
        written_s = self._folder.load_record().at_s
        with self._lock:
            if self._of != written_s:
                self._of = written_s
                self._summary = None
                self.problem = ""
                self._thread = threading.Thread(
                    target=self._compute, args=(written_s,), name="summary", daemon=True
                )
                self._thread.start()
            return self._summary

    def wait(self) -> None:
        """Returns once the summary is known or can't be computed. Raises: DataError, as `now` does."""
        self.now()
        if self._thread is not None:
            self._thread.join()

    def _compute(self, written_s: float) -> None:
        summary: Summary | None = None
        problem = ""
        try:
            summary = load_summary(self._folder)
        except Exception as err:  # noqa: BLE001 - whatever is wrong with a folder, its page has to say it
            problem = str(err) if isinstance(err, Error) else f"{type(err).__name__}: {err}"
        with self._lock:
            if self._of == written_s:
                self._summary = summary
                self.problem = problem

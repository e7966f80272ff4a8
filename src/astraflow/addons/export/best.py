"""Keeps the best version of each policy, by its evaluations, as a model folder next to the checkpoints.

    checkpoints/actor/best-step-00000030-version-31/{model.safetensors, config.json, tokenizer.json, ...}

The dataflow decides which version is the best so far: it marks the record of its evaluation, and keeps its
chunks until another version is better. This module only writes the folder, and removes the folder of the
previous best version. It does so after each such record, and at the start and the end of a run. A folder that
could not be written because of a kill or a full disk is therefore written later.
"""

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial

from astraflow.addons.export.export import export_version
from astraflow.dataflow.journal.journal_db import DATABASE
from astraflow.dataflow.journal.reader import JournalReader
from astraflow.errors import Error
from astraflow.recipe.run_folder import RunFolder
from astraflow.report.best_version import BEST_PREFIX, folder_of, is_best
from astraflow.report.view import RunPage, ShownRun
from astraflow.rollout.waiting import wait_for_done_or_set
from astraflow.service.vital import vital
from astraflow.types import EvalRecord

__all__ = ["BestKeeper", "make_keeper"]

_log = logging.getLogger(__name__)


class BestKeeper(RunPage):
    """Writes the folders, one at a time.

    A thread that does not keep the process alive writes each folder, so an interrupted run stops at once.
    """

    def __init__(self, run: ShownRun) -> None:
        self._folder = run.folder
        self._rule = run.recipe.eval.best
        self._note: Callable[[str], None] = _log.info
        self._best: dict[str, EvalRecord] = {}
        """Policy -> the record of the version whose folder should exist."""
        self._changed = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_metric_missed = False
        self._writing: asyncio.Task[None] | None = None
        self._is_closed = False

    async def open(self, note: Callable[[str], None]) -> None:
        """Starts with the evaluations in the run's journal. Raises: JournalError if it cannot be read."""
        self._note = note
        earlier: list[EvalRecord] = []
        if (self._folder.journal / DATABASE).is_file():
            with JournalReader(self._folder.journal) as reader:
                earlier = reader.evals()
        for record in earlier:
            self.evaluated(record)
        self._writing = asyncio.create_task(self._keep(), name="keep best")
        vital(self._writing, "the task that keeps the best versions", may_end=lambda: self._is_closed)

    def evaluated(self, record: EvalRecord) -> None:
        """Takes note of an evaluation."""
        self._look_for_metric(record)
        if is_best(record, self._rule):
            self._best[record.policy] = record
            self._changed.set()
            self._idle.clear()

    async def settle(self) -> None:
        """Returns when nothing is left to write."""
        if self._writing is not None:
            await wait_for_done_or_set(self._writing, self._idle)

    async def close(self, deadline_s: float) -> None:
        """Stops at once. What is not written yet is written at the next start."""
        del deadline_s
        self._is_closed = True
        if self._writing is not None:
            self._writing.cancel()

    async def _keep(self) -> None:
        """Writes the folders that are missing, until it is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            wanted = tuple(self._best.values())
            for failure in await _in_daemon(partial(_write_all, self._folder, wanted)):
                self._note(failure)
            if not self._changed.is_set():
                self._idle.set()

    def _look_for_metric(self, record: EvalRecord) -> None:
        """Tells the user once if the evaluations do not have the metric that the recipe names."""
        figure = self._rule.figure
        names = [item.name for item in record.metrics]
        is_missed = record.eval_set == self._rule.eval_set and figure and figure not in names
        if is_missed and not self._is_metric_missed:
            self._is_metric_missed = True
            self._note(
                f"eval.best.metric = {self._rule.metric!r}: evaluations of {record.eval_set!r} have no "
                f"metric {figure!r} (they have: {', '.join(names)}); no version is kept"
            )


def make_keeper(run: ShownRun) -> BestKeeper | None:
    """Makes the keeper of a run; None if its recipe keeps no version."""
    return BestKeeper(run) if run.recipe.eval.best.metric else None


def _write_all(folder: RunFolder, records: Sequence[EvalRecord]) -> list[str]:
    """Writes the model folders of several policies. Returns the reasons why some could not be written."""
    return [failure for record in records if (failure := _write(folder, record))]


def _write(folder: RunFolder, record: EvalRecord) -> str:
    """Writes the model folder of a version unless it exists, and removes those of other versions.

    Returns the reason if it could not be written, else an empty text. If it could not, the folder of the
    previous version stays.
    """
    path = folder_of(folder, record)
    for unfinished in path.parent.glob(f".{BEST_PREFIX}*"):
        shutil.rmtree(unfinished, ignore_errors=True)
    try:
        if not path.is_dir():
            export_version(folder.path, path, policy=record.policy, version=record.version)
    except (Error, OSError) as err:
        return (
            f"the best version of {record.policy} ({record.version}) is not written to {path}: {err}; it is "
            "tried again after the next evaluation that is better, and at the next start"
        )
    for other in path.parent.glob(f"{BEST_PREFIX}*"):
        if other != path:
            shutil.rmtree(other, ignore_errors=True)
    return ""


async def _in_daemon(function: Callable[[], list[str]]) -> list[str]:
    """Calls a function in a daemon thread, and returns its result. Raises: whatever the function raises."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[str]] = loop.create_future()

    def settle(result: list[str] | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result or [])

    def work() -> None:
        result: list[str] | None = None
        failure: Exception | None = None
        try:
            result = function()
        except Exception as err:  # noqa: BLE001 - passed to the loop, which raises it
            failure = err
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:
            _log.debug("the run has stopped; its best version is written at the next start")

    threading.Thread(target=work, name="best version", daemon=True).start()
    return await done

"""Finds the task of a lease. The core only knows indices; sources and evaluation sets stay outside it."""

from collections.abc import Mapping
from typing import cast

from astraflow.dataflow.core.commands import LeaseView
from astraflow.dataflow.core.core import Core
from astraflow.errors import DataError, UnavailableError
from astraflow.protocols import TaskSource
from astraflow.types import Lease, Task

__all__ = ["TaskLookup"]


class TaskLookup:
    """Adds tasks to leases."""

    def __init__(
        self, core: Core, sources: Mapping[str, TaskSource], eval_sources: Mapping[str, TaskSource]
    ) -> None:
        self._core = core
        self._sources = sources
        self._eval_sources = eval_sources

    def task(self, view: LeaseView) -> Task:
        """The task of a live lease.

        Raises: DataError if its source fails with any exception, even with `exit()`; UnavailableError if the
        source cannot read a file at the moment.
        """
        if view.kind == "eval":
            source = self._eval_sources[view.eval_set]
            return _task_of(source, view.task_idx, f"eval.sets.{view.eval_set}.source")
        if not view.source:
            return self._core.pushed_task(view.task_idx)
        return _task_of(self._sources[view.source], view.task_idx, f"tasks.sources.{view.source}")

    def lease(self, view: LeaseView) -> Lease:
        """The lease as it is sent to a service."""
        return Lease(
            id=view.id,
            kind=view.kind,
            group_id=view.group_id,
            episode_idx=view.episode_idx,
            attempt=view.attempt,
            task=self.task(view),
            seed=view.seed,
            pinned=view.pinned,
            eval_set=view.eval_set,
        )


def _task_of(source: TaskSource, idx: int, where: str) -> Task:
    """Task `idx` of a source; `where` is its place in the recipe. Raises: the errors of `TaskLookup.task`."""
    try:
        task = cast("object", source.task(idx))
    except OSError as err:
        raise UnavailableError(f"{where}: task {idx} cannot be read now: {err}") from err
    except BaseException as err:  # a source may be a user's code
        raise DataError(f"{where}: task {idx} raised {type(err).__name__}: {err}") from err
    if not isinstance(task, Task):
        raise DataError(f"{where}: task {idx} is a {type(task).__name__}, but must be a Task")
    return task

"""From the core's indices to the tasks themselves: sources and evaluation sets stay outside the core."""

from collections.abc import Mapping

from astraflow.dataflow.core.commands import LeaseView
from astraflow.dataflow.core.core import Core
from astraflow.protocols import TaskSource
from astraflow.types import Lease, Task

__all__ = ["TaskLookup"]


class TaskLookup:
    """Completes leases with their tasks."""

    def __init__(
        self, core: Core, sources: Mapping[str, TaskSource], eval_sources: Mapping[str, TaskSource]
    ) -> None:
        self._core = core
        self._sources = sources
        self._eval_sources = eval_sources

    def task(self, view: LeaseView) -> Task:
        """The task of a lease that is out."""
        if view.kind == "eval":
            return self._eval_sources[view.eval_set].task(view.task_idx)
        if not view.source:
            return self._core.pushed_task(view.task_idx)
        return self._sources[view.source].task(view.task_idx)

    def lease(self, view: LeaseView) -> Lease:
        """The lease as it goes out."""
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

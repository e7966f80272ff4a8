"""Weights & Biases: one run, whose charts have the policy's steps as their x axis."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from astraflow.addons.trackers.library_tracker import LibraryTracker
from astraflow.metrics import MetricRow
from astraflow.recipe.trackers import TrackedRun

__all__ = ["WandbConfig", "WandbTracker"]


class WandbConfig(LibraryTracker):
    """Weights & Biases. Needs `astraflow[wandb]`, and for `mode: online` an API key in `WANDB_API_KEY` or
    from `wandb login`."""

    name: Literal["wandb"] = "wandb"
    project: str = ""
    """Project; default: the recipe's name."""
    entity: str = ""
    """User or team; default: that of the API key."""
    group: str = ""
    """Group of the run within the project."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes files to `trackers/wandb` in the run folder; `wandb sync` uploads them later."""

    def make(self, run: TrackedRun) -> "WandbTracker":
        """Makes the tracker, and opens its run."""
        return WandbTracker(self, run)


class WandbTracker:
    """Implements `Tracker`.

    W&B's own step can only increase, whereas each policy and its evaluations have their own steps. Therefore,
    each policy's step is logged as a metric, which is the x axis of the policy's other metrics.
    """

    def __init__(self, config: WandbConfig, run: TrackedRun) -> None:
        # Any: the library is not installed where types are checked.
        wandb: Any = importlib.import_module("wandb")
        self._table = wandb.Table
        self._run = wandb.init(
            project=config.project or run.project,
            entity=config.entity or None,
            group=config.group or None,
            tags=config.tags,
            mode=config.mode,
            id=run.id,
            name=run.name,
            resume="allow",
            dir=str(run.folder),
            config=dict(run.recipe),
            # This process doesn't print anything worth keeping, and the Git repository and the code in its
            # current folder aren't the run's.
            settings=wandb.Settings(console="off", disable_git=True, disable_code=True),
        )
        for policy in run.recipe["policies"]:
            self._run.define_metric(f"{policy}/step")
            self._run.define_metric(f"{policy}/*", step_metric=f"{policy}/step")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Logs each row as one history entry."""
        for row in map(MetricRow.from_flat, rows):
            self._run.log({f"{row.policy}/step": row.step, **row.named})

    def write_episodes(self, row: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> None:
        """Logs the episodes as a table."""
        columns = list(episodes[0])
        table = self._table(columns=columns, data=[[each[name] for name in columns] for each in episodes])
        policy = row["policy"]
        self._run.log({f"{policy}/step": row["step"], f"{policy}/eval/{row['eval_set']}/episodes": table})

    def close(self) -> None:
        """Ends the run, which uploads the remaining data."""
        self._run.finish()

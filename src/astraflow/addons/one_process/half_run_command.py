"""The behavior and the output of `astraflow run --only`."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from astraflow.addons.one_process.half_runs import BATCHES, collect_batches, train_from_batches
from astraflow.errors import ConfigError
from astraflow.recipe.model_checks import check_model
from astraflow.recipe.recipe import Recipe
from astraflow.trainer.columns import reward_mean
from astraflow.types import Batch, StepRecord
from astraflow.user_input.mistakes import hint

__all__ = ["run_only"]

_INTERRUPTED = 130
"""Exit code of a command that was interrupted."""


def run_only(recipe: Recipe, run_dir: Path, only: str, batches: Path | None) -> int:
    """Runs `--only rollout` or `--only train`. Returns the exit code. Raises: ConfigError for others."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    match only:
        case "rollout" if batches is None:
            return _run_only_rollout(recipe, run_dir)
        case "train":
            return _run_only_train(recipe, run_dir, batches or run_dir / BATCHES)
        case "rollout" | "":
            raise ConfigError("--batches is read by --only train; --only rollout writes RUN_DIR/batches")
        case _:
            raise ConfigError(f"--only {only} is not a half of a run{hint(only, ['rollout', 'train'])}")


def _run_only_rollout(recipe: Recipe, run_dir: Path) -> int:
    """Collects batches until all steps have one; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)

    def show_batch(batch: Batch, path: Path) -> None:
        totals = batch.totals
        steps = recipe.policies[batch.policy].train.steps
        reward = reward_mean(batch.samples)
        console.print(
            f"{batch.policy} batch {batch.step + 1}/{steps}: {totals.num_groups} groups, "
            f"{totals.num_samples} samples, reward {reward:.3f}, {path.stat().st_size:,} bytes"
        )

    is_finished, batches = asyncio.run(_collected(recipe, run_dir, show_batch))
    if not is_finished:
        console.print("stopped; run the same command again to collect the missing batches")
        return _INTERRUPTED
    console.print(f"batches: {batches}; train from them with --only train --batches {batches}")
    return 0


async def _collected(
    recipe: Recipe, run_dir: Path, on_batch: Callable[[Batch, Path], None]
) -> tuple[bool, Path]:
    """Collects the batches; returns whether all were collected, and their folder."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    batches = await collect_batches(recipe, run_dir, stop=stop, on_batch=on_batch)
    return not stop.is_set(), batches


def _run_only_train(recipe: Recipe, run_dir: Path, batches: Path) -> int:
    """Trains from saved batches; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    for name, policy in recipe.policies.items():
        check_model(name, policy)

    def show_step(record: StepRecord) -> None:
        values = {item.name: item.value for item in record.metrics}
        console.print(
            f"{record.policy} step {record.number}/{recipe.policies[record.policy].train.steps}: "
            f"reward {record.reward_mean:.3f}, loss {values.get('loss', 0.0):.4g}, "
            f"staleness {record.staleness_max}"
        )

    for model in train_from_batches(recipe, run_dir, batches, on_step=show_step):
        steps = recipe.policies[model.policy].train.steps
        short = f" (the batches end before step {steps})" if model.num_steps < steps else ""
        console.print(
            f"{model.policy}: {model.num_steps} steps{short}, weights {model.digest}, model: {model.folder}"
        )
    return 0

"""What `astraflow run --only ...` does and prints."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from astraflow.launch.config import Recipe
from astraflow.launch.offline import collect_batches, train_from_batches
from astraflow.launch.preflight import check_model
from astraflow.trainer.columns import reward_mean
from astraflow.types import Batch, StepRecord

__all__ = ["run_only_rollout", "run_only_train"]

_INTERRUPTED = 130
"""Exit code of a command that was interrupted."""


def run_only_rollout(recipe: Recipe, run_dir: Path) -> int:
    """Collects batches until all steps have one; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)

    def told(batch: Batch, path: Path) -> None:
        totals, steps = batch.totals, recipe.policies[batch.policy].train.steps
        reward = reward_mean(batch.samples)
        console.print(
            f"{batch.policy} batch {batch.step + 1}/{steps}: {totals.num_groups} groups, "
            f"{totals.num_samples} samples, reward {reward:.3f}, {path.stat().st_size:,} bytes"
        )

    is_finished, batches = asyncio.run(_collected(recipe, run_dir, told))
    if not is_finished:
        console.print("stopped; the same command goes on with what is missing")
        return _INTERRUPTED
    console.print(f"batches: {batches}; train from them with --only train --batches {batches}")
    return 0


async def _collected(recipe: Recipe, run_dir: Path, told: Callable[[Batch, Path], None]) -> tuple[bool, Path]:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    batches = await collect_batches(recipe, run_dir, stop=stop, told=told)
    return not stop.is_set(), batches


def run_only_train(recipe: Recipe, run_dir: Path, batches: Path) -> int:
    """Trains from saved batches; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    for name, policy in recipe.policies.items():
        check_model(name, policy)

    def told(record: StepRecord) -> None:
        values = {item.name: item.value for item in record.metrics}
        console.print(
            f"{record.policy} step {record.step + 1}/{recipe.policies[record.policy].train.steps}: "
            f"reward {record.reward_mean:.3f}, loss {values.get('loss', 0.0):.4g}, "
            f"staleness {record.staleness_max}"
        )

    for model in train_from_batches(recipe, run_dir, batches, told=told):
        steps = recipe.policies[model.policy].train.steps
        short = f" (the batches end before step {steps})" if model.num_steps < steps else ""
        console.print(
            f"{model.policy}: {model.num_steps} steps{short}, weights {model.digest}, model: {model.folder}"
        )
    return 0

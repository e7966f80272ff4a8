"""The behavior of `astraflow try --trace`."""

import asyncio

from astraflow.addons.one_process.in_one_process import train_in_one_process
from astraflow.cli.command_group import AddedCommand
from astraflow.recipe.recipe import Recipe

__all__ = ["TRY_TRACE", "try_trace"]


def try_trace(recipe: Recipe) -> None:
    """Trains two steps and prints what passes from part to part."""
    asyncio.run(train_in_one_process(recipe))


TRY_TRACE = AddedCommand(try_trace)

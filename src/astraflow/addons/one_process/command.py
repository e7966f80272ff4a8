"""`astraflow try`: runs one episode of a recipe, or trains two steps, in one process."""

import asyncio
import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.options import MOST
from astraflow.cli.own_modules import module_path
from astraflow.cli.runs import (
    Overrides,
    Recipe,
    build_missing,
    fetch_models,
    load_with_checks,
    names_model,
)
from astraflow.report.terminal_text import printable

__all__ = ["TRY", "try_task"]


def try_task(
    recipe: Recipe,
    overrides: Overrides = None,
    task: Annotated[
        int, typer.Option("--task", help="Position of the task in its source.", min=0, max=MOST)
    ] = 0,
    source: Annotated[
        str, typer.Option("--source", help="Task source or evaluation set. Default: the first source.")
    ] = "",
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.", min=-MOST, max=MOST)] = 0,
    *,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace", help="Train two steps in this process and print what passes from part to part."
        ),
    ] = False,
) -> None:
    """Run one episode in this process, with the policies' starting weights, and print it."""
    from astraflow.recipe.document import keys_as_written
    from astraflow.recipe.gallery import recipe_file

    file, is_named = recipe_file(recipe)
    module_path(file)
    with keys_as_written(file, overrides or ()):
        loaded = load_with_checks(file, overrides or ())
        if is_named or names_model(overrides or ()):
            build_missing(loaded)
        loaded = fetch_models(loaded)
        if trace:
            from astraflow.addons.one_process.in_one_process import train_in_one_process

            asyncio.run(train_in_one_process(loaded))
            return
        from astraflow.addons.one_process.trial import episode_text, try_episode

        with _shown_output():
            trial = asyncio.run(try_episode(loaded, task=task, source=source, seed=seed))
        print(episode_text(trial))


class _Printable(logging.Formatter):
    """Leaves out what would control the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record), keeps_lines=True)


@contextmanager
def _shown_output() -> Generator[None]:
    """Shows what agent programs print on their standard error, on the own one."""
    logger = logging.getLogger("astraflow.output")
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable())
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


TRY = AddedCommand(try_task, after="compare")

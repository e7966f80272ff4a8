"""`astraflow init`: the first minutes of a project."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["init_project"]


def init_project(
    folder: Annotated[Path, typer.Argument(help="Folder to make; missing or empty.", metavar="DIR")],
) -> None:
    """Start a project: a folder with a recipe, a reward, a workflow and a test. It runs as it is.

    Its README names the commands, in the order in which one uses them.

    Example: `astraflow init my-project`.
    """
    from astraflow.recipe.gallery import copy_project

    for place in copy_project(folder):
        print(folder / place)
    print(
        f"\nNow run:\n  cd {shlex.quote(str(folder))}\n"
        "  python -m pytest                                      # needs: pip install pytest\n"
        "  astraflow model init model.yaml --out models/start    # builds the model to start from\n"
        "  astraflow try recipe.yaml --task 1                    # one episode, printed\n"
        "  astraflow run recipe.yaml                             # trains"
    )

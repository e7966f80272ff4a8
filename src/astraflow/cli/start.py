"""Commands for the first minutes: `demo`, `init`."""

import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["demo", "init_project"]


def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to the recipe, e.g. seed=1", metavar="[a.b=value]..."),
    ] = None,
    *,
    folder: Annotated[
        Path, typer.Option("--dir", help="Folder for the model and the run.", file_okay=False)
    ] = Path("astraflow-demo"),
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines instead of the live screen.")] = False,
) -> None:
    """Build a tiny model and train it by real services: a minute or two on two CPU cores.

    It is the quickstart's recipe in 40 steps; `astraflow recipes show quickstart` prints it. The last line
    says whether the held-out reward rose, and the exit code is 1 if it did not. Ctrl-C stops; the same
    command continues. Needs the extra `quickstart`: pip install 'astraflow[quickstart]'.
    """
    from astraflow.run.demo import run_demo

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    raise typer.Exit(run_demo(folder, overrides or (), is_plain=plain, tell=print))


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

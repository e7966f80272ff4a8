"""The commands `sweep` and `compare`."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand

__all__ = ["COMPARE", "SWEEP", "compare", "sweep"]


def sweep(
    recipe: Annotated[
        str,
        typer.Argument(
            help="Recipe file (YAML), a name from `astraflow recipes list`, or the folder of a sweep to "
            "continue.",
            metavar="RECIPE|GROUP_DIR",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Changes to the recipe, as for `run`. A key with several values, such as "
            "train.lr=1e-4,3e-4, is swept.",
            metavar="[a.b=value[,value]...]...",
        ),
    ] = None,
    *,
    seeds: Annotated[str, typer.Option(help="How many seeds, or a list: 3, or 0,7.")] = "1",
    group_dir: Annotated[
        Path | None, typer.Option("--group-dir", help="Folder of the group. Default: runs/NAME-sweep.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Runs side by side; 0: one for two cores.", min=0, max=1000)] = 1,
    on: Annotated[str, typer.Option("--on", help="Launcher of the rollout services, as for `run`.")] = "",
    again: Annotated[
        list[str] | None, typer.Option("--redo", help="Run that starts again from nothing; repeatable.")
    ] = None,
) -> None:
    """Train a recipe with several values and seeds, and compare the results.

    The runs form a group in one folder. The same command, or `astraflow sweep GROUP_DIR`, continues a sweep
    that was interrupted or killed. A run that fails is named, and tried again only with `--redo`. A group
    whose code or recipe has changed is refused.

    Examples: `astraflow sweep math/tiny train.lr=1e-4,3e-4 --seeds 3`,
    `astraflow sweep runs/tiny-sweep --redo lr=1e-4_seed=2`.
    """
    from astraflow.addons.experiments.commands import run_sweep
    from astraflow.addons.experiments.group_request import GroupRequest

    request = GroupRequest(recipe, tuple(overrides or ()), seeds, group_dir, on)
    raise typer.Exit(run_sweep(request, jobs=jobs, again=again or ()))


def compare(
    runs: Annotated[
        list[Path], typer.Argument(help="Run folders, or folders of sweeps.", metavar="RUN_DIR|GROUP_DIR...")
    ],
    *,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    png: Annotated[
        Path | None, typer.Option("--png", help="Draw means and bands over seeds into this picture.")
    ] = None,
) -> None:
    """Compare runs: final figures with confidence intervals, and which differences matter.

    Runs that differ only by their seed count as one variant. Figures that runs measured on different tasks
    are not compared.

    Examples: `astraflow compare runs/tiny-sweep --png lr.png`, `astraflow compare runs/a runs/b --markdown`.
    """
    from astraflow.addons.experiments.commands import show_comparison

    show_comparison(runs, as_markdown=markdown, png=png)


SWEEP = AddedCommand(sweep, after="run")
COMPARE = AddedCommand(compare, after="sweep")

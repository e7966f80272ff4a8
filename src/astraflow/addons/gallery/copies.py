"""Copies the recipes, model specs, and examples that come with AstraFlow.

Copies keep their relative paths below the new folder, because a recipe refers to other files by their paths:
the recipe that it extends, the modules of its own parts, the files that these read, and the spec of its
model.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from astraflow.errors import DataError
from astraflow.recipe.document import full_mapping
from astraflow.recipe.gallery import FOLDERS, PROJECT, SPECS, GalleryItem, gallery_root
from astraflow.user_input.yaml_files import parts_of

__all__ = ["copy_all", "copy_entries", "copy_project", "specs_of"]


def copy_entries(chosen: Sequence[GalleryItem], to: Path, *, force: bool = False) -> list[Path]:
    """Copies entries and the files that they need into a folder, and returns the paths relative to it.

    An existing file with the same content is left unchanged.

    Raises: DataError, before anything is written, if a different file exists and `force` is False.
    """
    root = gallery_root()
    needed: dict[Path, None] = {}
    for entry in chosen:
        needed |= dict.fromkeys(_needed_by(entry.path, root))
    return _copy({path.relative_to(root): path for path in needed}, to, force=force)


def copy_all(to: Path, *, force: bool = False) -> list[Path]:
    """Copies the entire gallery, like `copy_entries`."""
    root = gallery_root()
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if _is_content(path)]
    return _copy({path.relative_to(root): path for path in found}, to, force=force)


def specs_of(entry: GalleryItem) -> list[tuple[str, str]]:
    """Returns (name, path of the spec below the root) for the models of a recipe that have a spec here."""
    root = gallery_root()
    policies: dict[str, dict[str, str]] = full_mapping(entry.path).get("policies", {})
    models = dict.fromkeys(policy["model"].removeprefix("./models/") for policy in policies.values())
    specs = [(model, f"{SPECS}/{model}.yaml") for model in models]
    return [(model, place) for model, place in specs if (root / place).is_file()]


def copy_project(to: Path) -> list[Path]:
    """Copies the example project into a folder, and returns the paths relative to it.

    Raises: DataError if the folder exists and is not empty.
    """
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise DataError(f"{to} exists and is not an empty folder; choose another one")
    source = gallery_root() / PROJECT
    files = {path.relative_to(source): path for path in source.rglob("*") if _is_content(path)}
    return _copy(files, to, force=False)


def _is_content(path: Path) -> bool:
    """Checks that a path is a file that somebody wrote, not one that Python compiled."""
    return path.is_file() and "__pycache__" not in path.parts


def _copy(files: dict[Path, Path], to: Path, *, force: bool) -> list[Path]:
    """Writes files (path below `to` -> source). The copies are writable even if the sources aren't."""
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
    """Returns a file and all files of the gallery that it refers to, directly or indirectly."""
    seen: dict[Path, None] = {}
    waiting = parts_of(path)[1] or [path]
    while waiting:
        current = waiting.pop()
        if current not in seen:
            seen[current] = None
            waiting += [other for other in _named_in(current, root) if other.is_file()]
    return list(seen)


def _named_in(path: Path, root: Path) -> Iterator[Path]:
    """Yields files that a recipe, spec, or module may refer to. Some don't exist: modules of packages."""
    text = path.read_text(encoding="utf-8")
    for bases in re.findall(r"^extends: (.+)$", text, re.M):
        for base in re.findall(r"[\w./-]+\.yaml", bases):
            yield (path.parent / base).resolve()
    modules = re.findall(r'use: "([\w.]+):', text)
    if path.suffix == ".py":
        modules += re.findall(r"^(?:from|import) ([\w.]+)", text, re.M)
        for name in re.findall(r'\(__file__\)\.with_name\("([\w.-]+)"\)', text):
            yield path.with_name(name)
    for module in modules:
        for folder in (root, path.parent):
            yield folder / f"{module.replace('.', '/')}.py"
    for model in re.findall(r"\./models/([\w-]+)", text):
        yield root / SPECS / f"{model}.yaml"
    for place in re.findall(r"\bexamples/[\w/-]+\.\w+|\brecipes/[\w/-]+\.yaml", text):
        yield root / place

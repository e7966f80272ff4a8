"""Reads users' YAML files into one mapping: a file, the files that it extends, and dotted overrides on top.

The key `extends` names one file, or several of which later ones win. The paths are relative to the folder of
the file that has the key. If there is no file `FAMILY/SIZE.yaml`, the name stands for `sizes/SIZE.yaml` with
`FAMILY/full.yaml` on top. A section with a `name` or a `use` chooses a variant; a different choice keeps the
section's other keys. This module knows no config class: `config.parse_config` checks the result.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from astraflow.errors import ConfigError
from astraflow.user_input.mistakes import format_value, near_path
from astraflow.user_input.plain_data import line_of, yaml_value
from astraflow.user_input.user_files import format_path, is_there, line_at, read_file

__all__ = [
    "USE_PATTERN",
    "JsonMap",
    "layers_of",
    "load_mapping",
    "merge",
    "override_pairs",
    "parts_of",
    "place_in",
    "set_dotted",
]

JsonMap = dict[str, Any]
USE_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
"""`module:attr`, the name of the user's own component."""
_MAX_YAML_BYTES = 2**20
"""Size limit of a file; recipes have a few kilobytes."""
_MAX_FILES = 64
"""Largest number of files that a recipe extends, directly and indirectly."""
_MAX_DOTS = 32
"""Largest number of keys in the path of an override; the longest paths in a recipe have about 8."""


def load_mapping(path: Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> JsonMap:
    """Returns the mapping of a file, with `extends` merged in and dotted overrides (`a.b=value`) applied.

    Raises: ConfigError if a file is missing, is not a mapping or extends itself, or an override is malformed.
    """
    mapping: JsonMap = {}
    for _, layer in layers_of(path):
        mapping = merge(mapping, layer)
    for dotted, value in override_pairs(overrides):
        set_dotted(mapping, dotted, value)
    return mapping


def layers_of(path: Path) -> list[tuple[Path, JsonMap]]:
    """Returns a file and its mapping, after those of the files that it extends. Later layers win.

    Raises: ConfigError, like `load_mapping`.
    """
    return _layers(path, (), [])


def parts_of(path: Path) -> tuple[str, list[Path]]:
    """Returns the name and the files, of which later ones win, that a missing file `FAMILY/SIZE-VARIANT.yaml`
    stands for: `sizes/SIZE.yaml` and `FAMILY/full-VARIANT.yaml`. There may be no variant, or no such files.
    """
    folder = path.absolute().parent
    size, dash, variant = path.stem.rpartition("-")
    for base, end in ((path.stem, ""), (size, dash + variant)):
        files = [folder.parent / "sizes" / f"{base}.yaml", folder / f"full{end}.yaml"]
        if not is_there(path) and all(map(is_there, files)):
            return f"{folder.name}{end}-{base}".replace(".", "_"), files
    return "", []


def _layers(path: Path, above: tuple[Path, ...], opened: list[Path]) -> list[tuple[Path, JsonMap]]:
    name, parts = parts_of(path)
    if parts:
        layers = [layer for part in parts for layer in _layers(part, (*above, path), opened)]
        return [*layers, (parts[-1], {"name": name})]
    path = path.resolve() if is_there(path) else path
    if path in above:
        raise ConfigError(f"{path} extends itself: {' -> '.join(str(p) for p in (*above, path))}")
    opened.append(path)
    if len(opened) > _MAX_FILES:
        raise ConfigError(f"{opened[0]} extends more than {_MAX_FILES} files; write what it needs into one")
    mapping = _yaml_mapping(path)
    layers: list[tuple[Path, JsonMap]] = []
    for base in _bases(mapping.pop("extends", []), path):
        layers += _layers(path.parent / base, (*above, path), opened)
    return [*layers, (path, mapping)]


def _yaml_mapping(path: Path) -> JsonMap:
    """Reads the sections of one file. Raises: ConfigError, or DataError if it isn't a readable file."""
    if not is_there(path):
        raise ConfigError(
            f"recipe {format_path(path)} does not exist; pass the path of a YAML file (`astraflow recipes "
            "list` shows those that come with AstraFlow, `astraflow recipes copy NAME` copies one)"
            f"{near_path(path)}"
        )
    try:
        text = read_file(path, "recipe", max_bytes=_MAX_YAML_BYTES).decode()
    except UnicodeDecodeError as err:
        raise ConfigError(f"{path} is not valid YAML: line {line_at(err)} is not UTF-8") from err
    loaded = yaml_value(text, str(path))
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}; a recipe is a mapping of sections")
    return cast("JsonMap", loaded)


def _bases(extends: object, path: Path) -> list[str]:
    """Returns the files that a recipe extends: one, or several of which later ones win.

    Raises: ConfigError.
    """
    given = cast("list[object]", extends) if isinstance(extends, list) else [extends]
    if wrong := [base for base in given if not isinstance(base, str)]:
        raise ConfigError(
            f"{path}: extends = {wrong[0]!r}; expected the path of a recipe, or a list of paths"
        )
    return cast("list[str]", given)


def place_in(path: Path, *spellings: Sequence[str | int]) -> str:
    """Returns where a value is set: `line 7`, or `line 7 of FILE` in a file that `path` extends.

    `spellings` are the paths of keys to the value, of which there are several if files may write it in
    different ways. The result is empty if no file sets the value, for example because an override does.
    """
    places = [
        (depth - len(keys), rank, line, file)
        for rank, (file, _) in enumerate(layers_of(path))
        for keys in spellings
        for line, depth in [line_of(file.read_text(encoding="utf-8"), keys)]
        if depth
    ]
    if not places:
        return ""
    _, _, line, file = max(places)
    return f"line {line}" if file == path.resolve() else f"line {line} of {file}"


def merge(base: JsonMap, top: JsonMap) -> JsonMap:
    """Merges `top` into `base`, key by key.

    A section keeps its keys if `top` chooses another variant for it; `parse_config` refuses those that the
    new variant lacks. An empty section replaces the old one, and null removes a key that `base` has.
    """
    merged = dict(base)
    if "use" in top and "name" not in top and "use" not in base:
        merged.pop("name", None)  # the old choice
    for key, value in top.items():
        old = merged.get(key)
        if value is None and key in merged:
            del merged[key]
        elif value and dict in (type(old), type(value)):
            below = _section(old)
            above = _section(value)
            merged[key] = value if below is None or above is None else merge(below, above)
        else:
            merged[key] = value
    return merged


def _section(value: object) -> JsonMap | None:
    """Returns the section that a value is, or is the short form of, such as `loss: gspo`; None for others."""
    if isinstance(value, str) and (USE_PATTERN.fullmatch(value) or value.isidentifier()):
        return {"name" if value.isidentifier() else "use": value}
    return cast("JsonMap", value) if isinstance(value, dict) else None


def override_pairs(overrides: Mapping[str, Any] | Sequence[str]) -> list[tuple[str, Any]]:
    """Returns the dotted path and the value of each override. Raises: ConfigError if one is malformed."""
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    pairs: list[tuple[str, Any]] = []
    for text in overrides:
        dotted, eq, value = text.partition("=")
        if not eq or not dotted or dotted.count(".") > _MAX_DOTS:
            raise ConfigError(f"override {format_value(text)} is not of the form a.b=value")
        pairs.append((dotted, yaml_value(value, f"override {format_value(text)}: the value")))
    return pairs


def set_dotted(mapping: JsonMap, dotted: str, value: Any) -> None:
    """Sets the value at a dotted path, in place. Creates missing sections along the path."""
    *parents, last = dotted.split(".")
    node: Any = mapping
    for depth, key in enumerate(parents):
        if isinstance(node, list):
            node = _list_item(cast("list[Any]", node), key, dotted)
            continue
        child = node.setdefault(key, {})
        if not isinstance(child, dict | list):
            where = ".".join(parents[: depth + 1])
            tag = "use" if isinstance(child, str) and USE_PATTERN.match(child) else "name"
            raise ConfigError(
                f"override {dotted}: {where} = {child!r} is not a section, so it has no keys; "
                f"if it names a variant, write {where}.{tag}={child}"
            )
        node = cast("Any", child)
    if isinstance(node, list):
        items = cast("list[Any]", node)
        _list_item(items, last, dotted)
        items[int(last)] = value
        return
    merged = merge(node, {last: value})
    node.clear()
    node.update(merged)


def _list_item(items: list[Any], key: str, dotted: str) -> Any:
    if not key.isdigit() or int(key) >= len(items):
        raise ConfigError(f"override {dotted}: {key!r} is not a position in a list of {len(items)}")
    return items[int(key)]

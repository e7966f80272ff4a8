"""The base of all config classes, and how a recipe becomes one: YAML, `extends`, dotted overrides, clear
errors.

A recipe is data, and reading it imports no component. Unknown keys and choices are errors that name the path
and the nearest valid name. Variants are discriminated unions on `name`. A component of the user's own is
written `{use: "module:attr", args: {...}}` (`Use`), and may stand wherever a built-in one may. `load_attr`
loads it in the process that runs it.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

from astraflow.errors import ConfigError
from astraflow.user_input.installed import added_to, load_or_explain, source_of
from astraflow.user_input.mistakes import (
    configs_in,
    distinct,
    dotted_path,
    explained,
    hint,
    inner_type,
    nearest_hint,
    path_of,
    shown,
    tag_of,
)
from astraflow.user_input.own_code import described
from astraflow.user_input.plain_data import SHORT_FLOAT, line_of, problems, yaml_value
from astraflow.user_input.user_files import is_there, line_at, read_file, shown_path

__all__ = [
    "Config",
    "Use",
    "Variant",
    "check_args",
    "dump_yaml",
    "load_attr",
    "load_mapping",
    "overridden",
    "override_pairs",
    "parse_config",
    "place_in",
    "salvaged",
    "with_installed",
]

JsonMap = dict[str, Any]
_ConfigT = TypeVar("_ConfigT", bound="Config")
_USE_PATTERN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_MAX_YAML_BYTES = 2**20
"""Recipes have a few kilobytes."""
_MAX_FILES = 64
"""Files that a recipe extends, directly and indirectly."""
_MAX_DOTS = 32
"""Keys in the path of an override; the longest ones of a recipe have about 8."""
_MAX_SECONDS = 1e9
"""30 years: clocks and timers of the system take no more."""
_MAX_NUMBER = 1e15
_MAX_TEXT = 100_000


class Config(BaseModel):
    """A frozen, strictly validated section of a recipe; unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _is_within_reach(cls, value: Any, info: ValidationInfo) -> Any:
        """Bounds every setting, however a class bounds its own: nothing that runs could use larger ones."""
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise ValueError(f"the text has {len(value)} characters; at most {_MAX_TEXT} are accepted")
        if isinstance(value, int | float):
            most = _MAX_SECONDS if str(info.field_name).endswith("_s") else _MAX_NUMBER
            if abs(value) > most:
                raise ValueError(f"must be within {most:g}")
        return value


class Use(Config):
    """A component of your own. Example: `{use: "my_agents:exact", args: {clip: 0.2}}`."""

    name: Literal["use"] = "use"
    use: str
    """`module:attr`, importable where the component runs."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments, checked against the component's signature."""

    @field_validator("use")
    @classmethod
    def _has_module_and_attr(cls, value: str) -> str:
        if not _USE_PATTERN.fullmatch(value):
            raise ValueError(f'{value!r} is not of the form "module:attr"')
        return value


# --- variants that installed packages add ---------------------------------------------------------


class Variant(Config):
    """Base of a config class that an installed package adds to a choice of the recipe.

    The package names its class as a Python entry point, under the variant's own name:

        [project.entry-points."astraflow.engines"]
        paced = "astraflow_paced.config:PacedEngineConfig"

    | group | choice | base class | `make` returns |
    |---|---|---|---|
    | `astraflow.engines` | `rollout.engine` | `EngineVariant` | a maker of `Engine`s, one per policy |
    | `astraflow.backends` | `train.backend` | `BackendVariant` | a `TrainerBackend` or `Learner` |
    | `astraflow.workflows` | `workflow` | `WorkflowVariant` | a `Workflow` |
    | `astraflow.sources` | `tasks.sources` | `SourceVariant` | a `TaskSource` |
    | `astraflow.rewards` | `tasks.reward` | `RewardVariant` | a `Scorer` |
    | `astraflow.trackers` | `trackers` | `TrackerVariant` | a `Tracker` |
    | `astraflow.launchers` | `launcher` | `LauncherVariant` | a `Launcher` |

    The group `astraflow.cluster` adds sections to `cluster` instead (`recipe/cluster_config.py`).

    The class's module is imported while the choice is defined. So it imports nothing heavy, as `make` may,
    and no module with a choice, such as `trainer.config`. Emulated parts have `time_scale`, the same in a
    whole recipe.
    """

    name: Any
    """A `Literal` in each subclass, and its default: the name of the entry point."""

    def make(self, *given: Any, **named: Any) -> Any:
        """Builds what the choice is about."""
        raise NotImplementedError


def with_installed(choice: Any, group: str) -> Any:
    """The discriminated union of a choice, in which installed variants replace the member without a name.

    That member is `Variant` or a base class that derives from it.

    Only packages that are installed here can add a variant. A recipe may come over the network, so all that
    it can do is to name a variant that is there already.

    Raises: ConfigError if an entry point does not load, or is no variant with the name of the entry point.
    """
    members: list[type[Config]] = []
    for member in get_args(choice):
        members += [member] if tag_of(member) else _installed(group, member)
    tags = [tag_of(member) for member in members]
    if repeated := [tag for tag in tags if tags.count(tag) > 1]:
        raise ConfigError(f"two variants of {group} have the name {repeated[0]!r}; uninstall one's package")
    return Annotated[Union[tuple(members)], Field(discriminator="name")]  # noqa: UP007 - made at run time


def _installed(group: str, base: type[Config]) -> list[type[Config]]:
    variants: list[type[Config]] = []
    for entry in added_to(group):
        variant = load_or_explain(entry)
        if variant is None:
            continue
        if not (isinstance(variant, type) and issubclass(variant, base)) or tag_of(variant) != entry.name:
            raise ConfigError(f"{source_of(entry)} is no {base.__name__} whose `name` is {entry.name!r}")
        variants.append(variant)
    return variants


# --- from files to a mapping ----------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Puts those texts in quotes that `YamlLoader` would read as numbers."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", SHORT_FLOAT, list("-+0123456789"))


def load_mapping(path: Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> JsonMap:
    """The recipe's raw mapping, with `extends` merged in and dotted overrides (`a.b=value`) applied.

    `extends` names a file, or several of which later ones win, relative to the folder of its own file. Each
    `{use: ...}` gets the tag `name: use`, by which the union of variants recognizes it.

    Raises: ConfigError if a file is missing, is not a mapping or extends itself, or an override is malformed.
    """
    mapping = _load_extended(path, (), [])
    for dotted, value in override_pairs(overrides):
        _set_dotted(mapping, dotted, value)
    _extend_policies(mapping)
    return cast("JsonMap", _name_uses(mapping))


def _load_extended(path: Path, seen: tuple[Path, ...], loaded: list[Path]) -> JsonMap:
    path = path.resolve() if is_there(path) else path
    if path in seen:
        raise ConfigError(f"{path} extends itself: {' -> '.join(str(p) for p in (*seen, path))}")
    loaded.append(path)
    if len(loaded) > _MAX_FILES:
        raise ConfigError(f"{loaded[0]} extends more than {_MAX_FILES} files; write what it needs into one")
    mapping = _yaml_mapping(path)
    merged: JsonMap = {}
    for base in _bases(mapping.pop("extends", []), path):
        merged = _merge(merged, _load_extended(path.parent / base, (*seen, path), loaded))
    return _merge(merged, mapping)


def _yaml_mapping(path: Path) -> JsonMap:
    """The sections of one file. Raises: ConfigError, or DataError if it isn't a readable file."""
    if not is_there(path):
        raise ConfigError(
            f"recipe {shown_path(path)} does not exist; pass the path of a YAML file (`astraflow recipes "
            "list` shows those that come with AstraFlow, `astraflow recipes copy NAME` copies one)"
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
    """The files that a recipe extends: one, or several of which later ones win. Raises: ConfigError."""
    given = cast("list[object]", extends) if isinstance(extends, list) else [extends]
    if wrong := [base for base in given if not isinstance(base, str)]:
        raise ConfigError(
            f"{path}: extends = {wrong[0]!r}; expected the path of a recipe, or a list of paths"
        )
    return cast("list[str]", given)


def _merge(base: JsonMap, top: JsonMap) -> JsonMap:
    """Merges `top` into `base`, key by key.

    A section is replaced as a whole if `top` chooses another variant for it, because the keys of the old
    variant do not fit the new one, or if `top` leaves it empty.
    """
    merged = dict(base)
    for key, value in top.items():
        old = merged.get(key)
        if isinstance(old, str) and isinstance(value, dict) and not _names_variant(cast("JsonMap", value)):
            # A variant in short, such as `loss: gspo`.
            old = {"use" if _USE_PATTERN.fullmatch(old) else "name": old}
        merged[key] = value
        if value and isinstance(old, dict) and isinstance(value, dict):
            below = cast("JsonMap", old)
            above = cast("JsonMap", value)
            merged[key] = above if _changes_variant(below, above) else _merge(below, above)
    return merged


def _changes_variant(old: JsonMap, new: JsonMap) -> bool:
    return any(key in new and new[key] != old.get(key) for key in ("name", "use"))


def _names_variant(section: JsonMap) -> bool:
    return "name" in section or "use" in section


def override_pairs(overrides: Mapping[str, Any] | Sequence[str]) -> list[tuple[str, Any]]:
    """The dotted path and the value of each override. Raises: ConfigError if one is malformed."""
    if isinstance(overrides, Mapping):
        return list(overrides.items())
    return [_split_override(text) for text in overrides]


def _split_override(text: str) -> tuple[str, Any]:
    """The dotted path and the value of `a.b=value`."""
    dotted, eq, value = text.partition("=")
    if not eq or not dotted or dotted.count(".") > _MAX_DOTS:
        raise ConfigError(f"override {shown(text)} is not of the form a.b=value")
    return dotted, yaml_value(value, f"override {shown(text)}: the value")


def _set_dotted(mapping: JsonMap, dotted: str, value: Any) -> None:
    """Sets the value at a dotted path in place. Sections that are missing on the way are made."""
    *parents, last = dotted.split(".")
    node: Any = mapping
    for depth, key in enumerate(parents):
        if isinstance(node, list):
            node = _list_item(cast("list[Any]", node), key, dotted)
            continue
        child = node.setdefault(key, {})
        if not isinstance(child, dict | list):
            where = ".".join(parents[: depth + 1])
            tag = "use" if isinstance(child, str) and _USE_PATTERN.match(child) else "name"
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
    # As in `_merge`, another variant replaces the whole section.
    if parents and _changes_variant(node, {last: value}):
        node.clear()
    node.update(_merge(node, {last: value}))


def _list_item(items: list[Any], key: str, dotted: str) -> Any:
    if not key.isdigit() or int(key) >= len(items):
        raise ConfigError(f"override {dotted}: {key!r} is not a position in a list of {len(items)}")
    return items[int(key)]


def _extend_policies(mapping: JsonMap) -> None:
    """Resolves `extends` between the policies of one recipe, in place."""
    policies = mapping.get("policies")
    if not isinstance(policies, dict):
        return
    table = cast("dict[str, Any]", policies)

    def resolve(name: str, seen: tuple[str, ...]) -> Any:
        entry = table[name]
        if not isinstance(entry, dict) or "extends" not in entry:
            return cast("Any", entry)
        own = dict(cast("JsonMap", entry))
        base = str(own.pop("extends"))
        if base not in table:
            raise ConfigError(f"policies.{name}.extends = {base!r} is not a policy{hint(base, list(table))}")
        if base in (*seen, name):
            raise ConfigError(f"policies.{name} extends itself")
        if len(seen) > _MAX_FILES:
            raise ConfigError(f"policies.{name}: more than {_MAX_FILES} policies extend one another")
        return _merge(resolve(base, (*seen, name)), own)

    mapping["policies"] = {name: resolve(name, ()) for name in table}


def _name_uses(node: Any) -> Any:
    """Adds `name: use` to each `{use: ...}`, the tag that discriminates it from the built-in variants."""
    if isinstance(node, list):
        return [_name_uses(item) for item in cast("list[Any]", node)]
    if not isinstance(node, dict):
        return node
    named = {key: _name_uses(value) for key, value in cast("JsonMap", node).items()}
    return {"name": "use", **named} if "use" in named and "name" not in named else named


# --- from a mapping to a config -------------------------------------------------------------------


def parse_config(
    mapping: Mapping[str, Any],
    config_type: type[_ConfigT],
    *,
    where: str = "recipe",
    place: Callable[[Sequence[str | int]], str] = lambda _: "",
) -> _ConfigT:
    """A validated config.

    The mapping is validated as JSON, because strict validation of Python objects would refuse a list for a
    tuple. Nothing else is converted. `place`: where the value at a path stands, for messages (`place_in`).

    Raises: ConfigError with one line per problem: path, value, the nearest valid choice, and its place.
    """

    def told(path: Sequence[str | int], problem: str) -> str:
        found = place(path)
        return f"{problem} ({found})" if found else problem

    wrong = [
        told(path, f"{dotted_path(path)}: {problem}")
        for path, problem in problems(_with_names(mapping, config_type))
    ]
    if wrong:
        raise ConfigError(f"{where}: " + "\n".join(dict.fromkeys(wrong)))
    try:
        return config_type.model_validate_json(json.dumps(_with_names(mapping, config_type)))
    except ValidationError as err:
        errors = cast("list[JsonMap]", err.errors(include_url=False))
        lines = [
            told(path_of(error["loc"], config_type), explained(error, config_type, mapping))
            for error in distinct(errors)
            # Of a list, whose invalid items do not count, this would say that it is empty.
            if error["type"] != "too_short" or not any(_is_below(other, error) for other in errors)
        ]
        raise ConfigError(f"{where}: " + "\n".join(dict.fromkeys(lines))) from err


def salvaged(mapping: Mapping[str, Any], config_type: type[_ConfigT]) -> _ConfigT | None:
    """What is valid of a mapping, with defaults in place of the rest; None if a required key is not valid.

    Rules over several keys do not apply to it. It serves to find further mistakes, and never to run.
    """
    named = _with_names(mapping, config_type)
    values: JsonMap = {}
    for key, field in config_type.model_fields.items():
        if key in named:
            kept = _salvaged_value(named[key], field)
            if kept is not None:
                values[key] = kept
        if key not in values and field.is_required():
            return None
    return config_type.model_construct(**values)


def _salvaged_value(value: Any, field: FieldInfo) -> Any:
    """What is valid of the value of a key; None if nothing is."""
    kind = inner_type(field.annotation)
    try:
        text = json.dumps(value, allow_nan=False)
        whole: Any = Annotated[field.annotation, field]  # pyright: ignore[reportInvalidTypeForm] - at run time
        return TypeAdapter[Any](whole).validate_json(text)
    except (TypeError, ValueError):  # ValidationError is a ValueError
        pass
    if get_origin(kind) is dict and isinstance(value, dict):
        entry = FieldInfo.from_annotation(get_args(kind)[1])
        entries = cast("JsonMap", value).items()
        found = {name: _salvaged_value(item, entry) for name, item in entries}
        return {name: item for name, item in found.items() if item is not None}
    choices = [c for c in configs_in(kind) if issubclass(c, Config)]
    if isinstance(value, dict):
        section = cast("JsonMap", value)
        fitting = [c for c in choices if len(choices) == 1 or tag_of(c) == section.get("name")]
        return salvaged(section, fitting[0]) if len(fitting) == 1 else None
    return None


def _is_below(error: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether an error is about a part of what another one is about."""
    size = len(other["loc"])
    return len(error["loc"]) > size and error["loc"][:size] == other["loc"]


def place_in(path: Path, keys: Sequence[str | int]) -> str:
    """Where the value at a path of keys stands: `line 7`, or `line 7 of FILE` in a file that `path` extends.

    Empty if it stands nowhere, as a value does that an override sets.
    """
    found = [
        (depth, rank, line, file)
        for rank, file in enumerate(_files_of(path.resolve()))
        for line, depth in [line_of(file.read_text(encoding="utf-8"), keys)]
    ]
    depth, _, line, file = max(found)
    if not depth:
        return ""
    return f"line {line}" if file == path.resolve() else f"line {line} of {file}"


def _files_of(path: Path) -> Iterator[Path]:
    """A recipe's file behind those that it extends, in the order in which later ones win."""
    for base in _bases(_yaml_mapping(path).get("extends", []), path):
        yield from _files_of((path.parent / base).resolve())
    yield path


def overridden(
    config: _ConfigT, overrides: Mapping[str, Any] | Sequence[str], *, where: str = "recipe"
) -> _ConfigT:
    """The config with dotted overrides (`a.b=value`) applied.

    Raises: ConfigError, like `parse_config`.
    """
    mapping = cast("JsonMap", json.loads(config.model_dump_json()))
    for dotted, value in override_pairs(overrides):
        _set_dotted(mapping, dotted, value)
    return parse_config(cast("JsonMap", _name_uses(mapping)), type(config), where=where)


def _with_names(mapping: Mapping[str, Any], config_type: type[BaseModel]) -> JsonMap:
    """The mapping, with the `name` of every variant that it leaves out or writes in short.

    `train.backend.device=cuda:0` alone changes a key of the default backend, and `loss: gspo` is short for
    `loss: {name: gspo}`, as `reward: my_rewards:score` is for `reward: {use: my_rewards:score}`.
    """
    named = dict(mapping)
    for key, field in config_type.model_fields.items():
        if key in named:
            named[key] = _with_name(named[key], field.annotation, default=field.default)
    return named


def _with_name(value: Any, annotation: Any, *, default: object = None) -> Any:
    """The same for one value of a type."""
    kind = inner_type(annotation)
    origin = get_origin(kind)
    if origin is dict and isinstance(value, dict):
        entries = cast("JsonMap", value).items()
        return {name: _with_name(entry, get_args(kind)[1]) for name, entry in entries}
    if origin is tuple and isinstance(value, list):
        return [_with_name(item, get_args(kind)[0]) for item in cast("list[Any]", value)]
    choices = configs_in(kind) if origin not in {dict, tuple} else []
    if isinstance(value, str) and _is_choice(kind):
        return _chosen(value, choices)
    if not isinstance(value, dict):
        return value
    section = cast("JsonMap", value)
    if len(choices) > 1 and isinstance(default, Config) and "name" not in section:
        section = {"name": tag_of(type(default)), **section}
    fitting = [c for c in choices if len(choices) == 1 or tag_of(c) == section.get("name")]
    return _with_names(section, fitting[0]) if len(fitting) == 1 else section


def _is_choice(kind: Any) -> bool:
    """Whether a type consists of variants alone."""
    members = get_args(kind) or (kind,)
    variants = [configs_in(member) for member in members]
    return all(len(found) == 1 and tag_of(found[0]) is not None for found in variants)


def _chosen(name: str, choices: Sequence[type[BaseModel]]) -> JsonMap:
    is_own = _USE_PATTERN.fullmatch(name) and any("use" in choice.model_fields for choice in choices)
    return {"name": "use", "use": name} if is_own else {"name": name}


def dump_yaml(config: Config) -> str:
    """The resolved config as YAML, which parses back to an equal object."""
    data = config.model_dump(mode="json")
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


# --- components of the user's own -----------------------------------------------------------------


def load_attr(use: str, *, where: str = "use") -> Any:
    """The object named `module:attr`.

    Raises: ConfigError if the module does not import or lacks the attribute.
    """
    module_name, _, attr = use.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as err:  # code of the user's, which may raise anything
        raise ConfigError(f"{where} = {use!r}: {_import_problem(module_name, err)}") from err
    except SystemExit as err:
        raise ConfigError(
            f"{where} = {use!r}: module {module_name!r} calls exit() when it is imported; keep what only a "
            'script shall do under `if __name__ == "__main__":`'
        ) from err
    try:
        return getattr(module, attr)
    except AttributeError as err:
        names = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(f"{where} = {use!r}: no {attr!r} in {module_name}{hint(attr, names)}") from err


def _import_problem(module: str, err: Exception) -> str:
    """Why a module of the user's cannot be imported: it is not found, or its own code fails."""
    is_missing = isinstance(err, ModuleNotFoundError) and f"{module}.".startswith(f"{err.name}.")
    if not is_missing:
        return f"module {module!r} does not import here: {described(err)}"
    names = [file.stem for folder in _own_folders() for file in folder.glob("*.py")]
    return (
        f"module {module!r} does not import here: no such module is installed, nor in the current folder or "
        f"the recipe's{nearest_hint(module, names)}"
    )


def _own_folders() -> list[Path]:
    """Folders in which modules of the user's own are found: not those of Python and installed packages."""
    folders = [Path(entry).resolve() for entry in sys.path if entry]
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    return [folder for folder in folders if not any(map(folder.is_relative_to, installed))]


def check_args(target: Callable[..., Any], args: Mapping[str, Any], *, where: str) -> None:
    """Checks that `args` are keyword arguments of `target`.

    Raises: ConfigError naming the unknown argument and the nearest one.
    """
    parameters = inspect.signature(target).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    allowed = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for name in args:
        if name not in allowed:
            raise ConfigError(f"{where}.{name} is not an argument{hint(name, allowed)}")

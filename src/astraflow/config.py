"""The base of all config classes, and how a mapping becomes one, with clear errors.

A recipe is data, and reading it imports no component. Unknown keys and choices are errors that name the path
and the nearest valid name. Variants are discriminated unions on `name`. The user's own component is written
`{use: "module:attr", args: {...}}` (`Use`), and is allowed wherever a built-in one is. `load_attr` loads it
in the process that runs it.
"""

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, cast, get_args, get_origin

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

from astraflow.errors import ConfigError
from astraflow.user_input.installed import find_entries, load_entry, source_of
from astraflow.user_input.mistakes import (
    configs_in,
    distinct,
    dotted_path,
    explain_error,
    hint,
    inner_type,
    nearest_hint,
    path_of,
    tag_of,
)
from astraflow.user_input.own_code import describe_error
from astraflow.user_input.plain_data import SHORT_FLOAT, problems
from astraflow.user_input.yaml_files import USE_PATTERN, JsonMap, override_pairs, set_dotted

__all__ = [
    "Argument",
    "Config",
    "Name",
    "Use",
    "Variable",
    "Variant",
    "Word",
    "apply_overrides",
    "check_args",
    "dump_yaml",
    "load_attr",
    "load_component",
    "parse_config",
    "salvage",
    "text_form",
    "with_installed",
]

_ConfigT = TypeVar("_ConfigT", bound="Config")
_MAX_SECONDS = 1e9
"""30 years; the system's clocks and timers take no more."""
_MAX_NUMBER = 1e15
_MAX_TEXT = 100_000


def text_form(pattern: str, expected: str) -> AfterValidator:
    """Returns a validator for texts that fully match a pattern; `expected` describes such texts."""
    form = re.compile(pattern)

    def checked(value: str) -> str:
        if form.fullmatch(value) is None:
            raise ValueError(f"expected {expected}")
        return value

    return AfterValidator(checked)


Name = Annotated[
    str,
    text_form(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        "a name of 1 to 64 letters, digits, `.`, `_` and `-`, which begins with a letter or digit",
    ),
]
"""A name that a recipe gives to one of its parts. File names, metrics and commands contain it."""
Word = Annotated[
    str, text_form(r"[^\s\x00-\x1f\x7f-\x9f]{0,1000}", "a text without spaces and hidden characters")
]
"""A value without spaces or hidden characters, such as a host; empty where that has a meaning."""
Argument = Annotated[
    str, text_form(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{0,4096}", "one line without hidden characters")
]
"""An argument of a program, or the path of one."""
Variable = Annotated[
    str,
    text_form(
        r"[A-Za-z_][A-Za-z0-9_]{0,199}", "the name of an environment variable: letters, digits and `_`"
    ),
]
"""The name of an environment variable."""


class Config(BaseModel):
    """A frozen, strictly validated section of a recipe. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
    ordered_bounds: ClassVar[tuple[str, str] | None] = None
    """A lower and an upper bound among the fields; the first must not exceed the second."""

    @field_validator("*")
    @classmethod
    def _is_within_reach(cls, value: Any, info: ValidationInfo) -> Any:
        """Bounds every setting, whatever its class allows: no component could use a larger value."""
        if isinstance(value, str) and len(value) > _MAX_TEXT:
            raise ValueError(f"the text has {len(value)} characters; at most {_MAX_TEXT} are accepted")
        if isinstance(value, int | float):
            most = _MAX_SECONDS if str(info.field_name).endswith("_s") else _MAX_NUMBER
            if abs(value) > most:
                raise ValueError(f"must be within {most:g}")
        return value

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.ordered_bounds:
            low, high = (getattr(self, name) for name in self.ordered_bounds)
            if low > high:
                raise ValueError(
                    f"{self.ordered_bounds[0]} ({low:g}) must not exceed {self.ordered_bounds[1]} ({high:g})"
                )
        return self


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
        if not USE_PATTERN.fullmatch(value):
            raise ValueError(f'{value!r} is not of the form "module:attr"')
        return value


class Variant(Config):
    """Base of a config class that an installed package adds to a choice of the recipe.

    The package names its class as a Python entry point, under the variant's own name:

        [project.entry-points."astraflow.engines"]
        paced = "astraflow_paced.config:PacedEngineConfig"

    | group | choice | base class | `make` returns |
    |---|---|---|---|
    | `astraflow.engines` | `rollout.engine` | `EngineVariant` | a maker of `Engine`s, one per policy |
    | `astraflow.losses` | `train.loss` | `LossVariant` | a function of `LossInputs` |
    | `astraflow.backends` | `train.backend` | `BackendVariant` | a `TrainerBackend` or `Learner` |
    | `astraflow.workflows` | `workflow` | `WorkflowVariant` | a `Workflow` |
    | `astraflow.sources` | `tasks.sources` | `SourceVariant` | a `TaskSource` |
    | `astraflow.rewards` | `tasks.reward` | `RewardVariant` | a `Scorer` |
    | `astraflow.trackers` | `trackers` | `TrackerVariant` | a `Tracker` |
    | `astraflow.launchers` | `launcher` | `LauncherVariant` | a `Launcher` |

    The class's module is imported while the choice is being defined. It must not import anything heavy, which
    `make` may do, or a module with a choice, such as `trainer.config`. Emulated parts have a key
    `time_scale`, which must be the same in the whole recipe.
    """

    name: Any
    """The name of the entry point. Each subclass makes it a `Literal` with that default."""

    def make(self, *given: Any, **named: Any) -> Any:
        """Builds the component that the config describes."""
        raise NotImplementedError


def with_installed(choice: Any, group: str) -> Any:
    """Returns the discriminated union of a choice, in which installed variants replace the unnamed member.

    That member is `Variant`, or a base class that derives from it.

    Only packages that are installed here can add a variant. A recipe may come over the network, so it can
    only name a variant that is installed already.

    Raises: ConfigError if an entry point does not load, or is not a variant with the name of the entry point.
    """
    members: list[type[Config]] = []
    for member in get_args(choice):
        members += [member] if tag_of(member) else _load_variants(group, member)
    tags = [tag_of(member) for member in members]
    if repeated := [tag for tag in tags if tags.count(tag) > 1]:
        raise ConfigError(f"two variants of {group} have the name {repeated[0]!r}; uninstall one's package")
    return Annotated[Union[tuple(members)], Field(discriminator="name")]  # noqa: UP007 - made at run time


def _load_variants(group: str, base: type[Config]) -> list[type[Config]]:
    variants: list[type[Config]] = []
    for entry in find_entries(group):
        variant = load_entry(entry)
        if variant is None:
            continue
        if not (isinstance(variant, type) and issubclass(variant, base)) or tag_of(variant) != entry.name:
            raise ConfigError(f"{source_of(entry)} is not a {base.__name__} whose `name` is {entry.name!r}")
        variants.append(variant)
    return variants


def parse_config(
    mapping: Mapping[str, Any],
    config_type: type[_ConfigT],
    *,
    where: str = "recipe",
    place: Callable[[Sequence[str | int]], str] = lambda _: "",
    short_keys: Sequence[str] = (),
) -> _ConfigT:
    """Validates a mapping and returns the config.

    The mapping is validated as JSON, because strict validation of Python objects would refuse a list for a
    tuple. Nothing else is converted. `place` returns where the value at a path is set, for messages
    (`place_in`). `short_keys` are keys of the file that the mapping has in full form.

    Raises: ConfigError with one line per problem: path, value, the nearest valid choice, and its place.
    """

    def with_place(path: Sequence[str | int], problem: str) -> str:
        line = place(path)
        return f"{problem} ({line})" if line else problem

    wrong = [
        with_place(path, f"{dotted_path(path)}: {problem}")
        for path, problem in problems(_with_names(mapping, config_type))
    ]
    if wrong:
        raise _wrong(where, wrong)
    try:
        return config_type.model_validate_json(json.dumps(_with_names(mapping, config_type)))
    except ValidationError as err:
        errors = cast("list[JsonMap]", err.errors(include_url=False))
        lines = [
            with_place(
                path_of(error["loc"], config_type), explain_error(error, config_type, mapping, short_keys)
            )
            for error in distinct(errors)
            # Invalid items don't count, so a list with only such items would also be reported as empty.
            if error["type"] != "too_short" or not any(_is_below(other, error) for other in errors)
        ]
        raise _wrong(where, lines) from err


def _wrong(where: str, lines: Iterable[str]) -> ConfigError:
    mistakes = list(dict.fromkeys(lines))
    return ConfigError(f"{where}: " + "\n".join(mistakes), mistakes=mistakes)


def salvage(mapping: Mapping[str, Any], config_type: type[_ConfigT]) -> _ConfigT | None:
    """Returns the valid part of a mapping, with defaults for the rest; None if a required key is not valid.

    Rules about several keys are not checked. The result serves to find further mistakes, and never to run.
    """
    named = _with_names(mapping, config_type)
    values: JsonMap = {}
    for key, field in config_type.model_fields.items():
        if key in named:
            part = _salvage_value(named[key], field)
            if part is not None:
                values[key] = part
        if key not in values and field.is_required():
            return None
    return config_type.model_construct(**values)


def _salvage_value(value: Any, field: FieldInfo) -> Any:
    """Returns the valid part of the value of a key; None if nothing is valid."""
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
        parts = {name: _salvage_value(item, entry) for name, item in entries}
        return {name: item for name, item in parts.items() if item is not None}
    choices = [c for c in configs_in(kind) if issubclass(c, Config)]
    if isinstance(value, dict):
        section = cast("JsonMap", value)
        fitting = [c for c in choices if len(choices) == 1 or tag_of(c) == section.get("name")]
        return salvage(section, fitting[0]) if len(fitting) == 1 else None
    return None


def _is_below(error: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Returns whether an error is about a part of the value that the other error is about."""
    size = len(other["loc"])
    return len(error["loc"]) > size and error["loc"][:size] == other["loc"]


def apply_overrides(
    config: _ConfigT, overrides: Mapping[str, Any] | Sequence[str], *, where: str = "recipe"
) -> _ConfigT:
    """Returns the config with dotted overrides (`a.b=value`) applied.

    Raises: ConfigError, like `parse_config`.
    """
    # Without defaults, which another variant need not have.
    mapping = cast("JsonMap", _without_defaults(config, json.loads(config.model_dump_json())))
    for dotted, value in override_pairs(overrides):
        set_dotted(mapping, dotted, value)
    return parse_config(mapping, type(config), where=where)


def _without_defaults(value: Any, dumped: Any) -> Any:
    """Returns the dump of a value in which variants lack the keys that have their defaults."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        values = {key: getattr(value, key) for key in dumped}
        if tag_of(type(value)):
            values = {
                key: item
                for key, item in values.items()
                if key == "name" or item != fields[key].get_default(call_default_factory=True)
            }
        return {key: _without_defaults(item, dumped[key]) for key, item in values.items()}
    if isinstance(value, dict):
        items = cast("JsonMap", value).items()
        return {key: _without_defaults(item, dumped[key]) for key, item in items}
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        return [_without_defaults(item, other) for item, other in zip(items, dumped, strict=True)]
    return dumped


def _with_names(mapping: Mapping[str, Any], config_type: type[BaseModel]) -> JsonMap:
    """Returns the mapping with the `name` of every variant, where it is left out or written in short form.

    `train.backend.device=cuda:0` alone changes a key of the default backend. `loss: gspo` is short for
    `loss: {name: gspo}`, `reward: my_rewards:score` for `reward: {use: my_rewards:score}`, and `{use: ...}`
    for `{name: use, use: ...}`, as for other variants with a key of their own name.
    """
    named = dict(mapping)
    for key, field in config_type.model_fields.items():
        if key in named:
            named[key] = _with_name(named[key], field.annotation, default=field.default)
    return named


def _with_name(value: Any, annotation: Any, *, default: object = None) -> Any:
    """Does the same as `_with_names` for one value of a type."""
    kind = inner_type(annotation)
    origin = get_origin(kind)
    if origin is dict and isinstance(value, dict):
        entries = cast("JsonMap", value).items()
        return {name: _with_name(entry, get_args(kind)[1]) for name, entry in entries}
    if origin is tuple and isinstance(value, list):
        return [_with_name(item, get_args(kind)[0]) for item in cast("list[Any]", value)]
    choices = configs_in(kind) if origin not in {dict, tuple} else []
    if isinstance(value, str) and _is_choice(kind):
        is_own = USE_PATTERN.fullmatch(value) and any("use" in choice.model_fields for choice in choices)
        return {"name": "use", "use": value} if is_own else {"name": value}
    if not isinstance(value, dict):
        return value
    section = cast("JsonMap", value)
    if "name" not in section:
        tags = ["use"] * (len(choices) > 1) + [t for c in choices if (t := tag_of(c)) in c.model_fields]
        if short := [tag for tag in tags if tag in section]:
            section = {"name": short[0], **section}
        elif len(choices) > 1 and isinstance(default, Config):
            section = {"name": tag_of(type(default)), **section}
    fitting = [c for c in choices if len(choices) == 1 or tag_of(c) == section.get("name")]
    return _with_names(section, fitting[0]) if len(fitting) == 1 else section


def _is_choice(kind: Any) -> bool:
    """Returns whether a type consists only of variants."""
    variants = [configs_in(member) for member in get_args(kind) or (kind,)]
    return all(len(configs) == 1 and tag_of(configs[0]) is not None for configs in variants)


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `YamlLoader` would read as numbers."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", SHORT_FLOAT, list("-+0123456789"))


def dump_yaml(config: Config) -> str:
    """Returns the resolved config as YAML, which parses back to an equal object."""
    data = config.model_dump(mode="json")
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)


def load_attr(use: str, *, where: str = "use") -> Any:
    """Imports and returns the object named `module:attr`.

    Raises: ConfigError if the module does not import or lacks the attribute.
    """
    module_name, _, attr = use.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as err:  # the user's code may raise anything
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
    """Returns why the user's module cannot be imported: it is not found, or its own code fails."""
    is_missing = isinstance(err, ModuleNotFoundError) and f"{module}.".startswith(f"{err.name}.")
    if not is_missing:
        return f"module {module!r} does not import here: {describe_error(err)}"
    names = [file.stem for folder in _own_folders() for file in folder.glob("*.py")]
    return (
        f"module {module!r} does not import here: no such module is installed, nor in the current folder or "
        f"the recipe's{nearest_hint(module, names)}"
    )


def _own_folders() -> list[Path]:
    """Returns the folders in which the user's own modules are found: those in `sys.path`, except the folders
    of Python and of installed packages."""
    folders = [Path(entry).resolve() for entry in sys.path if entry]
    installed = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    return [folder for folder in folders if not any(map(folder.is_relative_to, installed))]


def load_component(use: Use, *, where: str, **given: object) -> Callable[..., Any]:
    """Loads a component of the user's own, which takes its `args` and the `given` arguments.

    Raises: ConfigError if it does not import, cannot be called, or does not take the arguments.
    """
    target = load_attr(use.use, where=f"{where}.use")
    if not callable(target):
        raise ConfigError(
            f"{where}.use = {use.use!r} has the type {type(target).__name__}, which cannot be called; name a "
            "function or a class"
        )
    check_args(target, {**use.args, **given}, where=f"{where}.args")
    return target


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

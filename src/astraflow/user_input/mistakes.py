"""Explains what is wrong with a mapping that should be a config: path, value, and what was probably meant.

For an unknown key, the explanation is the first of these that applies:

1. a key of another variant of the section
2. a key of the same section with nearly the same letters
3. another system's name for a setting (`synonyms.yaml`)
4. the same key in another section
5. a key that looks somewhat similar

Messages write a key in the short form, such as `train.lr`, if the user wrote that (`as_written`). This module
reads config classes and changes no value.
"""

import difflib
import os
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import yaml
from pydantic import BaseModel

from astraflow.user_input.installed import where_to_find

__all__ = [
    "as_written",
    "configs_in",
    "distinct",
    "dotted_path",
    "explain_error",
    "format_value",
    "hint",
    "inner_type",
    "near_path",
    "nearest_hint",
    "path_of",
    "problem_of",
    "spelling",
    "synonyms",
    "tag_of",
]

ConfigType = type[BaseModel]
_SURE = 0.8
"""Similarity from which one name is taken for a typo of the other."""
_MAX_PLACES = 3
"""A key that occurs in more sections than this is not suggested."""
_MAX_FILES = 1000
"""Largest number of files in a folder that are compared with a missing one."""
_MARK = re.compile(r"(literal|tuple|list|dict)\[|constrained-|function-")
"""Matches the beginning of pydantic's names for the members of a union."""
_MAX_LEAVES = 4
"""Largest number of settings in an unknown section that are explained."""
_MAX_SHOWN = 80
"""Characters of a value that a message shows."""

_spell: ContextVar[Callable[[str], str]] = ContextVar("spell", default=str)


def as_written(key: str) -> str:
    """Returns a key of a recipe, given in full, as the user wrote it. Use it for every key in a message."""
    return _spell.get()(key)


@contextmanager
def spelling(spell: Callable[[str], str]) -> Generator[None]:
    """Makes `as_written` call `spell` inside the block."""
    token = _spell.set(spell)
    try:
        yield
    finally:
        _spell.reset(token)


def distinct(errors: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns one of pydantic's errors for each mistake.

    For a key that takes either a word or a number, pydantic reports two errors. This function keeps the error
    about the number, with the expected word as its `or_word`.
    """
    plain: list[Mapping[str, Any]] = [
        {**error, "loc": tuple(p for p in error["loc"] if not (isinstance(p, str) and _MARK.match(p)))}
        for error in errors
    ]
    words: dict[Any, str] = {e["loc"]: e["ctx"]["expected"] for e in plain if e["type"] == "literal_error"}
    others = {error["loc"] for error in plain if error["type"] != "literal_error"}
    return [
        {**error, "or_word": "" if error["type"] == "literal_error" else words.get(error["loc"], "")}
        for error in plain
        if error["type"] != "literal_error" or error["loc"] not in others
    ]


def explain_error(
    error: Mapping[str, Any], config_type: ConfigType, mapping: Mapping[str, Any], short_keys: Sequence[str]
) -> str:
    """Returns one line for one of the `distinct` errors: the path, the value, and what was expected.

    `short_keys` may be at the top of what the user wrote, though the config has no such keys.
    """
    line = _explain_one(error, config_type, mapping, short_keys)
    return f"{line}, or {error['or_word']}" if error["or_word"] else line


def _explain_one(
    error: Mapping[str, Any], config_type: ConfigType, mapping: Mapping[str, Any], short_keys: Sequence[str]
) -> str:
    loc = tuple(error["loc"])
    path = dotted_path(path_of(loc, config_type))
    kind = str(error["type"])
    given = error["input"]
    if loc[-1:] == ("[key]",):
        names = dotted_path(path_of(loc[:-2], config_type))
        return f"{names}: the name {format_value(given)}: {problem_of(error)}"
    ctx = error.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(loc, given, config_type, mapping, short_keys if len(loc) == 1 else ())
    if kind == "union_tag_invalid":
        return _unknown_variant(path, str(ctx["tag"]), loc, config_type)
    if kind == "missing":
        return f"{path} is required and missing{_other_entry(loc, config_type, mapping)}"
    if kind == "literal_error":
        near = nearest_hint(str(given), _literals_at(loc, config_type))
        return f"{path} = {format_value(given)} is not valid; expected {ctx['expected']}{near}"
    if expected := _describe_expected(kind, given, loc, config_type):
        other = _other_entry(loc, config_type, mapping)
        return f"{path} {'is empty' if given is None else f'= {format_value(given)}'}: {expected}{other}"
    message = problem_of(error)
    if isinstance(given, dict | list):  # a rule about a whole section, whose message names the keys
        return f"{path}: {message}" if path else message
    return f"{path} = {format_value(given)}: {message}"


def problem_of(error: Mapping[str, Any]) -> str:
    """Returns what one of pydantic's errors says: our own text if a validator of ours raised it."""
    own: object = error.get("ctx", {}).get("error")
    return str(own if isinstance(own, ValueError) else error["msg"])


def hint(given: str, choices: Sequence[str]) -> str:
    """Returns the choices, after a suggestion of the nearest one if there is one."""
    listed = ", ".join(sorted(choices)) or "none"
    return f"{nearest_hint(given, choices)} (choices: {listed})"


def nearest_hint(given: str, choices: Iterable[str]) -> str:
    """Returns `; did you mean "x"?` with the nearest choice; empty if none is near."""
    near = _nearest(given, choices)
    return f'; did you mean "{near}"?' if near else ""


def near_path(path: Path) -> str:
    """Returns `; did you mean "data/train.csv"?` with the nearest name in the folder of a missing path.

    If that folder is missing, too, the text names the topmost folder that is missing.
    """
    folder = path.parent
    try:
        if not folder.is_dir():
            missing = next(above for above in (folder, *folder.parents) if above.parent.is_dir())
            return f"; there is no folder {str(missing)!r}{near_path(missing)}"
        names = [entry.name for entry in islice(os.scandir(folder), _MAX_FILES)]
    except (OSError, ValueError):  # ValueError: a null byte in the path
        return ""
    near = _nearest(path.name, names)
    return f'; did you mean "{folder / near}"?' if near else ""


def _nearest(given: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Returns the choice that is most similar to `given`, ignoring case; empty if none is similar.

    `cutoff` is the similarity, from 0 to 1, from which two names count as similar.
    """
    lowered = {choice.lower(): choice for choice in choices}
    wanted = given.lower()
    # A choice with the same letters in another order (`gpro` for `grpo`) is the best guess.
    swapped = [choice for choice in lowered if sorted(choice) == sorted(wanted)]
    near = swapped or difflib.get_close_matches(wanted, lowered, n=1, cutoff=cutoff)
    return lowered[near[0]] if near else ""


def format_value(given: object) -> str:
    """Returns the value as Python writes it, truncated if it is long."""
    text = repr(given[:_MAX_SHOWN] if isinstance(given, str) else given)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def _describe_expected(kind: str, given: object, loc: tuple[Any, ...], config_type: ConfigType) -> str:
    """Returns what was expected instead of a value of the wrong kind; empty if pydantic's message says it."""
    _, configs = _walk(loc, config_type)
    tags = [str(tag) for config in configs if (tag := tag_of(config)) is not None]
    if tags and kind in {"union_tag_not_found", "model_attributes_type", "dict_type"}:
        names = ", ".join(tag for tag in tags if tag != "use")
        return f"expected a section with a `name` (choices: {names}) or a `use` (module:attr)"
    if kind in {"model_type", "model_class_type"}:
        keys = ", ".join(sorted({name for config in configs for name in config.model_fields}))
        return f"expected a section (keys: {keys})"
    if kind == "dict_type":
        return "expected a mapping of names"
    if kind in {"tuple_type", "list_type"} and given is not None:
        return f"expected a list; write [{given if isinstance(given, str) else '...'}]"
    if kind == "string_type" and isinstance(given, int | float):
        return f'expected a text; put it in quotes: "{given}"'
    if kind in {"int_type", "int_from_float"} and isinstance(given, float) and given.is_integer():
        return f"expected a whole number; write {int(given)}"
    return ""


def _unknown_variant(path: str, tag: str, loc: tuple[Any, ...], config_type: ConfigType) -> str:
    if place := where_to_find(tag):
        return f'{path}.name = "{tag}" {place}'
    choices = [str(name) for config in _walk(loc, config_type)[1] if (name := tag_of(config)) is not None]
    thing = next((part for part in reversed(loc) if isinstance(part, str)), "name")
    thing = thing.removesuffix("s") if loc and loc[-1] != thing else thing  # an item of `filters`
    article = "an" if thing[:1] in "aeiou" else "a"
    return f'{path}.name = "{tag}" is not {article} {thing}{hint(tag, choices)}'


def _literals_at(loc: tuple[Any, ...], config_type: ConfigType) -> list[str]:
    """Returns the words that a key may have as its value."""
    configs = _walk(loc[:-1], config_type)[1]
    fields = [config.model_fields[loc[-1]] for config in configs if loc[-1] in config.model_fields]
    return [str(word) for field in fields for word in _words_of(field.annotation)]


def _words_of(annotation: Any) -> Iterator[object]:
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _words_of(part)


def _other_entry(loc: tuple[Any, ...], config_type: ConfigType, mapping: Mapping[str, Any]) -> str:
    """Returns a hint at the entry that was probably meant, if a misspelled name has started a new entry.

    Example: `policies.actr.train.lr=1e-5` starts a policy `actr`, which then lacks its model.
    """
    node: Any = mapping
    names: list[str] = []
    for part in _walk(loc, config_type)[0]:
        if not isinstance(node, Mapping):
            return ""
        entries = cast("Mapping[str, Any]", node)
        others = [name for name in entries if name != part]
        if _is_open(tuple(names), config_type) and (near := _nearest(str(part), others)):
            return f'; {".".join([*names, str(part)])} is a new entry: did you mean "{near}"?'
        names.append(str(part))
        node = entries.get(str(part))
    return ""


def _is_open(names: tuple[str, ...], config_type: ConfigType) -> bool:
    """Returns whether the keys at this path are names that the user chooses."""
    annotation: Any = config_type
    for name in names:
        annotation = inner_type(annotation)
        if get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
            continue
        fields = [
            config.model_fields[name] for config in configs_in(annotation) if name in config.model_fields
        ]
        if not fields:
            return False
        annotation = fields[0].annotation
    return get_origin(inner_type(annotation)) is dict


@dataclass(frozen=True, slots=True)
class _Place:
    """A key of a config: the path of its section, in which `*` stands for a name, and the key."""

    section: tuple[str, ...]
    key: str
    variant: str
    """The variant of the section that has the key; empty if the section has no variants."""

    def dotted(self, policy: str) -> str:
        name = policy if self.section[:1] == ("policies",) else "NAME"
        parts = [name if part == "*" else part for part in self.section]
        return as_written(".".join([*parts, self.key]))


def _unknown_key(
    loc: tuple[Any, ...],
    given: object,
    config_type: ConfigType,
    mapping: Mapping[str, Any],
    short_keys: Sequence[str],
) -> str:
    parts, configs = _walk(loc[:-1], config_type)
    key = str(loc[-1])
    path = dotted_path((*parts, key))
    choices = sorted({name for config in configs for name in config.model_fields})
    section = _pattern(parts, config_type)
    if owners := _owners(key, section, config_type):
        return (
            f"{path} is not a key; it is one of {', '.join(owners)}, but not of {tag_of(configs[0])}: remove "
            f"{key} = {format_value(given)}, or set {key} to null to drop the value of another file"
        )
    near = _nearest(key, choices, cutoff=_SURE)
    if near:
        return f"{path} is not a key{hint(key, choices)}"
    policy = _policy(parts, mapping)
    if isinstance(given, dict) and (leaves := _leaves(cast("Mapping[str, Any]", given))):
        meanings = [(leaf, _meant(leaf[-1], section, config_type, policy)) for leaf in leaves]
        lines = [
            f"\n  {path}.{'.'.join(leaf)}: {meaning.removeprefix('; ')}"
            for leaf, meaning in meanings
            if meaning
        ]
        if lines:
            return f"{path} is not a key (choices: {', '.join(choices)})" + "".join(lines[:_MAX_LEAVES])
    if meaning := _meant(key, section, config_type, policy):
        return f"{path} is not a key{meaning}"
    similar = nearest_hint(key, (*choices, *(short for short in short_keys if short != key)))
    return f"{path} is not a key{similar} (choices: {', '.join(choices) or 'none'})"


def _owners(key: str, section: tuple[str, ...], config_type: ConfigType) -> list[str]:
    places = (place for place in _places(config_type) if (place.section, place.key) == (section, key))
    return sorted({place.variant for place in places if place.variant})


def _meant(key: str, section: tuple[str, ...], config_type: ConfigType, policy: str) -> str:
    """Returns a hint at what an unknown key of a section probably means; empty if nothing is likely."""
    places = [place for place in _places(config_type) if place.key == key]
    below = [place for place in places if place.section[: len(section)] == section]
    if meaning := _translate(key, section, config_type, policy):
        return meaning
    dotted = list(dict.fromkeys(place.dotted(policy) for place in below or places))
    if 0 < len(dotted) <= _MAX_PLACES:
        return f"; did you mean {' or '.join(dotted)}?"
    return ""


def _translate(key: str, section: tuple[str, ...], config_type: ConfigType, policy: str) -> str:
    """Returns a hint at AstraFlow's key for another system's name of a setting, if the config has the key."""
    known = synonyms()
    near = key.lower() if key.lower() in known else _nearest(key, known, cutoff=0.88)
    if not near:
        return ""
    target, note = known[near]
    *parts, last = target.split(".")
    if not any(place.section == tuple(parts) and place.key == last for place in _places(config_type)):
        return ""
    name = f'"{last}"' if tuple(parts) == section else as_written(target.replace("*", policy))
    return f"; did you mean {name}?" + (f" ({note})" if note else "")


@cache
def synonyms() -> dict[str, tuple[str, str]]:
    """Returns, for each name of another system, AstraFlow's dotted key and a note on the difference."""
    text = Path(__file__).with_name("synonyms.yaml").read_text(encoding="utf-8")
    entries = yaml.safe_load(text)
    return {name: (entry["key"], entry.get("note", "")) for entry in entries for name in entry["names"]}


def _leaves(given: Mapping[str, Any]) -> list[tuple[str, ...]]:
    paths: list[tuple[str, ...]] = []
    for key, value in given.items():
        inner = _leaves(cast("Mapping[str, Any]", value)) if isinstance(value, dict) and value else [()]
        paths += [(key, *rest) for rest in inner]
    return paths


def _policy(parts: Sequence[Any], mapping: Mapping[str, Any]) -> str:
    """Returns the name to insert for `*`: the current policy, or the only one; else `NAME`."""
    if len(parts) > 1 and parts[0] == "policies":
        return str(parts[1])
    policies = mapping.get("policies")
    names = list(cast("Mapping[str, Any]", policies)) if isinstance(policies, dict) else []
    return names[0] if len(names) == 1 else "NAME"


def _pattern(parts: Sequence[Any], config_type: ConfigType) -> tuple[str, ...]:
    """Returns the path with `*` in place of names that the user chooses, and without positions in lists."""
    names = tuple(str(part) for part in parts)
    keys = [(i, part) for i, part in enumerate(parts) if isinstance(part, str)]
    return tuple("*" if _is_open(names[:i], config_type) else part for i, part in keys)


@cache
def _places(config_type: ConfigType) -> tuple[_Place, ...]:
    """Returns all keys of a config, at any depth."""
    return tuple(_places_below(config_type, (), (config_type,)))


def _places_below(
    config: ConfigType, section: tuple[str, ...], above: tuple[ConfigType, ...]
) -> Iterator[_Place]:
    tag = tag_of(config)
    for key, field in config.model_fields.items():
        yield _Place(section, key, str(tag) if tag else "")
        star = ("*",) if get_origin(inner_type(field.annotation)) is dict else ()
        for inner in configs_in(field.annotation):
            if inner not in above:
                yield from _places_below(inner, (*section, key, *star), (*above, inner))


def path_of(loc: Sequence[str | int], config_type: ConfigType) -> tuple[str | int, ...]:
    """Returns the path as the user wrote it, without the tags of variants and marks of keys that pydantic
    adds."""
    return tuple(part for part in _walk(tuple(loc), config_type)[0] if part != "[key]")


def dotted_path(path: Sequence[str | int]) -> str:
    """Returns the path for a message. Long parts are truncated, and hidden characters are written out."""
    texts = [str(part) for part in path]
    clean = (text if text.isprintable() and len(text) <= _MAX_SHOWN else format_value(text) for text in texts)
    return as_written(".".join(clean))


def _walk(loc: tuple[Any, ...], config_type: ConfigType) -> tuple[list[Any], list[ConfigType]]:
    """Returns the keys and positions of a pydantic location, and the config classes at its end."""
    parts: list[Any] = []
    current: list[ConfigType] = [config_type]
    for part in loc:
        tagged = [c for c in current if tag_of(c) == part] if len(current) > 1 else []
        if tagged:
            current = tagged
            continue
        parts.append(part)
        fields = [c.model_fields[part] for c in current if isinstance(part, str) and part in c.model_fields]
        if fields:
            current = [c for f in fields for c in configs_in(f.annotation)]
    return parts, current


def tag_of(config: ConfigType) -> Any:
    """Returns the name of a variant; None for other config classes."""
    field = config.model_fields.get("name")
    return field.default if field is not None and get_origin(field.annotation) is Literal else None


def inner_type(annotation: Any) -> Any:
    """Returns the annotation without `Annotated`."""
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def configs_in(annotation: Any) -> list[ConfigType]:
    """Returns all config classes inside an annotation (unions, tuples, mappings, `Annotated`)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [c for arg in get_args(annotation) for c in configs_in(arg)]

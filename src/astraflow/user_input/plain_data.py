"""Reads users' plain data (texts, numbers, lists, mappings) from YAML, checks it, and finds its lines.

A YAML text may be nested very deeply, or its aliases may expand to an enormous size. This module limits the
depth of its recursion, and expands nothing before it knows that the size is small.
"""

import datetime
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import yaml

from astraflow.errors import ConfigError

__all__ = ["SHORT_FLOAT", "YamlLoader", "line_of", "problems", "yaml_value"]

SHORT_FLOAT = re.compile(r"^[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")
"""Numbers like `1e-4`. YAML 1.2 reads them as numbers, but PyYAML implements YAML 1.1 and reads them as
text."""

_MAX_DEPTH = 64
"""Largest depth of nested sections; recipes have about 6."""
_MAX_VALUES = 50_000
"""Largest number of values in a YAML text. The values of an alias count each time it is used: 1 kB can expand
to 10^9 values."""
_MAX_WHOLE = 2**53
"""Largest whole number that every JSON reader represents exactly."""
_MAX_SHOWN = 60
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(slots=True)
class _Extent:
    """The depth of a value, and the number of values in it."""

    num_values: int = 1
    depth: int = 1

    def add(self, inner: "_Extent") -> None:
        self.num_values += inner.num_values
        self.depth = max(self.depth, inner.depth + 1)


class YamlLoader(yaml.SafeLoader):
    """Reads `1e-4` as a number. Refuses too deep nesting, too many values, and duplicate keys.

    Of two equal keys in a section, PyYAML would silently use the later one.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open = [_Extent(0, 0)]
        self._extents: dict[int, _Extent] = {}
        """The extent of each complete node, by the node's id; for aliases."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Composes one value, or returns the value that an alias names. Raises: YAMLError with the line."""
        event = cast("yaml.Event", self.peek_event())
        line = cast("int", event.start_mark.line) + 1
        is_alias = isinstance(event, yaml.AliasEvent)
        extent = _Extent()
        if not is_alias:
            self._open.append(extent)
            if len(self._open) > _MAX_DEPTH:
                raise yaml.YAMLError(f"line {line}: values are nested more than {_MAX_DEPTH} deep")
        node = super().compose_node(parent, index)
        if is_alias:
            if id(node) not in self._extents:
                raise yaml.YAMLError(f"line {line}: *{event.anchor[:_MAX_SHOWN]} is inside itself")
            extent = self._extents[id(node)]
        else:
            self._open.pop()
            self._extents[id(node)] = extent
        self._open[-1].add(extent)
        if len(self._open) + self._open[-1].depth > _MAX_DEPTH:
            raise yaml.YAMLError(f"line {line}: values are nested more than {_MAX_DEPTH} deep")
        if self._open[-1].num_values > _MAX_VALUES:
            raise yaml.YAMLError(f"line {line}: there are more than {_MAX_VALUES} values")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Constructs one value.

        Raises: YAMLError with the line if it is invalid, such as a date that does not exist.
        """
        try:
            return super().construct_object(node, deep)  # pyright: ignore[reportUnknownVariableType] - any value
        except (ValueError, AttributeError, ArithmeticError) as err:
            text = str(node.value)[:_MAX_SHOWN]
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"line {line}: {text!r} is not valid ({err}); put texts in quotes") from err

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """Constructs the mapping of a section. Raises: YAMLError with both lines if a key is repeated."""
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                continue
            line = key.start_mark.line + 1
            if key.value in seen:
                raise yaml.YAMLError(
                    f"the key {key.value[:_MAX_SHOWN]!r} is in line {seen[key.value]} and again in line "
                    f"{line} of the same section; give one of them another name"
                )
            seen[key.value] = line
        return super().construct_mapping(node, deep)


YamlLoader.add_implicit_resolver("tag:yaml.org,2002:float", SHORT_FLOAT, list("-+0123456789"))


def yaml_value(text: str, where: str) -> Any:
    """Parses a YAML text. Raises: ConfigError that begins with `where` and names the line."""
    try:
        return yaml.load(text, YamlLoader)
    except yaml.reader.ReaderError as err:
        line = text.count("\n", 0, err.position) + 1
        raise ConfigError(f"{where} is not valid YAML: line {line}: {err.reason}") from err
    except yaml.YAMLError as err:
        problem = str(err).replace('in "<unicode string>", ', "")
        raise ConfigError(f"{where} is not valid YAML: {problem}") from err


def line_of(text: str, keys: Sequence[str | int]) -> tuple[int, int]:
    """Returns the line of the last key or position of a path that a YAML text has, and how many of the path's
    keys and positions it has."""
    node = cast("yaml.Node | None", yaml.compose(text, YamlLoader))
    line = 0
    for depth, key in enumerate(keys):
        entry = _below(node, key)
        if entry is None:
            return line, depth
        line, node = entry
    return line, len(keys)


def _below(node: yaml.Node | None, key: str | int) -> tuple[int, yaml.Node] | None:
    """Returns the line and the value of a key of a section, or of an item of a list."""
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if name.value == str(key):
                return name.start_mark.line + 1, value
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int) and key < len(node.value):
        item = node.value[key]
        return item.start_mark.line + 1, item
    return None


def problems(value: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yields path and problem of each value that is not plain data, or cannot be passed on as JSON."""
    if len(path) > _MAX_DEPTH:
        yield path, f"it is nested more than {_MAX_DEPTH} deep"
    elif isinstance(value, dict):
        for key, item in cast("dict[object, object]", value).items():
            name = key if isinstance(key, str) else str(key)
            if not isinstance(key, str | int | float) or (isinstance(key, str) and _text_problem(key)):
                yield (
                    (*path, name),
                    "this key is not a text that can be used; write letters and digits",
                )
            else:
                yield from problems(item, (*path, name))
    elif isinstance(value, list | tuple):
        for idx, item in enumerate(cast("Sequence[object]", value)):
            yield from problems(item, (*path, idx))
    elif problem := _problem(value):
        yield path, problem


def _problem(value: object) -> str:
    """Returns the problem with a value that contains no others; empty if there is none."""
    if value is None or isinstance(value, bool):
        return ""
    if isinstance(value, str):
        return _text_problem(value)
    if isinstance(value, int):
        return "" if abs(value) <= _MAX_WHOLE else f"the number is beyond 2^53 ({_MAX_WHOLE})"
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value} is not a number that a setting can have"
    if isinstance(value, datetime.date):
        return f'YAML reads it as a date; put it in quotes: "{value}"'
    return f"it is a {type(value).__name__}; expected a text, a number, a list or a mapping"


def _text_problem(text: str) -> str:
    if "\0" in text:
        return "the text holds a zero byte; leave it out"
    if half := _SURROGATE.search(text):
        return f"the text holds {half[0]!a}, half of a character; write the whole character"
    return ""

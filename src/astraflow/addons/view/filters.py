"""Filters of a run's episodes, which the page, the terminal, and exports share."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from astraflow.errors import ConfigError
from astraflow.user_input.mistakes import hint

__all__ = ["FILTER_NAMES", "EpisodeFilter", "Range", "filter_of"]

_MAX_DIGITS = 18
"""Maximum number of digits, so that SQLite can hold the number."""
_MAX_VALUE = 1000
"""Maximum number of characters in one filter."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, inclusive. Example: `Range.parse("reward", "0.5..1")`."""

    low: float
    high: float

    @staticmethod
    def parse(name: str, text: str) -> "Range":
        """Parses `0.5..1`, `0.5..`, `..1`, or `1`; `name` is for the error. Raises: ConfigError."""
        first, dots, last = text.strip().partition("..")
        try:
            low = float(first) if first else -math.inf
            high = (float(last) if last else math.inf) if dots else low
        except ValueError:
            low = high = math.nan
        if not low <= high or not (first or last):
            raise ConfigError(f"{name} = {text!r} is not a range; write for example 0.5..1, 0.5.., ..1 or 1")
        return Range(low, high)


@dataclass(frozen=True, slots=True)
class EpisodeFilter:
    """What an episode must match. An empty field matches everything."""

    kind: str = ""
    """`train` or `eval`."""
    policy: str = ""
    role: str = ""
    task: str = ""
    """A task's id. A `*` at the end matches all ids with this prefix."""
    group: str = ""
    """Number of a group or, for evaluations, of a round."""
    text: str = ""
    """Words in what was said, or in a failure's message."""
    reward: Range | None = None
    advantage: Range | None = None
    tokens: Range | None = None
    version: Range | None = None
    """Matches if any version in the range sampled tokens of the episode."""
    step: Range | None = None
    """The step that trained on the episode, counted from 1."""
    worker: str = ""
    """A rollout service, by name or id."""
    finish: str = ""
    error: str = ""
    """Class of a failure; `any` for all failed episodes, `none` for all others."""
    fate: str = ""
    """Fate of the group; `live` for episodes without a fate."""


FILTER_NAMES = tuple(field.name for field in fields(EpisodeFilter))
_RANGES = {"reward", "advantage", "tokens", "version", "step"}
_CHOICES: Mapping[str, Sequence[str]] = {
    "kind": ("train", "eval"),
    "finish": ("stop", "length", "abort"),
    "fate": (
        "live",
        "trained",
        "filtered",
        "stale",
        "evicted",
        "failed",
        "unadmitted",
        "unused",
        "cancelled",
    ),
}


def filter_of(values: Mapping[str, str]) -> EpisodeFilter:
    """Makes a filter from texts, ignoring empty ones. Raises: ConfigError, which names the wrong filter."""
    arguments: dict[str, str | Range] = {}
    for name, text in values.items():
        if name not in FILTER_NAMES:
            raise ConfigError(f"{name!r} is not a filter of episodes{hint(name, FILTER_NAMES)}")
        if not text:
            continue
        if len(text) > _MAX_VALUE:
            raise ConfigError(f"{name}: {len(text)} characters are too many; at most {_MAX_VALUE}")
        choices = _CHOICES.get(name)
        if choices is not None and text not in choices:
            raise ConfigError(f"{name} = {text!r} is none of {', '.join(choices)}{hint(text, choices)}")
        if name == "group" and not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
            raise ConfigError(f"group = {text!r} is not the number of a group")
        arguments[name] = Range.parse(name, text) if name in _RANGES else text
    return EpisodeFilter(**arguments)  # pyright: ignore[reportArgumentType] # ranges where ranges belong

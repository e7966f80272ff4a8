"""What of a run's episodes somebody wants to see: the same filters for the page, the terminal and exports."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from astraflow.errors import ConfigError
from astraflow.user_input.mistakes import hint

__all__ = ["FILTER_NAMES", "EpisodeFilter", "Range", "filter_of"]

_MAX_DIGITS = 18
"""Of a number that SQLite can hold."""
_MAX_VALUE = 1000
"""Characters of one filter."""


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, inclusive. Example: `Range.parse("0.5..1")`."""

    low: float
    high: float

    @staticmethod
    def parse(name: str, text: str) -> "Range":
        """`0.5..1`, `0.5..`, `..1` or `1`. Raises: ConfigError."""
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
    """An empty field lets everything pass."""

    kind: str = ""
    """`train` or `eval`."""
    policy: str = ""
    role: str = ""
    task: str = ""
    """A task's id; with a `*` at its end, all ids that begin so."""
    group: str = ""
    """Number of a group (or, of evaluations, of a round)."""
    text: str = ""
    """Words of the messages that were kept, or of a failure's message."""
    reward: Range | None = None
    advantage: Range | None = None
    tokens: Range | None = None
    version: Range | None = None
    """Any version that sampled tokens of the episode."""
    step: Range | None = None
    """The step that trained on it, as people count."""
    worker: str = ""
    """A rollout service: its name, or its id."""
    finish: str = ""
    error: str = ""
    """Class of a failure; `any` for all that failed, `none` for all others."""
    fate: str = ""
    """`live` for those without a fate."""


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
    """The filter that these texts say; empty ones are passed over. Raises: ConfigError naming a wrong one."""
    found: dict[str, str | Range] = {}
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
        found[name] = Range.parse(name, text) if name in _RANGES else text
    return EpisodeFilter(**found)  # pyright: ignore[reportArgumentType] # ranges where ranges belong

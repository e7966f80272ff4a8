"""A trainer's memory need before its first step, by part, and which settings reduce it.

The parts that last for the whole run (weights, gradients, optimizer) are exact. If they alone do not fit, the
trainer does not start. If only the pass does not fit, a warning is logged.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from astraflow.errors import ConfigError

__all__ = ["MemoryNeed", "check_memory"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Bytes needed on the trainer's device, by purpose.

    Example: `memory_need(model, config).lasting` -> `{"weights": 6.9e9, "gradients": 6.9e9, ...}`.
    """

    lasting: Mapping[str, float]
    """For the whole run."""
    passing: Mapping[str, float]
    """During a pass, or while a version is exported."""
    savings: Mapping[str, float]
    """Bytes that a change of a setting would save."""

    @property
    def total(self) -> float:
        """The sum of all parts, except that an export and a pass are never at the same time."""
        export = self.passing.get("export", 0.0)
        return sum(self.lasting.values()) + max(export, sum(self.passing.values()) - export)

    def text(self) -> str:
        """The parts, largest first, and the two settings that save most."""
        parts = sorted({**self.lasting, **self.passing}.items(), key=lambda part: -part[1])
        named = ", ".join(f"{name} {_gb(size)}" for name, size in parts if size >= 0.01 * self.total)
        best = sorted(self.savings.items(), key=lambda saving: -saving[1])[:2]
        advice = " or ".join(f"{setting} (saves {_gb(size)})" for setting, size in best)
        return f"{named}; to save most, set {advice}"


def check_memory(need: MemoryNeed, free: float) -> None:
    """Compares a need with the bytes that were free before the model was loaded.

    Raises: ConfigError if the run cannot fit. Warns if a microbatch as large as the budget may not.
    """
    lasting = sum(need.lasting.values())
    if lasting > free:
        raise ConfigError(
            f"train: the model does not fit: weights, gradients and optimizer need {_gb(lasting)}, but only "
            f"{_gb(free)} are free: {need.text()}"
        )
    if need.total > free:
        _log.warning(
            "a full microbatch may not fit: about %s are needed, %s are free: %s",
            _gb(need.total), _gb(free), need.text(),
        )  # fmt: skip


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"

"""A rule of the watchdog: a name, a condition in words and as a function, and advice."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from astraflow.report.watch.run_snapshot import RunSnapshot

__all__ = ["AlarmFinding", "AlarmRule"]


@dataclass(frozen=True, slots=True)
class AlarmFinding:
    """One part of the run for which a rule's condition holds."""

    subject: str
    evidence: str
    """A sentence that names the subject and gives the figures."""
    since_s: float = 0.0
    """Start of the condition, in Unix seconds; 0 if it is unknown, so that the first finding counts as the
    start."""
    advice: str | None = None
    """Advice that replaces the rule's; empty if the evidence already says what to do."""


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """One thing that can be wrong. `find` is pure: it reads nothing but the snapshot that it gets."""

    name: str
    condition: str
    """The condition as a sentence, for the table in the docs."""
    advice: str
    find: Callable[[RunSnapshot], Iterable[AlarmFinding]]
    holds_s: float = 0.0
    """Time that the condition must hold before it raises an alarm, since a single snapshot can mislead."""
    is_symptom: bool = False
    """Whether something else may be the cause. A symptom raises no alarm while another rule names a cause."""
    is_cause: bool = True
    """Whether the condition explains symptoms."""

    @property
    def is_cause_of_waits(self) -> bool:
        """Whether a finding of this rule suppresses symptoms."""
        return self.is_cause and not self.is_symptom

"""A rule of the watchdog: a name, a condition in words and as a function, and advice."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from astraflow.report.watch.sight import Sight

__all__ = ["Finding", "Rule"]


@dataclass(frozen=True, slots=True)
class Finding:
    """That the condition of a rule holds for a part of the run."""

    subject: str
    evidence: str
    """A sentence that names the subject, with the numbers."""
    since_s: float = 0.0
    """When it began, Unix seconds; 0 if only the watchdog can say."""
    advice: str | None = None
    """Better advice than the rule's; empty if the evidence says what to do."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that can be wrong. `find` is pure: what it is given is all that it looks at."""

    name: str
    condition: str
    """In words, for the table in the docs."""
    advice: str
    find: Callable[[Sight], Iterable[Finding]]
    holds_s: float = 0.0
    """For how long the condition must hold before it is an alarm: single looks may deceive."""
    is_symptom: bool = False
    """Whether something else may be the cause: no alarm begins while another rule names one."""
    is_cause: bool = True
    """Whether it explains symptoms."""

    @property
    def is_cause_of_waits(self) -> bool:
        """Whether others wait because of what it finds."""
        return self.is_cause and not self.is_symptom

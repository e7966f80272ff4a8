"""An alarm: what is wrong with a run, since when, with which numbers, and what to do."""

from astraflow.types import Item

__all__ = ["Alarm"]


class Alarm(Item, frozen=True, kw_only=True):
    """One thing that is wrong with a run.

    Example: `Alarm(rule="nothing_to_train", subject="trainer actor", since_s=1700000000.0, evidence="trainer
    actor has had no batch for 12 s: 40 of 40 groups were filtered by zero_variance", advice="...")`.
    """

    rule: str
    """Name of the rule of the watchdog that found it."""
    subject: str
    """The affected part of the run: a process, a rollout service, a trainer, a policy, the disk."""
    since_s: float
    """When it began, as far as known; Unix seconds."""
    evidence: str
    """What is wrong and why, with numbers: a sentence that names the subject."""
    advice: str = ""
    """What to do. Empty if the evidence already says it."""

    @property
    def text(self) -> str:
        """Evidence and advice."""
        return f"{self.evidence}; {self.advice}" if self.advice else self.evidence

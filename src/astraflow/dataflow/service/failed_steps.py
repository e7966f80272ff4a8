"""Remembers batches that failed to train, and holds back those that failed twice. Soft state, not journaled.

A trainer that fails is restarted and gets the same batch again. If it fails twice in a row at the same step,
further tries would end the same way, and the last one would end the run. So the batch is held back: the
trainer waits, other policies continue, and the status names the command that drops the batch. After a restart
of the dataflow it is tried again, because a person may have fixed the cause. Passive: time is an argument.
"""

from dataclasses import dataclass

from astraflow.types import StepFailure, Wait, WaitReason
from astraflow.types.bounds import as_label
from astraflow.types.waits import PERSON, Party

__all__ = ["FailedSteps"]

_TRIES = 2
"""Failures in a row after which a batch is held back."""


@dataclass(slots=True)
class _FailedStep:
    step: int
    num: int
    reason: str
    since_s: float
    """Time of the first failure, Unix seconds."""


class FailedSteps:
    """The last failed step of each policy.

    Example: `failed.note("actor", failure, now_s)`; then `failed.wait("actor", step)` says what to wait for.
    """

    def __init__(self) -> None:
        self._failed: dict[str, _FailedStep] = {}

    def note(self, policy: str, failure: StepFailure, now_s: float) -> None:
        """Notes that the batch of a step could not be trained."""
        failed = self._failed.get(policy)
        if failed is None or failed.step != failure.step:
            failed = self._failed[policy] = _FailedStep(failure.step, 0, "", now_s)
        failed.num += 1
        failed.reason = as_label(failure.reason)

    def forget(self, policy: str, step: int | None = None) -> None:
        """Forgets the failure, because the batch was dropped, or because `step` was committed after all."""
        failed = self._failed.get(policy)
        if failed is not None and (step is None or failed.step <= step):
            del self._failed[policy]

    def wait(self, policy: str, step: int) -> Wait | None:
        """The wait for a person, if the batch of this step is held back."""
        failed = self._failed.get(policy)
        if failed is None or failed.step != step or failed.num < _TRIES:
            return None
        reason = WaitReason(
            kind="batch_failed", policy=policy, step=step, num=failed.num, detail=failed.reason.rstrip(". ")
        )
        who = Party(kind="trainer", name=policy)
        return Wait(who=who, whom=PERSON, reasons=(reason,), since_s=failed.since_s)

    def waits(self) -> tuple[Wait, ...]:
        """All waits for a person."""
        waits = [self.wait(policy, failed.step) for policy, failed in self._failed.items()]
        return tuple(wait for wait in waits if wait is not None)

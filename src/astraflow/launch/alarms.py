"""What a person should be warned about while a run goes on: failed groups, and rewards that teach nothing.

`Alarms` is fed with steps and statuses, and says each thing once; about failed groups it speaks again when
ten times as many have failed. `reward_alarm`, which is pure, is also used for the final table.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.types import PolicyStatus, StatusReply, StepRecord, WorkerStatus

__all__ = ["Alarms", "reward_alarm"]

_FIRST_STEPS = 5
"""Steps after which rewards that never differed are worth a word."""
_AGAIN = 10
"""Failed groups are named again when there are this many times as many."""


@dataclass(slots=True)
class _Rewards:
    """The mean rewards of a policy's steps."""

    least: float
    most: float
    num_steps: int = 0


class Alarms:
    """Collects what goes wrong in one start of a run. Each method returns the new warnings.

    Example: `for text in alarms.after_step(record): view.note(text)`.
    """

    def __init__(self) -> None:
        self._rewards: dict[str, _Rewards] = {}
        self._told: set[str] = set()
        """Policies whose rewards were named."""
        self._next_failed: dict[str, int] = {}
        """Policy -> number of failed groups from which on it is named again."""

    def after_step(self, record: StepRecord) -> tuple[str, ...]:
        """Looks at the reward of a step."""
        mean = record.reward_mean
        seen = self._rewards.setdefault(record.policy, _Rewards(mean, mean))
        seen.least = min(seen.least, mean)
        seen.most = max(seen.most, mean)
        seen.num_steps += 1
        if seen.num_steps < _FIRST_STEPS or record.policy in self._told:
            return ()
        text = reward_alarm(record.policy, seen.least, seen.most, seen.num_steps)
        if text:
            self._told.add(record.policy)
        return (text,) if text else ()

    def after_status(self, status: StatusReply) -> tuple[str, ...]:
        """Looks at the numbers of failed groups."""
        texts: list[str] = []
        for policy in status.policies:
            num = policy.fates.failed
            if num >= self._next_failed.setdefault(policy.name, 1):
                self._next_failed[policy.name] = num * _AGAIN
                texts.append(_failed(policy, status.workers))
        return tuple(texts)


def reward_alarm(policy: str, least: float, most: float, num_steps: int) -> str:
    """A warning if the mean reward was the same in every step, so that nothing can be learned; else empty."""
    if least != most or num_steps == 0:
        return ""
    steps = "the only step" if num_steps == 1 else f"all {num_steps} steps"
    return (
        f"{policy}: the mean reward was always {least:g}, in {steps}, so there is nothing to learn; look at "
        "an episode and its reward with `astraflow try`"
    )


def _failed(policy: PolicyStatus, workers: Sequence[WorkerStatus]) -> str:
    ended = policy.fates.drawn - policy.fates.live
    last = next((worker.last_failure for worker in workers if worker.last_failure), "")
    because = f"; the last error: {last}" if last else ""
    return f"{policy.name}: {policy.fates.failed} of {ended} groups failed{because}"

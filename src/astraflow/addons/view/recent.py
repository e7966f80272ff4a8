"""The steps and evaluations so far, which a viewer that joins late also requests from the dataflow."""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.dataflow.client import DataflowClient
from astraflow.report.overview import RATE_STEPS
from astraflow.types import EvalRecord, StatusReply, StepRecord

__all__ = ["Recent", "recent_of"]

_FEW_STEPS = 200
"""Up to this number of steps, all are requested because their records are small."""


@dataclass(frozen=True, slots=True)
class Recent:
    """What has happened in a run so far."""

    steps: tuple[StepRecord, ...] = ()
    """The newest steps of each policy, oldest first; all steps if there are few."""
    evals: tuple[EvalRecord, ...] = ()
    """All evaluations so far."""

    @property
    def by_policy(self) -> dict[str, Sequence[StepRecord]]:
        """Maps each policy to its steps, oldest first."""
        names = dict.fromkeys(record.policy for record in self.steps)
        return {name: [record for record in self.steps if record.policy == name] for name in names}

    def earliest_s(self, now_s: float) -> float:
        """Returns the time of the earliest known step or evaluation; `now_s` if there is none."""
        return min((record.at_s for record in (*self.steps, *self.evals)), default=now_s)


async def recent_of(client: DataflowClient, status: StatusReply) -> Recent:
    """Requests a run's steps and evaluations.

    Raises: UnavailableError if the dataflow does not answer; RefusedError.
    """
    steps: list[StepRecord] = []
    for policy in status.policies:
        after = -1 if policy.step <= _FEW_STEPS else policy.step - 1 - RATE_STEPS
        steps += await client.steps(policy.name, after, 0.0)
    return Recent(tuple(steps), tuple(await client.evals(0, 0.0)))

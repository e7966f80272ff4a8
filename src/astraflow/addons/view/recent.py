"""What a viewer that joins late also asks the dataflow for: steps and evaluations so far."""

from collections.abc import Sequence
from dataclasses import dataclass

from astraflow.dataflow.client import DataflowClient
from astraflow.report.overview import RATE_STEPS, RunOverview
from astraflow.types import EvalRecord, StatusReply, StepRecord

__all__ = ["Recent", "recent_of"]

_FEW_STEPS = 200
"""All steps of a run that has no more are asked for: their records are small."""


@dataclass(frozen=True, slots=True)
class Recent:
    """What has happened in a run."""

    steps: tuple[StepRecord, ...] = ()
    """The newest steps of each policy, oldest first; all of them if they are few."""
    evals: tuple[EvalRecord, ...] = ()
    """All evaluations so far."""

    @property
    def by_policy(self) -> dict[str, Sequence[StepRecord]]:
        """Policy -> its steps, oldest first."""
        names = dict.fromkeys(record.policy for record in self.steps)
        return {name: [record for record in self.steps if record.policy == name] for name in names}

    def earliest_s(self, now_s: float) -> float:
        """The time of the earliest step or evaluation that is known; now without any."""
        return min((record.at_s for record in (*self.steps, *self.evals)), default=now_s)

    def overview(self, status: StatusReply, *, name: str, where: str, started_s: float) -> RunOverview:
        """What is known of the run, with its status."""
        state = RunOverview(name, where, started_s, status=status)
        for record in self.evals:
            state.add_eval(record)
        for record in self.steps:
            state.add_step(record)
        return state


async def recent_of(client: DataflowClient, status: StatusReply) -> Recent:
    """Asks for it. Raises: UnavailableError if the dataflow does not answer; RefusedError."""
    steps: list[StepRecord] = []
    for policy in status.policies:
        after = -1 if policy.step <= _FEW_STEPS else policy.step - 1 - RATE_STEPS
        steps += await client.steps(policy.name, after, 0.0)
    return Recent(tuple(steps), tuple(await client.evals(0, 0.0)))

"""Ends the training of policies before their last step, if the plan's `stop` says so.

- In its `epochs`, the tasks are drawn that many times. A policy ends once the groups that it has, and those
  that may still be drawn, can't fill a batch. What is left over is not drawn, or cancelled at the run's end.
- The batch with which a policy reaches `sequences` or `tokens` is its last one.
"""

from astraflow.dataflow.core import evals
from astraflow.dataflow.core.commands import BatchTaken, RunResumed, ScheduleChanged
from astraflow.dataflow.core.context import Context
from astraflow.dataflow.core.fates import check_finished
from astraflow.dataflow.core.plan import StopPlan
from astraflow.dataflow.core.state import PolicyState
from astraflow.dataflow.core.tables import has_too_few

__all__ = ["note_stops"]


def note_stops(ctx: Context) -> None:
    """Notes which policies have their last batch, after a command that changed something."""
    stop = ctx.plan.stop
    if not ctx.events or stop == StopPlan():
        return
    may_be_enough = any(isinstance(e, BatchTaken | RunResumed | ScheduleChanged) for e in ctx.events)
    for name, policy in ctx.state.policies.items():
        if not ctx.is_running or policy.stops_at is not None:
            continue
        if has_too_few(ctx, name) or (may_be_enough and _is_enough(policy, stop)):
            policy.stops_at = policy.taken
            _end_training(ctx, name)


def _is_enough(policy: PolicyState, stop: StopPlan) -> bool:
    """Whether the batches taken so far, and not dropped, reach one of the limits."""
    taken = [batch for step, batch in policy.batches.items() if step >= policy.committed]
    groups = [group for batch in taken for group in (*batch.groups, *batch.replayed)]
    num_sequences = sum(record.num_samples for record in policy.records)
    num_tokens = sum(record.num_trained_tokens for record in policy.records)
    num_sequences += sum(len(group.samples) for group in groups)
    num_tokens += sum(group.num_sampled_tokens for group in groups)
    return 0 < stop.sequences <= num_sequences or 0 < stop.tokens <= num_tokens


def _end_training(ctx: Context, name: str) -> None:
    """Tells the trainer, evaluates its last version if that is published, and ends the run if it is over."""
    policy = ctx.state.policies[name]
    ctx.wake(f"batch/{name}")
    ctx.wake("leases")
    if policy.steps_of.get(policy.newest) == policy.stops_at:
        evals.open_due_rounds(ctx, name, policy.newest, policy.taken)
    check_finished(ctx)

"""Changes the schedule of a stopped run: how long it trains, and what it evaluates when.

The change is a command, so a replay uses the old schedule up to that record and the new one after it.
Everything else continues: groups, versions, curators, and sessions.
"""

from astraflow.dataflow.core import evals
from astraflow.dataflow.core.commands import ChangeSchedule, ScheduleChanged
from astraflow.dataflow.core.context import Context, refuse
from astraflow.dataflow.core.fates import reopen

__all__ = ["change_schedule"]


def change_schedule(ctx: Context, command: ChangeSchedule) -> None:
    """Replaces the schedule. A finished run continues if a policy now has steps to do.

    A run that now has fewer steps than it has committed ends at the next publication. If the rule for the
    best version changes, the choice starts over.
    """
    state = ctx.state
    schedule = command.schedule
    if schedule.steps.keys() != state.policies.keys():
        refuse(
            "unknown_policy",
            f"the schedule is for policies {', '.join(schedule.steps)}; the run trains "
            f"{', '.join(state.policies)}",
            404,
        )
    before = ctx.plan.eval
    is_same_stop = schedule.stop == ctx.plan.stop
    ctx.set_schedule(schedule)
    ctx.emit(ScheduleChanged(schedule=schedule))
    evals.drop_changed_rounds(ctx, before.sets)
    if schedule.eval.best != before.best:
        for policy in state.policies.values():
            policy.best = None
    for policy in () if is_same_stop else state.policies.values():
        policy.stops_at = None
    has_more = any(policy.committed < ctx.num_steps(name) for name, policy in state.policies.items())
    if state.run_state == "finished" and has_more:
        reopen(ctx)
    ctx.wake("leases")

"""The part of the plan that may change while a run is stopped: how long it trains, what it evaluates when.

The change is a command, so a replay decides by the old schedule what was decided by it, and by the new one
what came later. All else goes on: groups, versions, curators and sessions are those of one run.
"""

from astraflow.dataflow.core import evals
from astraflow.dataflow.core.commands import ChangeSchedule, ScheduleChanged
from astraflow.dataflow.core.context import Context, refuse
from astraflow.dataflow.core.fates import reopen

__all__ = ["change_schedule"]


def change_schedule(ctx: Context, command: ChangeSchedule) -> None:
    """Lets another schedule hold. A finished run goes on if a policy has steps to do.

    A run that has fewer steps now than it has committed ends at the next publication. Another rule for the
    best version starts the choice anew.
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
    ctx.set_schedule(schedule)
    ctx.emit(ScheduleChanged(schedule=schedule))
    evals.drop_changed_rounds(ctx, before.sets)
    if schedule.eval.best != before.best:
        for policy in state.policies.values():
            policy.best = None
    has_more = any(policy.committed < schedule.steps[name] for name, policy in state.policies.items())
    if state.run_state == "finished" and has_more:
        reopen(ctx)
    ctx.wake("leases")

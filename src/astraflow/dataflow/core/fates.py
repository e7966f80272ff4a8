"""How groups and the run end: each (policy, group) gets exactly one fate, and everything that is live is
cancelled when the run is over.

The accounting identity `drawn = sum of fates + live` holds by construction: `live`, which is also the number
of charged tickets, is what is drawn and not decided.
"""

from typing import cast

from astraflow.dataflow.core.commands import FateDecided, RunEnded
from astraflow.dataflow.core.context import Context
from astraflow.dataflow.core.state import PolicyState
from astraflow.types import Fate, FateCounts

__all__ = ["check_finished", "check_starved", "decide_fate", "end_run", "fate_counts", "num_live"]

_LOST: frozenset[Fate] = frozenset({"filtered", "failed", "unused"})
"""Fates of groups that gave nothing to train on, whatever the timing."""
_STARVED_PASSES = 2
"""Whole passes over the tasks without one usable group: another will not help."""
_MIN_FAILED_IN_A_ROW = 64
"""Groups failing in a row before the run gives up; a lost service accounts for far fewer."""


def decide_fate(
    ctx: Context,
    name: str,
    group_id: int,
    fate: Fate,
    *,
    step: int = -1,
    num_tokens: int = 0,
    staleness: int = 0,
) -> None:
    """Ends a group for one policy: it leaves the table, and its ticket comes back."""
    policy = ctx.state.policies[name]
    policy.waiting.pop(group_id, None)
    policy.ready.pop(group_id, None)
    policy.fates[fate] = policy.fates.get(fate, 0) + 1
    if fate != "trained":
        policy.num_discarded += 1
    if fate in _LOST:
        policy.lost_in_a_row += 1
        policy.failed_in_a_row = policy.failed_in_a_row + 1 if fate == "failed" else 0
    ctx.emit(
        FateDecided(
            policy=name, group_id=group_id, fate=fate, step=step, num_tokens=num_tokens, staleness=staleness
        )
    )
    if fate != "unadmitted":
        ctx.wake("leases")
        ctx.wake(f"batch/{name}")


def num_live(policy: PolicyState) -> int:
    """Groups that are drawn and undecided, in a batch or not: the charged tickets."""
    return policy.drawn - sum(policy.fates.values())


def fate_counts(policy: PolicyState) -> FateCounts:
    """The policy's accounting identity."""
    counts = {cast("str", fate): num for fate, num in policy.fates.items()}
    return FateCounts(drawn=policy.drawn, live=num_live(policy), **counts)


def check_finished(ctx: Context) -> None:
    """Ends the run if every policy took all its steps and every evaluation round is over."""
    state = ctx.state
    if not ctx.is_running or state.rounds or state.rounds_to_open:
        return
    for name, plan in ctx.plan.policies.items():
        policy = state.policies[name]
        if policy.newest < 0 or policy.committed < plan.num_steps:
            return
    end_run(ctx, "all steps are done", is_failure=False)


def check_starved(ctx: Context) -> None:
    """Ends the run with a failure if a table visibly cannot fill a batch; says why, with the numbers."""
    if not ctx.is_running:
        return
    for name, policy in ctx.state.policies.items():
        table = ctx.plan.policies[name].table
        if policy.failed_in_a_row >= max(_MIN_FAILED_IN_A_ROW, 2 * table.groups_per_batch):
            what = (
                f"{policy.failed_in_a_row} groups in a row failed; the last error: {ctx.state.last_failure}"
            )
        elif policy.lost_in_a_row >= max(_STARVED_PASSES * ctx.num_tasks, table.groups_per_batch):
            lost = ", ".join(f"{policy.fates.get(fate, 0)} {fate}" for fate in sorted(_LOST))
            what = (
                f"{policy.lost_in_a_row} groups in a row gave nothing to train on, over {ctx.num_tasks} "
                f"tasks (in the whole run: {lost}); are rewards ever different within a group?"
            )
        else:
            continue
        end_run(
            ctx,
            f"policy {name!r} cannot fill a batch of {table.groups_per_batch} groups "
            f"({len(policy.ready)} are ready): {what}",
            is_failure=True,
        )
        return


def end_run(ctx: Context, reason: str, *, is_failure: bool) -> None:
    """Cancels what is live and closes the run; a run that is over stays as it is."""
    if not ctx.is_running:
        return
    state = ctx.state
    for name, policy in state.policies.items():
        open_steps = [step for step in policy.batches if step >= policy.committed]
        in_batches = [group for step in open_steps for group in policy.batches.pop(step).groups]
        for group in in_batches:
            decide_fate(ctx, name, group.group_id, "cancelled", num_tokens=group.num_tokens)
        for group_id in tuple(policy.waiting):
            ready = policy.ready.get(group_id)
            decide_fate(ctx, name, group_id, "cancelled", num_tokens=ready.num_tokens if ready else 0)
        for topic in ("batch", "versions", "steps"):
            ctx.wake(f"{topic}/{name}")
    for name in ctx.plan.frozen:
        ctx.wake(f"versions/{name}")
    for queue in (state.groups, state.fresh, state.retries, state.leases, state.rounds, state.pushed_queue):
        queue.clear()
    ctx.fresh_at.clear()
    ctx.lost_homes.clear()
    state.rounds_to_open.clear()
    for worker in state.workers.values():
        worker.leases.clear()
    state.run_state = "failed" if is_failure else "finished"
    state.reason = reason
    ctx.emit(RunEnded(reason=reason, is_failure=is_failure))
    for topic in ("leases", "evals", "run"):
        ctx.wake(topic)

"""How groups and the run end: each (policy, group) gets exactly one fate, and everything that is live is
cancelled when the run is over.

The accounting identity `drawn = sum of fates + live` holds by construction, because `live` is computed as
what is drawn and not decided. It is also the number of charged tickets.
"""

from typing import Any, cast

from astraflow.dataflow.core.commands import FateDecided, ResumeRun, RunEnded, RunResumed
from astraflow.dataflow.core.conduct import all_services_fail, failing_services_text, is_set_aside
from astraflow.dataflow.core.context import Context, refuse
from astraflow.dataflow.core.state import Conduct, PolicyState
from astraflow.types import Fate, FateCounts, GroupOutcome
from astraflow.types.bounds import as_label

__all__ = [
    "check_finished",
    "check_starved",
    "decide_fate",
    "end_run",
    "fate_counts",
    "main_loss",
    "note_outcome",
    "num_live",
    "outcomes",
    "reopen",
    "resume_run",
]

_LOST: frozenset[Fate] = frozenset({"filtered", "failed", "unused"})
"""Fates of groups that gave nothing to train on, whatever the timing."""
_STARVED_PASSES = 2
"""Whole passes over the tasks without a usable group, after which another pass will not help."""
_MIN_FAILED_IN_A_ROW = 64
"""Groups that fail in a row before the run gives up; a lost service causes far fewer."""
_STARVED_S = 600.0
"""With many tasks, two passes over them take hours: the run also gives up if no group was usable for this
long."""
_STARVED_BATCHES = 4
"""Provided that so many batches of groups were lost: where episodes are long, few groups prove nothing."""
_LONGEST_GAP_S = 30.0
"""What the time between two lost groups counts at most, so that an interruption of the run does not count."""


def decide_fate(
    ctx: Context,
    name: str,
    group_id: int,
    fate: Fate,
    *,
    step: int = -1,
    num_tokens: int = 0,
    staleness: int = 0,
    by: str = "",
) -> None:
    """Ends a group for one policy: it leaves the table, and its ticket comes back.

    `by`: the filter that dropped it, if one did.
    """
    policy = ctx.state.policies[name]
    policy.waiting.pop(group_id, None)
    policy.ready.pop(group_id, None)
    policy.fates[fate] = policy.fates.get(fate, 0) + 1
    if fate != "trained":
        policy.num_discarded += 1
    if fate in _LOST:
        note_outcome(policy, fate, by)
        if policy.lost_in_a_row:
            policy.lost_s += min(ctx.now_s - policy.lost_at_s, _LONGEST_GAP_S)
        policy.lost_at_s = ctx.now_s
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


def note_outcome(policy: PolicyState, fate: str, by: str = "") -> None:
    """Counts how a group ended, for those who wait for a batch. `by`: the filter that dropped it."""
    counts = policy.outcomes.setdefault(fate, {})
    counts[by] = counts.get(by, 0) + 1


def outcomes(policy: PolicyState) -> tuple[GroupOutcome, ...]:
    """How groups ended since the last batch was taken."""
    return tuple(
        GroupOutcome(fate=cast("Any", fate), by=as_label(by), num=num)
        for fate, counts in policy.outcomes.items()
        for by, num in counts.items()
    )


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
    if all_services_fail(ctx):
        text = failing_services_text(ctx)
        end_run(ctx, f"{text}; see their logs, fix the cause and run again to continue", is_failure=True)
        return
    for name, policy in ctx.state.policies.items():
        table = ctx.plan.policies[name].table
        num_failed = policy.failed_in_a_row
        if num_failed >= max(_MIN_FAILED_IN_A_ROW, 2 * table.batch_groups) and _is_general(ctx, policy):
            what = (
                f"{policy.failed_in_a_row} groups in a row failed; the last error: {ctx.state.last_failure}"
            )
        elif policy.lost_in_a_row >= max(_STARVED_PASSES * ctx.num_tasks, table.batch_groups):
            lost = ", ".join(f"{policy.fates.get(fate, 0)} {fate}" for fate in sorted(_LOST))
            what = (
                f"{policy.lost_in_a_row} groups in a row gave nothing to train on, over {ctx.num_tasks} "
                f"tasks (in the whole run: {lost}); are rewards ever different within a group?"
            )
        elif _is_starved_by_time(policy, table.batch_groups):
            what = (
                f"{policy.lost_in_a_row:,} groups in a row, over {policy.lost_s:.0f} s, gave nothing to "
                f"train on{_loss_text(policy)}; are rewards ever different within a group?"
            )
        else:
            continue
        end_run(
            ctx,
            f"policy {name!r} cannot fill a batch of {table.batch_groups} groups "
            f"({len(policy.ready)} are ready): {what}",
            is_failure=True,
        )
        return


def _is_starved_by_time(policy: PolicyState, groups_per_batch: int) -> bool:
    least = max(_MIN_FAILED_IN_A_ROW, _STARVED_BATCHES * groups_per_batch)
    return policy.lost_s >= _STARVED_S and policy.lost_in_a_row >= least


def main_loss(policy: PolicyState) -> tuple[GroupOutcome, int] | None:
    """How most groups since the last batch were lost, and how many groups ended in any way. None if at least
    half of them can be trained on.

    Example: 3,952 groups `filtered` by `zero_variance`, of 3,952.
    """
    found = outcomes(policy)
    total = sum(outcome.num for outcome in found)
    lost = [outcome for outcome in found if outcome.fate != "ready"]
    if 2 * sum(outcome.num for outcome in lost) <= total:
        return None
    return max(lost, key=lambda outcome: outcome.num), total


def _loss_text(policy: PolicyState) -> str:
    loss = main_loss(policy)
    if loss is None:
        return ""
    outcome, total = loss
    by = f" by {outcome.by}" if outcome.by else ""
    return f" ({outcome.num:,} of {total:,} groups {outcome.fate}{by} since the last batch)"


def _is_general(ctx: Context, policy: PolicyState) -> bool:
    """Whether groups fail wherever they run: each service that is at work has had a part in the failures."""
    return all(
        worker.id in policy.failed_on or is_set_aside(worker)
        for worker in ctx.state.workers.values()
        if worker.leases or worker.conduct.num_good
    )


def end_run(ctx: Context, reason: str, *, is_failure: bool) -> None:
    """Cancels what is live and closes the run; a run that is over stays as it is."""
    if not ctx.is_running:
        return
    state = ctx.state
    for name in state.policies:
        _cancel_groups(ctx, name)
        for topic in ("batch", "versions", "steps"):
            ctx.wake(f"{topic}/{name}")
    for name in ctx.plan.frozen:
        ctx.wake(f"versions/{name}")
    for name, step in _open_evaluations(ctx):
        policy = state.policies[name]
        policy.evaluated_step = min(policy.evaluated_step, step - 1)  # due again after a resume
    for queue in (state.groups, state.fresh, state.retries, state.leases, state.rounds):
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


def _cancel_groups(ctx: Context, name: str) -> None:
    """Ends all groups of a policy that are live: those of steps that are not committed, and the waiting."""
    policy = ctx.state.policies[name]
    open_steps = [step for step in policy.batches if step >= policy.committed]
    for step in open_steps:
        for group in policy.batches.pop(step).groups:
            policy.replay.pop(group.group_id, None)  # no step was trained on it
            decide_fate(ctx, name, group.group_id, "cancelled", num_tokens=group.num_tokens)
    for group_id in tuple(policy.waiting):
        ready = policy.ready.get(group_id)
        decide_fate(ctx, name, group_id, "cancelled", num_tokens=ready.num_tokens if ready else 0)


def _open_evaluations(ctx: Context) -> list[tuple[str, int]]:
    """(policy, number of steps) of the evaluation rounds that are open, or wait for another policy."""
    opened = [(round_.policy, round_.step) for round_ in ctx.state.rounds.values()]
    return opened + [(name, step) for name, _, step in ctx.state.rounds_to_open]


def resume_run(ctx: Context, _: ResumeRun) -> None:
    """Reopens a run that failed. What was committed stays; all failures that were counted are forgotten.

    The trainers' sessions are over, because they may hold steps whose batches were cancelled. Steps that were
    not committed get new batches. A run that has not ended is left as it is.
    """
    if ctx.state.run_state == "finished":
        refuse("finished", f"the run is over: {ctx.state.reason}")
    if not ctx.is_running:
        reopen(ctx)


def reopen(ctx: Context) -> None:
    """Lets a run that is over go on from its committed steps, as `resume_run` says."""
    state = ctx.state
    state.run_state = "running"
    state.reason = ""
    state.last_failure = ""
    state.num_good = 0
    state.last_good_s = 0.0
    state.absent.clear()
    for worker in state.workers.values():
        worker.conduct = Conduct()
    for policy in state.policies.values():
        policy.session = None
        policy.epoch += 1
        policy.taken = policy.committed
        policy.lost_in_a_row = 0
        policy.lost_s = 0.0
        policy.outcomes.clear()
        policy.failed_in_a_row = 0
        policy.failed_on.clear()
        policy.changed_s = ctx.now_s
    ctx.emit(RunResumed())

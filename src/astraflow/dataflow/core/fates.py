"""Ends groups and the run: each group gets one fate per policy, and the run's end cancels live groups.

The accounting identity `drawn = sum of fates + live` holds by construction, because `live` is computed as the
difference. It is also the number of tickets in use.
"""

from typing import Any, cast

from astraflow.dataflow.core.commands import FateDecided, ResumeRun, RunEnded, RunResumed
from astraflow.dataflow.core.context import Context, refuse
from astraflow.dataflow.core.state import FailureStreak, PolicyState
from astraflow.dataflow.core.strikes import all_services_fail, failing_services_text, is_set_aside
from astraflow.types import Fate, FateCounts, GroupOutcome
from astraflow.types.bounds import as_label

__all__ = [
    "check_finished",
    "check_starved",
    "decide_fate",
    "end_run",
    "fate_counts",
    "main_unusable_outcome",
    "note_outcome",
    "num_live",
    "outcomes",
    "reopen",
    "resume_run",
]

_UNUSABLE: frozenset[Fate] = frozenset({"filtered", "failed", "unused"})
"""Fates of groups that had nothing to train on, regardless of timing."""
_STARVED_PASSES = 2
"""Complete passes over the tasks without a usable group after which the run gives up."""
_MIN_FAILED_IN_A_ROW = 64
"""Failed groups in a row after which the run gives up. The loss of a service causes far fewer."""
_STARVED_S = 600.0
"""Time without a usable group after which the run gives up too: with many tasks, two passes take hours."""
_STARVED_BATCHES = 4
"""Batches of unusable groups needed for that: if episodes are long, the first few groups prove nothing."""
_LONGEST_GAP_S = 30.0
"""Largest time between two unusable groups that is counted, so that interruptions of the run are left out."""


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
    """Ends a group for one policy: removes it from the table and frees its ticket.

    `by`: the filter that dropped it, if any.
    """
    policy = ctx.state.policies[name]
    policy.waiting.pop(group_id, None)
    policy.ready.pop(group_id, None)
    policy.fates[fate] = policy.fates.get(fate, 0) + 1
    if fate != "trained":
        policy.num_discarded += 1
    if fate in _UNUSABLE:
        note_outcome(policy, fate, by)
        # The time counts from the first unusable group on: before it, nothing had gone wrong.
        if policy.unusable_in_a_row:
            policy.unusable_s += min(ctx.now_s - policy.unusable_at_s, _LONGEST_GAP_S)
        policy.unusable_at_s = ctx.now_s
        policy.unusable_in_a_row += 1
        policy.failed_in_a_row = policy.failed_in_a_row + 1 if fate == "failed" else 0
    ctx.emit(
        FateDecided(
            policy=name, group_id=group_id, fate=fate, step=step, num_tokens=num_tokens, staleness=staleness
        )
    )
    # An unadmitted group never held a ticket, so it frees none.
    if fate != "unadmitted":
        ctx.wake("leases")
        ctx.wake(f"batch/{name}")


def note_outcome(policy: PolicyState, fate: str, by: str = "") -> None:
    """Counts a group's outcome, to explain long waits for a batch. `by`: the filter that dropped it."""
    counts = policy.outcomes.setdefault(fate, {})
    counts[by] = counts.get(by, 0) + 1


def outcomes(policy: PolicyState) -> tuple[GroupOutcome, ...]:
    """The outcomes of groups since the last batch was taken."""
    return tuple(
        GroupOutcome(fate=cast("Any", fate), by=as_label(by), num=num)
        for fate, counts in policy.outcomes.items()
        for by, num in counts.items()
    )


def num_live(policy: PolicyState) -> int:
    """Number of drawn groups without a fate, in a batch or not. This is the number of tickets in use."""
    return policy.drawn - sum(policy.fates.values())


def fate_counts(policy: PolicyState) -> FateCounts:
    """The policy's accounting identity."""
    counts = {cast("str", fate): num for fate, num in policy.fates.items()}
    return FateCounts(drawn=policy.drawn, live=num_live(policy), **counts)


def check_finished(ctx: Context) -> None:
    """Ends the run if every policy has committed all its steps and every evaluation round is over."""
    state = ctx.state
    if not ctx.is_running or state.rounds or state.rounds_to_open:
        return
    for name, policy in state.policies.items():
        if policy.newest < 0 or policy.committed < ctx.num_steps(name):
            return
    is_short = any(ctx.num_steps(name) < plan.num_steps for name, plan in ctx.plan.policies.items())
    reason = "all steps up to the recipe's stop are done" if is_short else "all steps are done"
    end_run(ctx, reason, is_failure=False)


def check_starved(ctx: Context) -> None:
    """Ends the run with a failure if every service fails, or if a table cannot fill a batch."""
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
        elif policy.unusable_in_a_row >= max(_STARVED_PASSES * ctx.num_tasks, table.batch_groups):
            counts = ", ".join(f"{policy.fates.get(fate, 0)} {fate}" for fate in sorted(_UNUSABLE))
            what = (
                f"{policy.unusable_in_a_row} groups in a row gave nothing to train on, over {ctx.num_tasks} "
                f"tasks (in the whole run: {counts}); are rewards ever different within a group?"
            )
        elif _is_starved_by_time(policy, table.batch_groups):
            what = (
                f"{policy.unusable_in_a_row:,} groups in a row, over {policy.unusable_s:.0f} s, gave nothing "
                f"to train on{_unusable_text(policy)}; are rewards ever different within a group?"
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
    return policy.unusable_s >= _STARVED_S and policy.unusable_in_a_row >= least


def main_unusable_outcome(policy: PolicyState) -> tuple[GroupOutcome, int] | None:
    """The most frequent unusable outcome since the last batch, and the number of all outcomes. None if at
    least half of the groups can be trained on.

    Example: 3,952 groups `filtered` by `zero_variance`, of 3,952.
    """
    found = outcomes(policy)
    total = sum(outcome.num for outcome in found)
    unusable = [outcome for outcome in found if outcome.fate != "ready"]
    if 2 * sum(outcome.num for outcome in unusable) <= total:
        return None
    return max(unusable, key=lambda outcome: outcome.num), total


def _unusable_text(policy: PolicyState) -> str:
    found = main_unusable_outcome(policy)
    if found is None:
        return ""
    outcome, total = found
    by = f" by {outcome.by}" if outcome.by else ""
    return f" ({outcome.num:,} of {total:,} groups {outcome.fate}{by} since the last batch)"


def _is_general(ctx: Context, policy: PolicyState) -> bool:
    """Whether groups fail wherever they run, so that no single service is the cause."""
    return all(
        worker.id in policy.failed_on or is_set_aside(worker)
        for worker in ctx.state.workers.values()
        if worker.leases or worker.failures.num_good
    )


def end_run(ctx: Context, reason: str, *, is_failure: bool) -> None:
    """Cancels all live groups and ends the run. Does nothing if it is already over."""
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
    ctx.fresh_by_worker.clear()
    ctx.gone_workers.clear()
    state.rounds_to_open.clear()
    for worker in state.workers.values():
        worker.leases.clear()
    state.run_state = "failed" if is_failure else "finished"
    state.reason = reason
    ctx.emit(RunEnded(reason=reason, is_failure=is_failure))
    for topic in ("leases", "evals", "run"):
        ctx.wake(topic)


def _cancel_groups(ctx: Context, name: str) -> None:
    """Ends all live groups of a policy: those in batches of uncommitted steps, and those that wait."""
    policy = ctx.state.policies[name]
    open_steps = [step for step in policy.batches if step >= policy.committed]
    for step in open_steps:
        for group in policy.batches.pop(step).groups:
            policy.replay.pop(group.group_id, None)  # no committed step contains it
            decide_fate(ctx, name, group.group_id, "cancelled", num_tokens=group.num_tokens)
    for group_id in tuple(policy.waiting):
        ready = policy.ready.get(group_id)
        decide_fate(ctx, name, group_id, "cancelled", num_tokens=ready.num_tokens if ready else 0)


def _open_evaluations(ctx: Context) -> list[tuple[str, int]]:
    """(policy, number of steps) of the evaluation rounds that are open or wait for another policy."""
    opened = [(round_.policy, round_.step) for round_ in ctx.state.rounds.values()]
    return opened + [(name, step) for name, _, step in ctx.state.rounds_to_open]


def resume_run(ctx: Context, _: ResumeRun) -> None:
    """Resumes a failed run from its committed steps, and resets all counts of failures.

    The trainers' sessions end, because they may hold steps whose batches were cancelled. Uncommitted steps
    get new batches. Does nothing if the run is not over.
    """
    if ctx.state.run_state == "finished":
        refuse("finished", f"the run is over: {ctx.state.reason}")
    if not ctx.is_running:
        reopen(ctx)


def reopen(ctx: Context) -> None:
    """Resumes a run that is over, as described in `resume_run`."""
    state = ctx.state
    state.run_state = "running"
    state.reason = ""
    state.last_failure = ""
    state.num_good = 0
    state.last_good_s = 0.0
    state.absent.clear()
    for worker in state.workers.values():
        worker.failures = FailureStreak()
    for policy in state.policies.values():
        policy.session = None
        policy.epoch += 1
        policy.taken = policy.committed
        policy.stops_at = None
        policy.unusable_in_a_row = 0
        policy.unusable_s = 0.0
        policy.outcomes.clear()
        policy.failed_in_a_row = 0
        policy.failed_on.clear()
        policy.changed_s = ctx.now_s
    ctx.emit(RunResumed())

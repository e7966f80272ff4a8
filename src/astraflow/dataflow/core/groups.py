"""Draws groups, records results, and passes complete groups on to the tables.

The first valid result of any attempt at an episode counts. A failed, expired, or lost attempt is followed by
another one, up to `max_attempts`. An attempt is lost if its service is stopped, dies, or falls silent. That
usually says nothing about the episode, and happens all the time on spot machines, so the first `max_lost`
lost attempts don't count. Further ones do, because the episode itself may be what kills its services. The
first 200 attempts that a service hands in, because it needs its device elsewhere, do not count either.
A group that can no longer reach `min_group_size` good episodes fails as a whole.
"""

import re
from typing import Literal, NamedTuple, NoReturn

from astraflow.dataflow.core import evals, strikes
from astraflow.dataflow.core.commands import (
    AddTasks,
    AttemptFailed,
    EpisodeFacts,
    GroupDrawn,
    RecordResult,
    ResultDropped,
    TasksPushed,
)
from astraflow.dataflow.core.context import Context, refuse
from astraflow.dataflow.core.fates import check_starved, decide_fate, end_run, note_outcome
from astraflow.dataflow.core.metric_sums import add_metrics
from astraflow.dataflow.core.state import EpisodeState, EpisodeSums, GroupState, LeaseState
from astraflow.dataflow.core.tables import policies_with_room
from astraflow.dataflow.core.valuation import Discard, outcome_of
from astraflow.errors import ComponentError
from astraflow.types import EpisodeReceipt, Failure, PushTasksReply

__all__ = ["draw", "drop_lease", "fail_attempt", "push_tasks", "record_result", "requeue"]

_LEASE_ID = re.compile(r"(e?)(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})")
"""Numbers without leading zeros, within 64 bits, so that each lease has exactly one id."""
_SHOWN = 100
"""Characters of an unknown lease id that an error message shows."""
_LATE = "DeadlineError"
"""Error class of an episode that took longer than it may."""
_MAX_HAND_INS = 200
"""Hand-ins of an episode that don't count. Without a limit, a service could hand everything in forever."""
_MAX_METRICS = 128
"""Largest number of names of episode metrics per step and policy. Each step's record stays in the journal and
in every snapshot forever: 128 names of 30 characters take 5 KB."""


class _LeaseRef(NamedTuple):
    kind: Literal["train", "eval"]
    group_id: int
    episode_idx: int
    attempt: int


# --- draws ----------------------------------------------------------------------------------------


def push_tasks(ctx: Context, command: AddTasks) -> PushTasksReply:
    """Queues tasks with unknown ids, up to the plan's limits. They are drawn before those of the sources."""
    if not ctx.is_running:
        refuse("finished", f"the run is over: {ctx.state.reason}")
    state = ctx.state
    plan = ctx.plan
    accepted: list[str] = []
    num_known = 0
    num_refused = 0
    for task in command.tasks:
        if task.id in state.pushed_ids:
            num_known += 1
            continue
        if state.num_pushed >= plan.max_pushed or len(state.pushed_queue) >= plan.max_waiting_pushed:
            num_refused += 1
            continue
        state.pushed_ids[task.id] = None
        state.pushed[state.num_pushed] = task
        state.pushed_queue[state.num_pushed] = None
        state.num_pushed += 1
        accepted.append(task.id)
    state.num_pushed_again += num_known
    state.num_push_refused += num_refused
    ctx.emit(TasksPushed(accepted=tuple(accepted), num_known=num_known, num_refused=num_refused))
    if accepted:
        ctx.wake("leases")
    return PushTasksReply(num_accepted=len(accepted), num_known=num_known, num_refused=num_refused)


def draw(ctx: Context, worker_id: str) -> GroupState | None:
    """Draws a task and starts its group, charged to every policy with room and `unadmitted` for the others.

    Returns None if no group may be drawn now, or if the run ends because a component failed.
    """
    state = ctx.state
    try:
        names = policies_with_room(ctx)
    except ComponentError as err:
        end_run(ctx, str(err), is_failure=True)
        return None
    if not names:
        return None
    if not state.pushed_queue and ctx.num_tasks == 0:
        # A running group may still push tasks. If there is none, no task will ever come from the run itself.
        if not state.groups:
            reason = f"there are no tasks to draw: sources {', '.join(ctx.plan.sources)} are empty"
            end_run(ctx, reason, is_failure=True)
        return None
    # Only now, when the group is sure to start: asking a curator for a task changes the curator's state.
    try:
        task_idx, task_id, source, source_idx = _next_task(ctx)
    except ComponentError as err:
        end_run(ctx, str(err), is_failure=True)
        return None
    group = GroupState(
        id=state.next_group_id,
        task_id=task_id,
        task_idx=task_idx,
        source=source,
        source_idx=source_idx,
        undecided=names,
        preferred_worker=worker_id,
        episodes=[EpisodeState() for _ in range(ctx.plan.group_size)],
        num_open=ctx.plan.group_size,
    )
    state.next_group_id += 1
    state.groups[group.id] = group
    ctx.add_fresh(group.id)
    _charge(ctx, group)
    return group


def _charge(ctx: Context, group: GroupState) -> None:
    unadmitted = tuple(name for name in ctx.plan.policies if name not in group.undecided)
    ctx.emit(
        GroupDrawn(
            group_id=group.id,
            task_id=group.task_id,
            task_idx=group.task_idx,
            admitted=tuple(group.undecided),
            unadmitted=unadmitted,
        )
    )
    for policy in ctx.state.policies.values():
        policy.drawn += 1
    for name in group.undecided:
        ctx.state.policies[name].waiting[group.id] = None
    for name in unadmitted:
        decide_fate(ctx, name, group.id, "unadmitted")


def _next_task(ctx: Context) -> tuple[int, str, str, int]:
    """Picks the next task: (position in all sources joined, task id, source, position in that source)."""
    state = ctx.state
    if state.pushed_queue:
        position = next(iter(state.pushed_queue))
        del state.pushed_queue[position]
        return -1, state.pushed[position].id, "", position
    task_idx = ctx.curation.next()
    if not 0 <= task_idx < ctx.num_tasks:
        raise ComponentError(
            f"curator {ctx.curation.order_name}.next() gave {task_idx!r}; there are {ctx.num_tasks} tasks"
        )
    rest = task_idx
    for source, size in ctx.plan.sources.items():
        if rest < size:
            return task_idx, f"{source}/{rest}", source, rest
        rest -= size
    raise AssertionError("the sources' sizes do not add up")


# --- results --------------------------------------------------------------------------------------


def record_result(ctx: Context, command: RecordResult) -> EpisodeReceipt:
    """Records the result of a lease, expired or not, if its episode is still open. Idempotent by lease.

    Lease ids are not secret, so a result counts only if it comes from the service that holds the lease.
    """
    ref = _parse_lease_id(ctx, command.lease_id)
    episode = _find_episode(ctx, ref)
    if episode is None:
        return _drop_result(ctx, command, "its group is complete or has failed")
    if ref.attempt > episode.attempt or (ref.attempt == episode.attempt and episode.status == "pending"):
        _refuse_unknown(command.lease_id)  # this attempt has not been issued yet
    holder = episode.holders[ref.attempt] if ref.attempt < len(episode.holders) else ""
    if holder and holder != command.worker_id:  # otherwise, any service may send the result
        return _drop_result(ctx, command, "the lease was granted to another service")
    if episode.status == "good" and episode.winner == ref.attempt:
        return EpisodeReceipt(lease_id=command.lease_id, status="accepted", reason="recorded before")
    if episode.status == "good":
        return _drop_result(ctx, command, f"attempt {episode.winner} of the episode won")
    if episode.status == "failed":
        return _drop_result(ctx, command, "the episode has failed")
    if isinstance(command.outcome, Failure):
        lease = ctx.state.leases.get(command.lease_id)
        # The expiry has already counted as this attempt's failure. A late success, below, is still welcome.
        if lease is None:
            return _drop_result(ctx, command, "the lease had expired before it failed")
        fail_attempt(ctx, lease, command.outcome)
    else:
        _check_versions(ctx, command.lease_id, command.outcome)
        lease = ctx.state.leases.get(command.lease_id)
        strikes.note_success(ctx, lease.worker_id if lease else command.worker_id)
        _accept(ctx, ref, episode, command.outcome)
    if ctx.events:
        check_starved(ctx)
    return EpisodeReceipt(lease_id=command.lease_id, status="accepted")


def _parse_lease_id(ctx: Context, lease_id: str) -> _LeaseRef:
    if (lease := ctx.state.leases.get(lease_id)) is not None:
        return _LeaseRef(lease.kind, lease.group_id, lease.episode_idx, lease.attempt)
    match = _LEASE_ID.fullmatch(lease_id)
    if match is None:
        _refuse_unknown(lease_id)
    group_id, episode_idx, attempt = (int(match[i]) for i in (2, 3, 4))
    most_attempts = ctx.plan.max_attempts + ctx.plan.max_lost + ctx.state.num_handed_in
    kind: Literal["train", "eval"] = "eval" if match[1] else "train"
    next_id = ctx.state.next_round_id if kind == "eval" else ctx.state.next_group_id
    if group_id >= next_id or attempt >= most_attempts:
        _refuse_unknown(lease_id)
    if kind == "train" and episode_idx >= ctx.plan.group_size:
        _refuse_unknown(lease_id)
    return _LeaseRef(kind, group_id, episode_idx, attempt)


def _refuse_unknown(lease_id: str) -> NoReturn:
    shown = lease_id if len(lease_id) <= _SHOWN else f"{lease_id[:_SHOWN]}..."
    refuse("unknown_lease", f"lease {shown!r} was never issued by this run", 404)


def _find_episode(ctx: Context, ref: _LeaseRef) -> EpisodeState | None:
    """Returns the episode, or None if its group or round is over."""
    owner = (ctx.state.rounds if ref.kind == "eval" else ctx.state.groups).get(ref.group_id)
    if owner is None:
        return None
    if ref.episode_idx >= len(owner.episodes):
        _refuse_unknown(f"e{ref.group_id}.{ref.episode_idx}.{ref.attempt}")
    return owner.episodes[ref.episode_idx]


def _drop_result(ctx: Context, command: RecordResult, reason: str) -> EpisodeReceipt:
    ctx.emit(ResultDropped(lease_id=command.lease_id, reason=reason))
    return EpisodeReceipt(lease_id=command.lease_id, status="dropped", reason=reason)


def _check_versions(ctx: Context, lease_id: str, facts: EpisodeFacts) -> None:
    """Raises RefusedError if trained tokens come from versions that were never published."""
    for number, meta in enumerate(facts.trajectories):
        policy = ctx.state.policies.get(meta.policy)
        if policy is None or meta.num_trained_tokens == 0:
            continue
        if not 0 <= meta.oldest_version <= meta.newest_version <= policy.newest:
            refuse(
                "invalid",
                f"lease {lease_id!r}, trajectory {number}: tokens of versions {meta.oldest_version} to "
                f"{meta.newest_version} of policy {meta.policy!r}, whose newest version is {policy.newest}",
                422,
            )


def _accept(ctx: Context, ref: _LeaseRef, episode: EpisodeState, facts: EpisodeFacts) -> None:
    prefix = "e" if ref.kind == "eval" else ""
    # The result may belong to an earlier attempt. The current one is then no longer needed.
    drop_lease(ctx, f"{prefix}{ref.group_id}.{ref.episode_idx}.{episode.attempt}")
    was_pending = episode.status == "pending"
    episode.status = "good"
    episode.winner = ref.attempt
    episode.score = facts.score
    if ref.kind == "eval":
        evals.close_episode(ctx, ctx.state.rounds[ref.group_id], ref.episode_idx, facts)
        return
    episode.facts = facts
    group = ctx.state.groups[ref.group_id]
    for name in group.undecided:
        _add_episode(ctx.state.policies[name].episodes, facts)
    group.num_open -= 1
    if was_pending:  # a late result: the episode is still queued for another attempt
        requeue(ctx, group)
    if group.num_open == 0:
        _complete(ctx, group)


def _add_episode(sums: EpisodeSums, facts: EpisodeFacts) -> None:
    sums.num += 1
    sums.score_sum += facts.score
    sums.duration_sum_s += facts.duration_s
    sums.duration_max_s = max(sums.duration_max_s, facts.duration_s)
    sums.num_left_out += add_metrics(sums.metrics, facts.metrics, most=_MAX_METRICS)


# --- attempts that fail ---------------------------------------------------------------------------


def fail_attempt(
    ctx: Context, lease: LeaseState, failure: Failure, *, is_blamed: bool = True, is_lost: bool = False
) -> None:
    """Ends a lease without a result. Either another attempt follows, or the episode has failed.

    `is_blamed`: whether the failure counts against the service; a lease that never reached it does not.
    `is_lost`: whether the service reported nothing; up to `max_lost` such attempts don't count.
    """
    drop_lease(ctx, lease.id)
    is_eval = lease.kind == "eval"
    owner = ctx.state.rounds[lease.group_id] if is_eval else ctx.state.groups[lease.group_id]
    episode = owner.episodes[lease.episode_idx]
    holder = ctx.state.workers.get(lease.worker_id)
    # A broken service may report every failure as final, so one that is set aside is not believed.
    is_hopeless = not failure.is_retryable and not (holder and strikes.is_set_aside(holder))
    is_excused = failure.is_handed_in and episode.num_handed_in < _MAX_HAND_INS
    episode.num_handed_in += is_excused
    ctx.state.num_handed_in += is_excused
    episode.num_lost += is_lost
    num_uncounted = episode.num_handed_in + min(episode.num_lost, ctx.plan.max_lost)
    is_final = is_hopeless or episode.attempt + 1 - num_uncounted >= ctx.plan.max_attempts
    if not is_excused:
        ctx.state.last_failure = f"{failure.error_class}: {failure.message}"
    ctx.emit(AttemptFailed(lease_id=lease.id, error_class=failure.error_class, is_final=is_final))
    if is_blamed and not is_excused:
        strikes.note_failure(ctx, lease, failure)
        episode.failed_on = (*episode.failed_on, lease.worker_id)
        episode.failed_s = ctx.now_s
    if not is_final:
        episode.attempt += 1
        episode.status = "pending"
        ctx.wake("leases")
        ctx.wake(f"worker/{lease.worker_id}")
    if isinstance(owner, GroupState):
        for name in () if is_excused else owner.undecided:
            ctx.state.policies[name].failed_on[lease.worker_id] = None
        if is_final:
            _fail_episode(ctx, owner, episode)
        else:
            requeue(ctx, owner)
    elif is_final:
        evals.close_episode(ctx, owner, lease.episode_idx, None, is_late=failure.error_class == _LATE)
    else:
        owner.retries[lease.episode_idx] = None


def _fail_episode(ctx: Context, group: GroupState, episode: EpisodeState) -> None:
    episode.status = "failed"
    group.num_failed += 1
    group.num_open -= 1
    num_possible = len(group.episodes) - group.num_failed
    for name in tuple(group.undecided):
        if num_possible < ctx.plan.policies[name].table.min_group_size:
            group.undecided.remove(name)
            decide_fate(ctx, name, group.id, "failed", num_tokens=_num_tokens(group, name))
    if not group.undecided:
        _drop_group(ctx, group)
    elif group.num_open == 0:
        _complete(ctx, group)
    else:
        requeue(ctx, group)


# --- the end of a group ---------------------------------------------------------------------------


def _complete(ctx: Context, group: GroupState) -> None:
    """Passes a complete group to the curators and to the table of each policy that it may serve."""
    _drop_group(ctx, group)
    try:
        if group.task_idx >= 0 and ctx.curation.heeds_outcomes:
            versions = {name: policy.newest for name, policy in ctx.state.policies.items()}
            ctx.curation.observe(outcome_of(group, versions))
        for name in group.undecided:
            _value(ctx, name, group)
    except ComponentError as err:
        end_run(ctx, str(err), is_failure=True)


def _value(ctx: Context, name: str, group: GroupState) -> None:
    policy = ctx.state.policies[name]
    worth = ctx.valuations[name].value(name, group)
    if isinstance(worth, Discard):
        if worth.by:
            policy.filtered_by[worth.by] = policy.filtered_by.get(worth.by, 0) + 1
        decide_fate(ctx, name, group.id, worth.fate, num_tokens=_num_tokens(group, name), by=worth.by)
        return
    policy.ready[group.id] = worth
    if name in ctx.oldest_ready:
        ctx.oldest_ready[name] = min(ctx.oldest_ready[name], worth.oldest_version)
    note_outcome(policy, "ready")
    policy.unusable_in_a_row = 0
    policy.unusable_s = 0.0
    policy.failed_in_a_row = 0
    policy.failed_on.clear()
    # The remover sees the new group too, and may evict it.
    for evicted in ctx.parts[name].remove(policy.ready):
        decide_fate(ctx, name, evicted, "evicted", num_tokens=policy.ready[evicted].num_tokens)
    if len(policy.ready) >= ctx.num_fresh(name):
        ctx.wake(f"batch/{name}")


def _num_tokens(group: GroupState, name: str) -> int:
    facts = [episode.facts for episode in group.episodes if episode.facts is not None]
    return sum(meta.num_tokens for f in facts for meta in f.trajectories if meta.policy == name)


def _drop_group(ctx: Context, group: GroupState) -> None:
    state = ctx.state
    del state.groups[group.id]
    ctx.drop_fresh(group.id, group.preferred_worker)
    state.retries.pop(group.id, None)
    for episode_idx, episode in enumerate(group.episodes):
        if episode.status == "running":
            drop_lease(ctx, f"{group.id}.{episode_idx}.{episode.attempt}")
    if group.task_idx < 0:
        state.pushed.pop(group.source_idx, None)


def drop_lease(ctx: Context, lease_id: str) -> None:
    """Removes a lease. Does nothing if it is not open."""
    lease = ctx.state.leases.pop(lease_id, None)
    worker = ctx.state.workers.get(lease.worker_id) if lease is not None else None
    if worker is not None:
        worker.leases.pop(lease_id, None)
        if strikes.is_set_aside(worker) or ctx.plan.eval.max_per_service:
            ctx.wake(f"worker/{worker.id}")  # its trial lease or one of few evaluations is over


def requeue(ctx: Context, group: GroupState) -> None:
    """Updates the queues of groups with pending episodes after a change of this group."""
    pending = [episode.attempt for episode in group.episodes if episode.status == "pending"]
    # Attempt 0 has never been leased; a later attempt is a retry.
    if 0 in pending:
        ctx.add_fresh(group.id)
    else:
        ctx.drop_fresh(group.id, group.preferred_worker)
    if any(pending):
        ctx.state.retries[group.id] = None
    else:
        ctx.state.retries.pop(group.id, None)

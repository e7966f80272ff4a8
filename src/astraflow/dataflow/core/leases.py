"""Which service may run which episode: services come and go; leases are issued, expire and are issued again.

The order of issue is:

1. evaluation that the service can serve;
2. episodes that wait for another attempt;
3. the rest of groups that began on this service, or on one that is gone;
4. the rest of a group that began on another service and that holds up a trainer;
5. new draws, while some policy has room;
6. the rest of groups that began on other services.

So a group stays on one service, which computes its prefix once, unless others would be idle, or a trainer
waits for that group alone: where complete groups are evicted, there is always something new to draw, and its
service may be alive and ask for nothing. An episode that failed on a service waits for another one (see
`conduct`).
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from astraflow.dataflow.core import conduct, evals, groups
from astraflow.dataflow.core.commands import (
    AddWorker,
    DropWorker,
    ExpireLeases,
    IssueLeases,
    LeaseIssued,
    LeaseView,
)
from astraflow.dataflow.core.context import Context, derived_seed, refuse
from astraflow.dataflow.core.fates import check_starved
from astraflow.dataflow.core.state import GroupState, LeaseState, WorkerState
from astraflow.dataflow.core.tables import holds_up, why_no_room
from astraflow.types import Failure, ServedVersions, WaitReason
from astraflow.types.bounds import as_label

__all__ = ["add_worker", "drop_worker", "expire", "issue", "view_of", "why_none"]

_Served = dict[str, frozenset[int]]


def add_worker(ctx: Context, command: AddWorker) -> None:
    """A rollout service joins. One that joins again under the same id keeps its leases."""
    worker = ctx.state.workers.get(command.worker_id)
    ctx.lost_homes.discard(command.worker_id)
    ctx.state.workers[command.worker_id] = WorkerState(
        id=command.worker_id,
        name=command.name,
        hosts=command.hosts,
        leases=worker.leases if worker else {},
        conduct=worker.conduct if worker else conduct.starts_with(ctx, command.name),
        active_s=worker.active_s if worker else -math.inf,
        key=command.key,
    )


def drop_worker(ctx: Context, command: DropWorker) -> None:
    """A rollout service is gone; its leases are issued again as the next attempts."""
    worker = ctx.state.workers.get(command.worker_id)
    if worker is None:
        return
    _fail_all(ctx, tuple(worker.leases), Failure(error_class="worker_lost", message=command.reason))
    del ctx.state.workers[command.worker_id]
    conduct.remember(ctx, worker)
    ctx.wake("leases")  # others may now run what was left to it
    if command.worker_id in ctx.fresh_at:
        ctx.lost_homes.add(command.worker_id)
    check_starved(ctx)


def expire(ctx: Context, command: ExpireLeases) -> None:
    """Leases whose heartbeats stopped are issued again as the next attempts."""
    if command.never_arrived:
        failure = Failure(error_class="answer_lost", message="the service never got the lease")
    else:
        failure = Failure(error_class="lease_expired", message="its heartbeats stopped")
    _fail_all(ctx, command.lease_ids, failure, is_blamed=not command.never_arrived)
    check_starved(ctx)


def _fail_all(ctx: Context, lease_ids: Sequence[str], failure: Failure, *, is_blamed: bool = True) -> None:
    """Ends attempts of which their service told nothing."""
    for lease_id in lease_ids:
        lease = ctx.state.leases.get(lease_id)
        if lease is not None:
            groups.fail_attempt(ctx, lease, failure, is_blamed=is_blamed, is_lost=True)


def issue(ctx: Context, command: IssueLeases) -> tuple[LeaseView, ...]:
    """Up to `num_free` leases that a service with these versions may run now."""
    worker = ctx.state.workers.get(command.worker_id)
    if worker is None:
        refuse("unknown_worker", f"worker {command.worker_id!r} is not registered; register again", 404)
    served = _served(command.served)
    views: list[LeaseView] = []
    for lease in _leases(ctx, worker, served, conduct.num_allowed(ctx, worker, command.num_free)):
        lease.strikes = worker.conduct.strikes
        worker.active_s = ctx.now_s
        worker.leases[lease.id] = None
        ctx.state.leases[lease.id] = lease
        ctx.emit(
            LeaseIssued(lease_id=lease.id, kind=lease.kind, group_id=lease.group_id, worker_id=worker.id)
        )
        views.append(_view(ctx, lease))
    return tuple(views) if ctx.is_running else ()


def _served(served: Sequence[ServedVersions]) -> _Served:
    return {entry.policy: frozenset(entry.versions) for entry in served}


def _leases(ctx: Context, worker: WorkerState, served: _Served, num_free: int) -> Iterator[LeaseState]:
    """Leases in the order of issue, each booked before it is given out; at most `num_free`."""
    num_left = num_free
    for round_ in tuple(ctx.state.rounds.values()):
        while num_left > 0 and evals.can_serve(round_, served):
            episode_idx = evals.next_episode(ctx, round_, worker)
            if episode_idx < 0:
                break
            episode = round_.episodes[episode_idx]
            episode.status = "running"
            conduct.note_holder(episode, worker)
            num_left -= 1
            lease_id = f"e{round_.id}.{episode_idx}.{episode.attempt}"
            yield LeaseState(lease_id, "eval", worker.id, round_.id, episode_idx, episode.attempt)
    if num_left <= 0 or _why_not_train(ctx, served) is not None:
        return
    for group in _groups(ctx, worker):
        for lease in _pending(ctx, group, worker, num_left):
            num_left -= 1
            yield lease
        groups.requeue(ctx, group)
        if num_left == 0:
            return


def _groups(ctx: Context, worker: WorkerState) -> Iterator[GroupState]:
    """Groups with pending episodes in the order of issue; new ones are drawn when they are asked for."""
    state = ctx.state
    for group_id in tuple(state.retries):
        yield state.groups[group_id]
    # With hundreds of services, nearly all groups began on another one. They are looked at only if the home
    # of some group is gone.
    for group_id in tuple(state.fresh if ctx.lost_homes else ctx.fresh_at.get(worker.id, ())):
        if not _is_elsewhere(ctx, group_id, worker):
            yield state.groups[group_id]
    for name in ctx.plan.policies:
        group_id = holds_up(ctx, name)
        if group_id in state.fresh and _is_elsewhere(ctx, group_id, worker):
            yield state.groups[group_id]
    while ctx.is_running and (group := groups.draw(ctx, worker.id)) is not None:
        yield group
    for group_id in tuple(state.fresh):
        if ctx.is_running and _is_elsewhere(ctx, group_id, worker):
            yield state.groups[group_id]


def _is_elsewhere(ctx: Context, group_id: int, worker: WorkerState) -> bool:
    """Whether the group began on another service that is still there."""
    home = ctx.state.groups[group_id].home
    return home != worker.id and home in ctx.state.workers


def _pending(ctx: Context, group: GroupState, worker: WorkerState, limit: int) -> Iterator[LeaseState]:
    for episode_idx, episode in enumerate(group.episodes):
        if limit == 0:
            return
        if episode.status != "pending" or conduct.is_left_to_others(ctx, episode, worker):
            continue
        limit -= 1
        episode.status = "running"
        conduct.note_holder(episode, worker)
        lease_id = f"{group.id}.{episode_idx}.{episode.attempt}"
        yield LeaseState(lease_id, "train", worker.id, group.id, episode_idx, episode.attempt)


def _view(ctx: Context, lease: LeaseState) -> LeaseView:
    if lease.kind == "eval":
        return evals.view(ctx, lease)
    group = ctx.state.groups[lease.group_id]
    # All attempts share the seed: where the weights are still the same, a retry samples the same episode, so
    # that losing attempts does not favour short ones.
    return LeaseView(
        id=lease.id,
        kind="train",
        group_id=group.id,
        episode_idx=lease.episode_idx,
        attempt=lease.attempt,
        source=group.source,
        task_idx=group.source_idx,
        seed=derived_seed(ctx.plan.seed, "train", group.id, lease.episode_idx),
    )


def view_of(ctx: Context, lease_id: str) -> LeaseView | None:
    """A lease that is out, as it was issued."""
    lease = ctx.state.leases.get(lease_id)
    return _view(ctx, lease) if lease else None


def _why_not_train(ctx: Context, served: _Served) -> WaitReason | None:
    """Why a service with these versions may run no training episode; None if it may."""
    if not ctx.is_running:
        return WaitReason(kind="run_over", detail=as_label(ctx.state.reason))
    for name, plan in ctx.plan.policies.items():
        newest = ctx.state.policies[name].newest
        if newest < 0:
            return WaitReason(kind="unpublished", policy=name, version=0)
        oldest = max(0, newest - plan.table.engine_lag)
        have = max(served.get(name, ()), default=-1)
        if have < oldest:
            return WaitReason(kind="behind", policy=name, version=oldest, served=have)
    return None


def why_none(ctx: Context, served: Sequence[ServedVersions], worker_id: str = "") -> tuple[WaitReason, ...]:
    """Why a service with these versions gets no lease; empty if it may have one."""
    reason = _why_not_train(ctx, _served(served)) or _why_set_aside(ctx, worker_id)
    if reason is not None:
        return (reason,)
    if ctx.state.fresh or ctx.state.retries:
        return ()
    full = [why_no_room(ctx, name) for name in ctx.plan.policies]
    return tuple(dict.fromkeys(itertools.chain(*full))) if all(full) else ()


def _why_set_aside(ctx: Context, worker_id: str) -> WaitReason | None:
    worker = ctx.state.workers.get(worker_id)
    if worker is None or not conduct.is_set_aside(worker):
        return None
    return WaitReason(
        kind="set_aside", num=worker.conduct.strikes, detail=as_label(worker.conduct.last_failure)
    )

"""Decides which service may run which episode: issues leases, and issues them again when they expire.

Leases are issued in this order:

1. evaluation episodes that the service can run;
2. episodes that wait for another attempt;
3. the remaining episodes of groups that began on this service, or on one that is gone;
4. the remaining episodes of a group that began on another service and now holds up a trainer;
5. new draws, while some policy has room;
6. the remaining episodes of groups that began on other services.

A group therefore stays on one service, which computes the prefix once. There are two exceptions: the other
services would be idle (6), or a trainer waits for that group alone (4). Step 4 comes before new draws because
a table that evicts complete groups always has room for another draw, and the group's own service may be alive
without asking for leases. An episode that failed on a service waits for another one (see `strikes`).
"""

import itertools
import math
from collections.abc import Iterator, Sequence

from astraflow.dataflow.core import evals, groups, strikes
from astraflow.dataflow.core.commands import (
    AddWorker,
    DropWorker,
    ExpireLeases,
    IssueLeases,
    LeaseIssued,
    LeaseView,
)
from astraflow.dataflow.core.context import Context, derive_seed, refuse
from astraflow.dataflow.core.fates import check_starved
from astraflow.dataflow.core.state import GroupState, LeaseState, WorkerState
from astraflow.dataflow.core.tables import holds_up, why_no_room
from astraflow.types import Failure, ServedVersions, WaitReason
from astraflow.types.bounds import as_label

__all__ = ["add_worker", "drop_worker", "expire", "issue", "view_lease", "why_none"]

_Served = dict[str, frozenset[int]]


def add_worker(ctx: Context, command: AddWorker) -> None:
    """Adds a rollout service. A service that joins again under the same id keeps its leases."""
    worker = ctx.state.workers.get(command.worker_id)
    ctx.gone_workers.discard(command.worker_id)
    ctx.state.workers[command.worker_id] = WorkerState(
        id=command.worker_id,
        name=command.name,
        hosts=command.hosts,
        leases=worker.leases if worker else {},
        failures=worker.failures if worker else strikes.take_over_streak(ctx, command.name),
        active_s=worker.active_s if worker else -math.inf,
        key=command.key,
    )


def drop_worker(ctx: Context, command: DropWorker) -> None:
    """Removes a rollout service. Its leases are issued again as the next attempts."""
    worker = ctx.state.workers.get(command.worker_id)
    if worker is None:
        return
    _fail_all(ctx, tuple(worker.leases), Failure(error_class="worker_lost", message=command.reason))
    del ctx.state.workers[command.worker_id]
    strikes.remember_worker(ctx, worker)
    ctx.wake("leases")  # other services may now run the groups that preferred this one
    if command.worker_id in ctx.fresh_by_worker:
        ctx.gone_workers.add(command.worker_id)
    check_starved(ctx)


def expire(ctx: Context, command: ExpireLeases) -> None:
    """Ends leases whose heartbeats stopped. They are issued again as the next attempts."""
    if command.never_arrived:
        failure = Failure(error_class="answer_lost", message="the service never got the lease")
    else:
        failure = Failure(error_class="lease_expired", message="its heartbeats stopped")
    _fail_all(ctx, command.lease_ids, failure, is_blamed=not command.never_arrived)
    check_starved(ctx)


def _fail_all(ctx: Context, lease_ids: Sequence[str], failure: Failure, *, is_blamed: bool = True) -> None:
    """Ends attempts whose service reported no result."""
    for lease_id in lease_ids:
        lease = ctx.state.leases.get(lease_id)
        if lease is not None:
            groups.fail_attempt(ctx, lease, failure, is_blamed=is_blamed, is_lost=True)


def issue(ctx: Context, command: IssueLeases) -> tuple[LeaseView, ...]:
    """Issues up to `num_free` leases that a service with these versions may run now."""
    worker = ctx.state.workers.get(command.worker_id)
    if worker is None:
        refuse("unknown_worker", f"worker {command.worker_id!r} is not registered; register again", 404)
    served = _versions_by_policy(command.served)
    views: list[LeaseView] = []
    # `_grant_leases` is lazy: it draws a new group only after the leases before it are recorded here.
    for lease in _grant_leases(ctx, worker, served, strikes.num_allowed(ctx, worker, command.num_free)):
        lease.strikes = worker.failures.strikes
        worker.active_s = ctx.now_s
        worker.leases[lease.id] = None
        ctx.state.leases[lease.id] = lease
        ctx.emit(
            LeaseIssued(lease_id=lease.id, kind=lease.kind, group_id=lease.group_id, worker_id=worker.id)
        )
        views.append(_make_view(ctx, lease))
    # A draw may end the run, for example if a curator fails. All leases are void then, also those above.
    return tuple(views) if ctx.is_running else ()


def _versions_by_policy(served: Sequence[ServedVersions]) -> _Served:
    return {entry.policy: frozenset(entry.versions) for entry in served}


def _grant_leases(ctx: Context, worker: WorkerState, served: _Served, num_free: int) -> Iterator[LeaseState]:
    """Yields at most `num_free` leases in the order of issue. The state of each episode is changed first."""
    num_left = num_free
    num_evals_left = num_free
    if most := ctx.plan.eval.max_per_service:
        num_evals_left = most - sum(ctx.state.leases[lease_id].kind == "eval" for lease_id in worker.leases)
    for round_ in tuple(ctx.state.rounds.values()):
        while min(num_left, num_evals_left) > 0 and evals.can_serve(round_, served):
            episode_idx = evals.next_episode(ctx, round_, worker)
            if episode_idx < 0:
                break
            episode = round_.episodes[episode_idx]
            episode.status = "running"
            strikes.note_holder(episode, worker)
            num_left -= 1
            num_evals_left -= 1
            lease_id = f"e{round_.id}.{episode_idx}.{episode.attempt}"
            yield LeaseState(lease_id, "eval", worker.id, round_.id, episode_idx, episode.attempt)
    # An evaluation needs its exact versions only, so a service that lags too far behind to train may run it.
    if num_left <= 0 or _why_not_train(ctx, served) is not None:
        return
    for group in _find_groups(ctx, worker):
        for lease in _grant_pending(ctx, group, worker, num_left):
            num_left -= 1
            yield lease
        groups.requeue(ctx, group)
        if num_left == 0:
            return


def _find_groups(ctx: Context, worker: WorkerState) -> Iterator[GroupState]:
    """Yields groups with pending episodes in the order of issue. New groups are drawn on demand."""
    state = ctx.state
    for group_id in tuple(state.retries):
        yield state.groups[group_id]
    # With hundreds of services, nearly all groups began on another one. A pass over all of them is needed
    # only if the preferred service of some group is gone.
    for group_id in tuple(state.fresh if ctx.gone_workers else ctx.fresh_by_worker.get(worker.id, ())):
        if not _belongs_elsewhere(ctx, group_id, worker):
            yield state.groups[group_id]
    for name in ctx.plan.policies:
        group_id = holds_up(ctx, name)
        if group_id in state.fresh and _belongs_elsewhere(ctx, group_id, worker):
            yield state.groups[group_id]
    while ctx.is_running and (group := groups.draw(ctx, worker.id)) is not None:
        yield group
    for group_id in tuple(state.fresh):
        if ctx.is_running and _belongs_elsewhere(ctx, group_id, worker):
            yield state.groups[group_id]


def _belongs_elsewhere(ctx: Context, group_id: int, worker: WorkerState) -> bool:
    """Whether the group began on another service that is still there."""
    preferred = ctx.state.groups[group_id].preferred_worker
    return preferred != worker.id and preferred in ctx.state.workers


def _grant_pending(ctx: Context, group: GroupState, worker: WorkerState, limit: int) -> Iterator[LeaseState]:
    """Yields at most `limit` leases of the group's pending episodes."""
    for episode_idx, episode in enumerate(group.episodes):
        if limit == 0:
            return
        if episode.status != "pending" or strikes.is_left_to_others(ctx, episode, worker):
            continue
        limit -= 1
        episode.status = "running"
        strikes.note_holder(episode, worker)
        lease_id = f"{group.id}.{episode_idx}.{episode.attempt}"
        yield LeaseState(lease_id, "train", worker.id, group.id, episode_idx, episode.attempt)


def _make_view(ctx: Context, lease: LeaseState) -> LeaseView:
    if lease.kind == "eval":
        return evals.view(ctx, lease)
    group = ctx.state.groups[lease.group_id]
    # All attempts share the seed, so a retry under the same weights samples the same episode. With new seeds,
    # lost attempts would bias the data toward short episodes, which are lost less often.
    return LeaseView(
        id=lease.id,
        kind="train",
        group_id=group.id,
        episode_idx=lease.episode_idx,
        attempt=lease.attempt,
        source=group.source,
        task_idx=group.source_idx,
        seed=derive_seed(ctx.plan.seed, "train", group.id, lease.episode_idx),
    )


def view_lease(ctx: Context, lease_id: str) -> LeaseView | None:
    """An open lease as it was issued, or None."""
    lease = ctx.state.leases.get(lease_id)
    return _make_view(ctx, lease) if lease else None


def _why_not_train(ctx: Context, served: _Served) -> WaitReason | None:
    """Why a service with these versions may not run training episodes, or None if it may."""
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
    """Why a service with these versions gets no lease. Empty if it can get one."""
    reason = _why_not_train(ctx, _versions_by_policy(served)) or _why_set_aside(ctx, worker_id)
    if reason is not None:
        return (reason,)
    if ctx.state.fresh or ctx.state.retries:
        return ()
    # No pending episode is left, so only a new draw could give a lease. It needs room in some policy.
    full = [why_no_room(ctx, name) for name in ctx.plan.policies]
    return tuple(dict.fromkeys(itertools.chain(*full))) if all(full) else ()


def _why_set_aside(ctx: Context, worker_id: str) -> WaitReason | None:
    worker = ctx.state.workers.get(worker_id)
    if worker is None or not strikes.is_set_aside(worker):
        return None
    return WaitReason(
        kind="set_aside", num=worker.failures.strikes, detail=as_label(worker.failures.last_failure)
    )

"""Decides whether a policy has room for another group, and which groups a batch takes.

The batch of a step never changes. It is kept until the step is released, and every request for the step gets
the same batch. There is one exception, which a person must request: a batch that cannot be trained on is
dropped. The oldest uncommitted step then loses its batch. Steps that were taken ahead lose theirs too,
because their batches were made for weights that the oldest step would have produced. They all get other ones.

"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from astraflow.algorithms.group_statistics import are_equal
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import BatchDropped, BatchTaken, BatchView, DropBatch, TakeBatch
from astraflow.dataflow.core.context import Context, refuse
from astraflow.dataflow.core.fates import decide_fate, end_run, num_live
from astraflow.dataflow.core.finite import finite_sum
from astraflow.dataflow.core.state import BatchState, PolicyState, ReadyGroup, ReplayEntry, SessionState
from astraflow.errors import ComponentError, FencedError
from astraflow.protocols import TableView, TakenBatch
from astraflow.types import BatchTotals, DropReply, WaitReason
from astraflow.types.bounds import as_label
from astraflow.types.wait_words import reasons_text

__all__ = [
    "drop_batch",
    "has_too_few",
    "holds_up",
    "normalize_advantages",
    "policies_with_room",
    "require_session",
    "take_batch",
    "why_no_room",
]

_EPSILON = 1e-6
"""Added to the divisor of advantages."""


def policies_with_room(ctx: Context) -> list[str]:
    """The policies whose ticket the next drawn group takes. Empty if no group may be drawn now.

    Raises: ComponentError if a limiter fails.
    """
    if _who_holds_up_all(ctx):
        return []
    return [name for name in ctx.plan.policies if _why_full(ctx, name) is None]


def why_no_room(ctx: Context, name: str) -> tuple[WaitReason, ...]:
    """Why the policy has no room for another group now. Empty if it has.

    If a limiter fails, the reason is its error. The next draw then ends the run.
    """
    try:
        full = _why_full(ctx, name)
        return _who_holds_up_all(ctx) if full is None else (full,)
    except ComponentError as err:
        return (WaitReason(kind="limiter_failed", policy=name, detail=as_label(str(err))),)


def _who_holds_up_all(ctx: Context) -> tuple[WaitReason, ...]:
    """With `admission: all`, the reason why a policy that still needs groups has no room. Otherwise empty."""
    if ctx.plan.admission == "any":
        return ()
    for name in ctx.plan.policies:
        full = _why_full(ctx, name) if _needs_groups(ctx, name) else None
        if full is not None:
            return WaitReason(kind="admission_all"), full
    return ()


def _needs_groups(ctx: Context, name: str) -> bool:
    """Whether the policy needs more groups than those that are drawn already."""
    policy = ctx.state.policies[name]
    plan = ctx.plan.policies[name]
    num_later = ctx.num_steps(name) - policy.taken - 1
    num_needed = ctx.num_fresh(name) + num_later * plan.table.least_fresh
    return num_later >= 0 and num_needed > len(policy.waiting)


def has_too_few(ctx: Context, name: str) -> bool:
    """Whether no further batch can be filled, because few groups are left in the plan's epochs."""
    num_waiting = len(ctx.state.policies[name].waiting)
    return ctx.draws_left + num_waiting < ctx.num_fresh(name)


def _why_full(ctx: Context, name: str) -> WaitReason | None:
    """The reason why the policy has no room for another group now, or None if it has.

    There are three possible reasons: all groups that the policy still needs, or that the plan's epochs allow,
    are drawn; no ticket is free; or a restarted trainer repeats steps, and a group drawn now would be too
    stale even for the next batch.
    """
    policy = ctx.state.policies[name]
    plan = ctx.plan.policies[name]
    table = plan.table
    if not _needs_groups(ctx, name) or ctx.draws_left == 0:
        return WaitReason(kind="complete", policy=name)
    view = TableView(
        num_running=len(policy.waiting) - len(policy.ready),
        num_ready=len(policy.ready),
        num_in_batches=num_live(policy) - len(policy.waiting),
        num_committed=policy.committed,
        newest_version=policy.newest,
    )
    num_tickets = ctx.parts[name].tickets(view)
    if num_live(policy) >= num_tickets:
        return WaitReason(kind="tickets", policy=name, num=num_tickets)
    session = policy.session
    if session is not None:
        # Version numbers never go back, so a restarted trainer repeats old steps under new version numbers.
        # Engines still serve the versions before those, until it has published far enough.
        least_staleness = session.version_at(policy.taken) - (policy.newest - table.engine_lag)
        if least_staleness > table.max_staleness:
            return WaitReason(kind="repeats_steps", policy=name)
    return None


def holds_up(ctx: Context, name: str) -> int | None:
    """The oldest incomplete group, if the trainer waits for it alone: enough other groups for a batch are
    complete, but the sampler takes none of them. None in all other cases."""
    policy = ctx.state.policies[name]
    is_idle = policy.session is not None and policy.session.done == policy.taken
    if not is_idle or len(policy.ready) < ctx.num_fresh(name):
        return None
    return next((group_id for group_id in policy.waiting if group_id not in policy.ready), None)


def require_session(policy: PolicyState, name: str, epoch: int) -> SessionState:
    """Returns the current session. Raises: FencedError if `epoch` is not its number."""
    if policy.session is None or epoch != policy.epoch:
        raise FencedError(
            f"policy {name!r}: session {epoch} is over, session {policy.epoch} holds the policy"
        )
    return policy.session


def take_batch(ctx: Context, command: TakeBatch) -> BatchView | None:
    """Returns the batch of a step, or None if there is none yet. Only a step's first take decides anything.

    Raises: RefusedError, FencedError.
    """
    policy = ctx.policy(command.policy)
    name = command.policy
    step = command.step
    session = require_session(policy, name, command.epoch)
    num_steps = ctx.num_steps(name)
    if not ctx.is_running:
        refuse("finished", f"the run is over: {ctx.state.reason}")
    if step >= num_steps:
        refuse("finished", f"policy {name!r} takes {num_steps} steps; there is no step {step + 1}")
    if step < policy.released:
        refuse(
            "released",
            f"policy {name!r}: step {step + 1} was released, the first {policy.released} steps are gone",
        )
    if step < session.base_step or step > policy.taken:
        refuse(
            "out_of_order",
            f"policy {name!r}: step {step + 1} is not next; the session began after {session.base_step} "
            f"steps and {policy.taken} steps have their batch",
        )
    # A repeated request, or a restarted trainer that repeats the step, gets the same batch.
    if step in policy.batches:
        return _make_batch_view(name, policy.batches[step], is_redo=step < policy.committed)
    # The session must publish its first version before it takes anything: engines generate with that version.
    # It may take one step ahead of the one that it trains. More would only make the groups staler.
    if policy.newest < session.base_version or step > session.done + 1:
        return None
    return _take_new_batch(ctx, name, session.version_at(step))


def _take_new_batch(ctx: Context, name: str, version: int) -> BatchView | None:
    """Chooses the batch of the next step. None if the sampler takes none, or if the run ends here."""
    policy = ctx.state.policies[name]
    # First, so that the sampler sees only groups that it may take.
    num_stale = _drop_stale(ctx, name, version)
    try:
        picked = ctx.parts[name].pick(policy.waiting.keys(), policy.ready, ctx.num_fresh(name))
    except ComponentError as err:
        end_run(ctx, str(err), is_failure=True)
        return None
    if picked is None:
        _end_if_stuck(ctx, name)
        return None
    batch = _make_batch(ctx, name, picked, version)
    policy.batches[batch.step] = batch
    policy.num_replayed += len(batch.replayed)
    policy.taken += 1
    policy.outcomes.clear()
    policy.changed_s = ctx.now_s
    ctx.emit(
        BatchTaken(
            policy=name,
            step=batch.step,
            trainer_version=version,
            group_ids=picked,
            staleness=tuple(batch.staleness),
            replayed_ids=tuple(group.group_id for group in batch.replayed),
            replayed_staleness=tuple(batch.replayed_staleness),
        )
    )
    taken = TakenBatch(batch.step, version, picked, tuple(batch.staleness), num_stale)
    try:
        ctx.parts[name].observe(taken)
    except ComponentError as err:
        end_run(ctx, str(err), is_failure=True)
        return None
    return _make_batch_view(name, batch, is_redo=False)


def _make_batch(ctx: Context, name: str, picked: Sequence[int], version: int) -> BatchState:
    """Moves the picked groups from the table into a batch, together with replayed groups."""
    policy = ctx.state.policies[name]
    table = ctx.plan.policies[name].table
    fresh = [policy.ready.pop(group_id) for group_id in picked]
    for group_id in picked:
        del policy.waiting[group_id]
    # In this order: a batch must not replay the groups that it takes for the first time.
    again = _pick_replayed(ctx, name, version)
    _keep_for_replay(policy, table, fresh)
    both = normalize_advantages((*fresh, *again), table.normalization)
    return BatchState(
        step=policy.taken,
        trainer_version=version,
        groups=both[: len(fresh)],
        staleness=[version - group.oldest_version for group in fresh],
        replayed=both[len(fresh) :],
        replayed_staleness=[version - group.oldest_version for group in again],
    )


def _drop_stale(ctx: Context, name: str, version: int) -> int:
    """Drops the ready groups that are too stale for a batch of this version. Returns their number."""
    policy = ctx.state.policies[name]
    oldest = version - ctx.plan.policies[name].table.max_staleness
    if ctx.oldest_ready.get(name, -1) >= oldest:
        return 0  # without a look at each group: a waiting trainer asks after every new one
    stale = [group for group in policy.ready.values() if group.oldest_version < oldest]
    for group in stale:
        staleness = version - group.oldest_version
        decide_fate(ctx, name, group.group_id, "stale", num_tokens=group.num_tokens, staleness=staleness)
    rest = (group.oldest_version for group in policy.ready.values())
    ctx.oldest_ready[name] = min(rest, default=version)
    return len(stale)


def _end_if_stuck(ctx: Context, name: str) -> None:
    """Ends the run with a failure if the next step can never get a batch.

    That is the case if every group is complete, the trainer waits, the sampler takes no batch, and the
    limiter lets no group be drawn. Nothing would then ever change the table.
    """
    policy = ctx.state.policies[name]
    is_idle = policy.session is not None and policy.session.done == policy.taken
    if not is_idle or len(policy.ready) < len(policy.waiting) or has_too_few(ctx, name):
        return
    full = why_no_room(ctx, name)
    if full and full[0].kind != "admission_all":
        end_run(
            ctx,
            f"policy {name!r} will never get its batch of step {policy.taken + 1}: {len(policy.ready)} "
            f"groups are ready and none is running, {ctx.num_fresh(name)} make a batch, the "
            f"{ctx.parts[name].sampler_name} takes none, and no more may be drawn ({reasons_text(full)}); "
            "look at table.limiter and table.sampler",
            is_failure=True,
        )


def _pick_replayed(ctx: Context, name: str, version: int) -> list[ReadyGroup]:
    """Picks groups of earlier steps for the next batch that are neither too stale nor used up."""
    policy = ctx.state.policies[name]
    table = ctx.plan.policies[name].table
    for group_id, entry in tuple(policy.replay.items()):
        if version - entry.group.oldest_version > table.max_staleness:
            del policy.replay[group_id]
    picked = table.replay.pick(
        {group_id: entry.group for group_id, entry in policy.replay.items()},
        table.max_replayed,
        seed=f"{ctx.plan.seed}/replay/{name}/{policy.taken}",
    )
    groups: list[ReadyGroup] = []
    for group_id in picked:
        entry = policy.replay[group_id]
        groups.append(entry.group)
        entry.uses += 1
        if entry.uses >= table.replay.max_uses:
            del policy.replay[group_id]
    return groups


def _keep_for_replay(policy: PolicyState, table: TableConfig, groups: Sequence[ReadyGroup]) -> None:
    if not table.max_replayed:
        return
    for group in groups:
        policy.replay[group.group_id] = ReplayEntry(group=group, uses=1)
    for group_id in tuple(policy.replay)[: max(0, len(policy.replay) - table.replay.size)]:
        del policy.replay[group_id]


def normalize_advantages(
    groups: Sequence[ReadyGroup], mode: Literal["none", "scale", "whiten"]
) -> list[ReadyGroup]:
    """Returns the groups with normalized advantages; the given groups don't change.

    `scale`:  A / (sqrt(mean(A^2)) + 1e-6);  `whiten`: (A - mean(A)) / (sqrt(mean(A^2) - mean(A)^2) + 1e-6);
    means over the trained tokens of samples that no rule set to zero. If all these advantages are equal,
    `whiten` makes them 0.
    """
    num = sum(group.num_trained_tokens for group in groups)
    if mode == "none" or num == 0:
        return list(groups)
    samples = (sample for group in groups for sample in group.samples if not sample.zeroed_by)
    if mode == "whiten" and are_equal([value for s in samples for _, _, value in s.advantages]):
        # The formula would divide the mean's rounding error by a deviation of 0.
        return [_shift_and_scale(group, 0.0, 0.0) for group in groups]
    mean = sum(group.advantage_sum for group in groups) / num if mode == "whiten" else 0.0
    square = sum(group.advantage_square_sum for group in groups) / num
    scale = 1.0 / (math.sqrt(max(0.0, square - mean * mean)) + _EPSILON)
    return [_shift_and_scale(group, mean, scale) for group in groups]


def _shift_and_scale(group: ReadyGroup, mean: float, scale: float) -> ReadyGroup:
    """Returns the group with advantages `(A - mean) * scale`, and with sums that match."""
    num = group.num_trained_tokens
    total = group.advantage_sum
    square = group.advantage_square_sum - 2 * mean * total + mean * mean * num
    samples = tuple(
        sample
        if sample.zeroed_by
        else msgspec.structs.replace(
            sample, advantages=tuple((s, e, (value - mean) * scale) for s, e, value in sample.advantages)
        )
        for sample in group.samples
    )
    return msgspec.structs.replace(
        group,
        samples=samples,
        advantage_sum=(total - mean * num) * scale,
        advantage_square_sum=square * scale * scale,
    )


def _make_batch_view(name: str, batch: BatchState, *, is_redo: bool) -> BatchView:
    groups = (*batch.groups, *batch.replayed)
    staleness = (*batch.staleness, *batch.replayed_staleness)
    samples = tuple(sample for group in groups for sample in group.samples)
    totals = BatchTotals(
        num_groups=len(groups),
        num_samples=len(samples),
        num_tokens=sum(g.num_tokens for g in groups),
        num_trained_tokens=sum(g.num_sampled_tokens for g in groups),
        advantage_sum=sum(g.advantage_sum for g in groups),
        advantage_square_sum=sum(g.advantage_square_sum for g in groups),
        reward_sum=finite_sum(g.reward_sum for g in groups),
    )
    return BatchView(
        policy=name,
        step=batch.step,
        trainer_version=batch.trainer_version,
        samples=samples,
        totals=totals,
        staleness_mean=sum(staleness) / len(staleness),
        staleness_max=max(staleness),
        is_redo=is_redo,
    )


# --- a batch that cannot be trained on -------------------------------------------------------------


def drop_batch(ctx: Context, command: DropBatch) -> DropReply:
    """Evicts the groups of the oldest uncommitted step and of the steps taken ahead of it.

    The session ends, because its trainer may hold a dropped batch. A repeated command is refused, because it
    names the epoch that has ended.
    """
    policy = ctx.policy(command.policy)
    name = command.policy
    step = command.step
    if not ctx.is_running:
        refuse("finished", f"the run is over: {ctx.state.reason}; no step holds a batch that is not trained")
    if command.epoch != policy.epoch:
        raise FencedError(
            f"policy {name!r}: session {policy.epoch} is the newest, not {command.epoch}; check "
            "whether its trainer still fails, then try again"
        )
    if step != policy.committed or step not in policy.batches:
        having = f"step {policy.committed + 1}" if policy.committed in policy.batches else "none now"
        refuse(
            "no_batch",
            f"policy {name!r}: the batch of step {step + 1} cannot be dropped, only that of the oldest step "
            f"that is not committed ({having})",
        )
    steps = tuple(sorted(s for s in policy.batches if s >= policy.committed))
    batches = [policy.batches.pop(s) for s in steps]
    groups = [group for batch in batches for group in batch.groups]
    for group in groups:
        policy.replay.pop(group.group_id, None)  # no committed step contains it
        decide_fate(ctx, name, group.group_id, "evicted", num_tokens=group.num_tokens)
    policy.num_replayed -= sum(len(batch.replayed) for batch in batches)
    policy.num_dropped_batches += len(steps)
    policy.taken = policy.committed
    policy.stops_at = None
    policy.session = None
    policy.epoch += 1
    policy.changed_s = ctx.now_s
    ctx.emit(BatchDropped(policy=name, steps=steps, reason=command.reason))
    ctx.wake(f"batch/{name}")  # the trainer may be waiting for the batch that was held back
    return DropReply(steps=steps, num_groups=len(groups))

"""What the core reports about itself: numbers, and who waits for whom. Nothing here changes the state."""

from collections.abc import Iterator, Sequence

from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.core.context import Context
from astraflow.dataflow.core.fates import fate_counts, main_unusable_outcome, num_live, outcomes
from astraflow.dataflow.core.finite import clamp
from astraflow.dataflow.core.state import PolicyState, ReadyGroup
from astraflow.dataflow.core.tables import why_no_room
from astraflow.types import PolicyStatus, Wait, WaitReason
from astraflow.types.waits import POOL, RUN, Party

__all__ = ["groups_for_replay", "policy_status", "retained_payloads", "waits"]

_TYPICAL_STEPS = 9
"""Number of recent steps with which the current one is compared."""
_OVERDUE = 10.0
"""A step is overdue if it takes this many times longer than the recent ones."""
_LONG_WAIT_S = 10.0
"""After this long without a batch, the reason is how most groups were lost, if most were."""


def policy_status(ctx: Context, name: str) -> PolicyStatus:
    """The status of one policy."""
    policy = ctx.policy(name)
    plan = ctx.plan.policies[name]
    table = plan.table
    parts = ctx.parts[name]
    sums = policy.episodes.metrics
    num_turns = sums["turns"].value if "turns" in sums else 0.0
    num_unread = sums["unread_calls"].value if "unread_calls" in sums else 0.0
    replays = table.max_replayed or table.replay.reserve
    return PolicyStatus(
        name=name,
        step=policy.committed,
        num_steps=ctx.num_steps(name),
        newest_version=policy.newest,
        durable_step=policy.released,
        epoch=policy.epoch,
        num_tickets=num_live(policy),
        max_tickets=parts.max_tickets,
        num_running_groups=len(policy.waiting) - len(policy.ready),
        num_ready_groups=len(policy.ready),
        groups_per_batch=ctx.num_fresh(name),
        staleness_bound=table.max_staleness if replays else parts.worst_staleness,
        redone_steps=policy.redone,
        fates=fate_counts(policy),
        num_replayed_groups=policy.num_replayed,
        outcomes=outcomes(policy),
        num_episodes=policy.episodes.num,
        score_mean=clamp(policy.episodes.score_sum / max(1, policy.episodes.num)),
        unread_calls_frac=clamp(num_unread / max(1.0, num_turns)),
    )


def waits(ctx: Context, now_s: float, started_s: float) -> tuple[Wait, ...]:
    """Who waits for whom: trainers for groups, rollout for versions or tickets, evaluation for results.

    `started_s`: when the dataflow started. No wait begins before that, so the pause before a run was
    continued doesn't count.
    """
    if not ctx.is_running:
        return ()
    found = [wait for name in ctx.plan.policies for wait in _policy_waits(ctx, name, now_s, started_s)]
    for name, version, _ in ctx.state.rounds_to_open:
        missing = next(other for other, p in ctx.state.policies.items() if p.newest < 0)
        found.append(
            Wait(
                who=Party(kind="eval", name=name),
                whom=Party(kind="trainer", name=missing),
                reasons=(WaitReason(kind="eval_version", policy=missing, version=version),),
                since_s=max(ctx.state.policies[name].changed_s, started_s),
            )
        )
    for round_ in ctx.state.rounds.values():
        num_episodes = len(round_.episodes)
        reason = WaitReason(
            kind="eval_episodes",
            name=round_.eval_set,
            num=num_episodes - round_.num_open,
            total=num_episodes,
            pinned=tuple(round_.pinned.items()),
        )
        who = Party(kind="eval", name=round_.policy)
        found.append(Wait(who=who, whom=POOL, reasons=(reason,), since_s=max(round_.opened_s, started_s)))
    return tuple(found)


def _policy_waits(ctx: Context, name: str, now_s: float, started_s: float) -> Iterator[Wait]:
    policy = ctx.state.policies[name]
    trainer = Party(kind="trainer", name=name)
    session = policy.session
    since_s = max(policy.changed_s, started_s)
    if session is None:
        if policy.committed < ctx.num_steps(name) or policy.newest < 0:
            reason = WaitReason(kind="not_attached", policy=name)
            yield Wait(who=RUN, whom=trainer, reasons=(reason,), since_s=since_s)
        return
    if policy.newest < session.base_version:
        reason = WaitReason(kind="unpublished", policy=name, version=session.base_version)
        yield Wait(who=POOL, whom=trainer, reasons=(reason,), since_s=max(session.since_s, started_s))
        return
    if policy.taken < ctx.num_steps(name) and session.done == policy.taken:
        reasons = _why_no_batch(ctx, name, now_s - since_s)
        yield Wait(who=trainer, whom=POOL, reasons=reasons, since_s=since_s)
    elif policy.committed < ctx.num_steps(name) and (full := why_no_room(ctx, name)):
        reasons = (*_overdue(policy, name, now_s - since_s), *full)
        yield Wait(who=POOL, whom=trainer, reasons=reasons, since_s=since_s)


def _why_no_batch(ctx: Context, name: str, waited_s: float) -> tuple[WaitReason, ...]:
    """Why the trainer has no batch for the next step."""
    policy = ctx.state.policies[name]
    main = WaitReason(
        kind="groups",
        policy=name,
        step=policy.taken,
        num=len(policy.ready),
        total=ctx.num_fresh(name),
    )
    if waited_s >= _LONG_WAIT_S and (found := main_unusable_outcome(policy)):
        outcome, total = found
        main = WaitReason(
            kind="lost_groups",
            policy=name,
            step=policy.taken,
            num=outcome.num,
            total=total,
            seconds=waited_s,
            fate=outcome.fate,
            name=outcome.by,
        )
    if len(policy.ready) == len(policy.waiting) and (full := why_no_room(ctx, name)):
        return main, WaitReason(kind="none_running", policy=name), *full
    return (main,)


def _overdue(policy: PolicyState, name: str, busy_s: float) -> tuple[WaitReason, ...]:
    """The reason that a trainer has been silent for much longer than its recent steps took; otherwise empty.

    A trainer sends nothing while it trains, so the core cannot know whether it is still alive.
    """
    recent = policy.records[-_TYPICAL_STEPS:]
    if len(recent) < 2:
        return ()
    usual_s = (recent[-1].at_s - recent[0].at_s) / (len(recent) - 1)
    if busy_s < max(_LONG_WAIT_S, _OVERDUE * usual_s):
        return ()
    return (WaitReason(kind="overdue", policy=name, seconds=busy_s, usual_s=usual_s),)


def groups_for_replay(ctx: Context) -> frozenset[int]:
    """Groups that a later batch of some policy may replay."""
    policies = ctx.state.policies.values() if ctx.is_running else ()
    return frozenset(group_id for policy in policies for group_id in policy.replay)


def retained_payloads(ctx: Context) -> Iterator[PayloadRef]:
    """Every trajectory that may still be served: of open, ready and replayable groups, and of kept
    batches."""
    for group in ctx.state.groups.values():
        for episode in group.episodes:
            if episode.facts is not None:
                yield from (meta.payload for meta in episode.facts.trajectories)
    for policy in ctx.state.policies.values():
        yield from _payloads([*policy.ready.values()])
        for batch in policy.batches.values():
            yield from _payloads(batch.groups)
            yield from _payloads(batch.replayed)
        yield from _payloads([entry.group for entry in policy.replay.values()])


def _payloads(groups: Sequence[ReadyGroup]) -> Iterator[PayloadRef]:
    return (sample.payload for group in groups for sample in group.samples)

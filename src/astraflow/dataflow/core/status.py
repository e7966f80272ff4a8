"""What the core can tell about itself: figures, and who waits for whom. Nothing here changes the state."""

from collections.abc import Iterator, Sequence

from astraflow.dataflow.core.commands import PayloadRef
from astraflow.dataflow.core.context import Context
from astraflow.dataflow.core.fates import fate_counts, num_live, outcomes_text
from astraflow.dataflow.core.finite import bounded
from astraflow.dataflow.core.state import PolicyState, ReadyGroup
from astraflow.dataflow.core.tables import why_no_room
from astraflow.types import PolicyStatus, Wait
from astraflow.types.bounds import as_label

__all__ = ["OVERDUE", "groups_for_replay", "policy_status", "retained_payloads", "waits"]

OVERDUE = "it is overdue"
"""How the wait for a trainer begins that takes much longer than its steps took."""
_TYPICAL_STEPS = 9
"""Steps whose times are compared with that of the present one."""
_OVERDUE = 10.0
"""A step that takes this many times longer than those before is a surprise."""
_LONG_WAIT_S = 10.0
"""A trainer that has waited this long is told why most groups gave nothing to train on, if they did not."""


def policy_status(ctx: Context, name: str) -> PolicyStatus:
    """One policy's figures."""
    policy = ctx.policy(name)
    plan = ctx.plan.policies[name]
    table = plan.table
    parts = ctx.parts[name]
    replays = table.max_replayed or table.replay.reserve
    return PolicyStatus(
        name=name,
        step=policy.committed,
        num_steps=plan.num_steps,
        newest_version=policy.newest,
        durable_step=policy.released,
        epoch=policy.epoch,
        num_tickets=num_live(policy),
        max_tickets=parts.max_tickets,
        num_running_groups=len(policy.waiting) - len(policy.ready),
        num_ready_groups=len(policy.ready),
        groups_per_batch=table.batch_groups,
        staleness_bound=table.max_staleness if replays else parts.worst_staleness,
        redone_steps=policy.redone,
        fates=fate_counts(policy),
        num_replayed_groups=policy.num_replayed,
        outcomes={as_label(outcome): float(num) for outcome, num in policy.outcomes.items()},
        num_episodes=policy.episodes.num,
        score_mean=bounded(policy.episodes.score_sum / max(1, policy.episodes.num)),
    )


def waits(ctx: Context, now_s: float) -> tuple[Wait, ...]:
    """What waits for what: trainers for groups, rollout for versions or tickets, evaluation for results.

    `since_s` is 0 for what nothing has happened to yet.
    """
    if not ctx.is_running:
        return ()
    found = [wait for name in ctx.plan.policies for wait in _policy_waits(ctx, name, now_s)]
    for name, version, _ in ctx.state.rounds_to_open:
        missing = [other for other, p in ctx.state.policies.items() if p.newest < 0]
        found.append(
            Wait(
                who=f"eval of {name}",
                whom=f"trainer {missing[0]}",
                what=f"evaluation of version {version} needs version 0 of {missing[0]}",
                since_s=ctx.state.policies[name].changed_s,
            )
        )
    for round_ in ctx.state.rounds.values():
        pins = ", ".join(f"{name} {version}" for name, version in round_.pinned.items())
        num_episodes = len(round_.episodes)
        found.append(
            Wait(
                who=f"eval of {round_.policy}",
                whom="rollout",
                what=f"{round_.eval_set}: {num_episodes - round_.num_open}/{num_episodes} episodes at {pins}",
                since_s=round_.opened_s,
            )
        )
    return tuple(found)


def _policy_waits(ctx: Context, name: str, now_s: float) -> Iterator[Wait]:
    policy = ctx.state.policies[name]
    plan = ctx.plan.policies[name]
    trainer = f"trainer {name}"
    session = policy.session
    since_s = policy.changed_s
    if session is None:
        if policy.committed < plan.num_steps or policy.newest < 0:
            yield Wait(who="run", whom=trainer, what="has not attached yet", since_s=since_s)
        return
    if policy.newest < session.base_version:
        what = f"version {session.base_version} is not published"
        yield Wait(who="rollout", whom=trainer, what=what, since_s=session.since_s)
        return
    if policy.taken < plan.num_steps and session.done == policy.taken:
        num = plan.table.batch_groups
        what = f"step {policy.taken + 1}: {len(policy.ready)} groups ready, {num} make a batch"
        waited_s = now_s - since_s
        if waited_s >= _LONG_WAIT_S and (lost := outcomes_text(policy)):
            what = f"no batch for {waited_s:.0f} s: {lost}"
        if len(policy.ready) == len(policy.waiting) and (reason := why_no_room(ctx, name)):
            what = f"{what}; none is on its way, and {reason}"
        yield Wait(who=trainer, whom="rollout", what=what, since_s=since_s)
    elif policy.committed < plan.num_steps and (reason := why_no_room(ctx, name)):
        if overdue := _why_overdue(policy, now_s - since_s):
            reason = f"{overdue}; {reason}"
        yield Wait(who="rollout", whom=trainer, what=reason, since_s=since_s)


def _why_overdue(policy: PolicyState, busy_s: float) -> str:
    """That a trainer has not been heard of for much longer than its steps took; empty if it is no surprise.

    A trainer tells the dataflow nothing while it trains, so nobody knows here whether it still lives.
    """
    recent = policy.records[-_TYPICAL_STEPS:]
    if len(recent) < 2:
        return ""
    typical_s = (recent[-1].at_s - recent[0].at_s) / (len(recent) - 1)
    if busy_s < max(_LONG_WAIT_S, _OVERDUE * typical_s):
        return ""
    return (
        f"{OVERDUE}: nothing was heard of it for {busy_s:.0f} s, and the steps before took {typical_s:.1f} s "
        "each; is it, or its publisher, stopped?"
    )


def groups_for_replay(ctx: Context) -> frozenset[int]:
    """Groups that a later batch of some policy may hold again."""
    policies = ctx.state.policies.values() if ctx.is_running else ()
    return frozenset(group_id for policy in policies for group_id in policy.replay)


def retained_payloads(ctx: Context) -> Iterator[PayloadRef]:
    """Every trajectory that may still be served: those of open groups, ready groups, batches that are not
    released, and groups kept for replay."""
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

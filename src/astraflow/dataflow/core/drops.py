"""A batch that cannot be trained is given up: the one exception to "a step has one batch for ever".

Only a person asks for it. The steps that are not committed lose their batches, and get others from groups
that are ready later. Steps taken ahead go with the oldest one: their batches were made for weights that it
was to give.
"""

from astraflow.dataflow.core.commands import BatchDropped, DropBatch
from astraflow.dataflow.core.context import Context, refuse
from astraflow.dataflow.core.fates import decide_fate
from astraflow.errors import FencedError
from astraflow.types import DropReply

__all__ = ["drop_batch"]


def drop_batch(ctx: Context, command: DropBatch) -> DropReply:
    """Ends the groups of the oldest step that is not committed, and of those taken ahead of it: `evicted`.

    The session is over: its trainer may hold what is dropped. A repeated command is refused, as its epoch is
    over as well.
    """
    policy, name, step = ctx.policy(command.policy), command.policy, command.step
    if not ctx.is_running:
        refuse("finished", f"the run is over: {ctx.state.reason}; no step holds a batch that is not trained")
    if command.epoch != policy.epoch:
        raise FencedError(
            f"policy {name!r}: session {policy.epoch} is the newest, not {command.epoch}; look whether its "
            "trainer still fails, then ask again"
        )
    if step != policy.committed or step not in policy.batches:
        having = f"step {policy.committed}" if policy.committed in policy.batches else "none now"
        refuse(
            "no_batch",
            f"policy {name!r}: the batch of step {step} cannot be dropped, only that of the oldest step that "
            f"is not committed ({having})",
        )
    steps = tuple(sorted(s for s in policy.batches if s >= policy.committed))
    batches = [policy.batches.pop(s) for s in steps]
    groups = [group for batch in batches for group in batch.groups]
    for group in groups:
        policy.replay.pop(group.group_id, None)  # No step was trained on it.
        decide_fate(ctx, name, group.group_id, "evicted", num_tokens=group.num_tokens)
    policy.num_replayed -= sum(len(batch.replayed) for batch in batches)
    policy.num_dropped_batches += len(steps)
    policy.taken = policy.committed
    policy.session = None
    policy.epoch += 1
    policy.changed_s = ctx.now_s
    ctx.emit(BatchDropped(policy=name, steps=steps, reason=command.reason))
    return DropReply(steps=steps, num_groups=len(groups))

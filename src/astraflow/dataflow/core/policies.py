"""Trainers' sessions, published versions, and committed and released steps.

Version numbers never go back. Each session has an epoch, by which a trainer whose session is over is refused.
The first commit of a step decides the fate of its groups. Steps that a restarted trainer repeats are counted.
"""

from collections.abc import Sequence

import msgspec

from astraflow.dataflow.core import evals
from astraflow.dataflow.core.commands import (
    AttachTrainer,
    CommitStep,
    PublishFrozen,
    PublishVersion,
    ReleaseSteps,
    StepCommitted,
    StepRedone,
    VersionPublished,
)
from astraflow.dataflow.core.context import Context, refuse
from astraflow.dataflow.core.fates import check_finished, decide_fate, end_run
from astraflow.dataflow.core.finite import clamp, finite_sum
from astraflow.dataflow.core.metric_sums import reduce_sums
from astraflow.dataflow.core.state import BatchState, EpisodeSums, PolicyState, SessionState
from astraflow.dataflow.core.tables import require_session
from astraflow.errors import ComponentError
from astraflow.types import (
    Manifest,
    MetricItem,
    PublicationReply,
    Session,
    StepRecord,
    VersionsReply,
)

__all__ = ["attach", "commit", "needed_versions", "publish", "publish_frozen", "release", "versions_reply"]


def attach(ctx: Context, command: AttachTrainer) -> Session:
    """Opens a session at the step of the trainer's checkpoint, and fences older sessions."""
    policy = ctx.policy(command.policy)
    name = command.policy
    step = command.durable_step
    if not ctx.is_running:
        refuse("finished", f"the run is over: {ctx.state.reason}")
    if step > policy.committed:
        refuse(
            "checkpoint_ahead",
            f"policy {name!r}: the checkpoint holds {step} steps, but only {policy.committed} are committed; "
            f"load an earlier checkpoint, or one of this run",
        )
    if step < policy.released:
        refuse(
            "batches_released",
            f"policy {name!r}: the checkpoint holds {step} steps, but the batches of the first "
            f"{policy.released} are released; load a checkpoint of at least {policy.released} steps",
        )
    policy.epoch += 1
    policy.rules = command.rules
    policy.session = SessionState(
        trainer_id=command.trainer_id,
        base_step=step,
        base_version=policy.newest + 1,
        done=step,
        since_s=ctx.now_s,
    )
    policy.changed_s = ctx.now_s
    ctx.wake(f"batch/{name}")
    return Session(
        epoch=policy.epoch,
        step=step,
        next_version=policy.newest + 1,
        num_steps=ctx.num_steps(name),
    )


def publish(ctx: Context, command: PublishVersion) -> PublicationReply:
    """Makes a version the newest one. Publishing the newest manifest again changes nothing."""
    policy = ctx.policy(command.policy)
    name = command.policy
    manifest = command.manifest
    session = require_session(policy, name, command.epoch)
    known = policy.manifests.get(policy.newest)
    if manifest.version == policy.newest and known is not None and _strip(manifest) == _strip(known):
        return PublicationReply(needed=needed_versions(ctx, name))
    if not ctx.is_running:
        refuse("finished", f"the run is over: {ctx.state.reason}")
    _check_publication(policy, session, command)
    version = manifest.version
    policy.newest = version
    policy.tensors = manifest.tensors or policy.tensors
    policy.manifests[version] = _strip(manifest)
    policy.steps_of[version] = command.step
    policy.changed_s = ctx.now_s
    ctx.emit(VersionPublished(policy=name, version=version, step=command.step, epoch=command.epoch))
    ctx.wake(f"versions/{name}")
    ctx.wake(f"batch/{name}")
    ctx.wake("leases")
    # Before `needed_versions`, which keeps the versions that the new rounds pin.
    evals.open_due_rounds(ctx, name, version, command.step)
    needed = needed_versions(ctx, name)
    for forgotten in policy.manifests.keys() - set(needed):
        del policy.manifests[forgotten]
        del policy.steps_of[forgotten]
    check_finished(ctx)
    return PublicationReply(needed=needed)


def publish_frozen(ctx: Context, command: PublishFrozen) -> PublicationReply:
    """Makes the weights of a frozen policy downloadable, and replaces those published before."""
    name = command.policy
    manifest = command.manifest
    if name not in ctx.plan.frozen:
        refuse("unknown_policy", f"policy {name!r} is not frozen in this run", 404)
    if (manifest.policy, manifest.version, manifest.kind) != (name, 0, "full"):
        refuse("wrong_version", f"policy {name!r} is frozen: it has version 0 only, in full", 422)
    ctx.state.frozen[name] = manifest
    ctx.wake(f"versions/{name}")
    return PublicationReply(needed=(0,))


def _check_publication(policy: PolicyState, session: SessionState, command: PublishVersion) -> None:
    name = command.policy
    manifest = command.manifest
    if manifest.policy != name:
        refuse("wrong_policy", f"policy {name!r}: the manifest is of policy {manifest.policy!r}", 422)
    if manifest.version != policy.newest + 1:
        refuse(
            "wrong_version",
            f"policy {name!r}: version {manifest.version} is not next; the newest is {policy.newest}, so "
            f"{policy.newest + 1} is",
        )
    expected = session.base_step + manifest.version - session.base_version
    if command.step != expected:
        refuse(
            "wrong_step",
            f"policy {name!r}: version {manifest.version} of this session holds {expected} steps, not "
            f"{command.step}",
        )
    if command.step > policy.taken:
        refuse(
            "out_of_order",
            f"policy {name!r}: version {manifest.version} holds {command.step} steps, but only "
            f"{policy.taken} have their batch",
        )
    if manifest.kind == "delta" and manifest.version == session.base_version:
        refuse(
            "not_full",
            f"policy {name!r}: version {manifest.version} begins a session, so it must be full, not a delta",
            422,
        )
    if manifest.kind == "delta" and manifest.base not in policy.manifests:
        kept = ", ".join(map(str, policy.manifests))
        refuse(
            "unknown_base",
            f"policy {name!r}: version {manifest.version} is a delta to {manifest.base}, which is not kept "
            f"(kept: {kept})",
            422,
        )


def commit(ctx: Context, command: CommitStep) -> None:
    """Commits a trained and published step. The first commit makes `trained` the final fate of its groups."""
    policy = ctx.policy(command.policy)
    name = command.policy
    step = command.step
    session = require_session(policy, name, command.epoch)
    if session.base_step <= step < session.done:
        return  # a repeated request: this session has committed the step already
    if not ctx.is_running:
        refuse("finished", f"the run is over: {ctx.state.reason}")
    _check_commit(policy, session, command)
    session.done += 1
    policy.changed_s = ctx.now_s
    ctx.wake("leases")
    ctx.wake(f"batch/{name}")
    if step < policy.committed:
        policy.redone += 1
        ctx.emit(StepRedone(policy=name, step=step, version=command.version))
        return
    batch = policy.batches[step]
    for group, staleness in zip(batch.groups, batch.staleness, strict=True):
        decide_fate(
            ctx,
            name,
            group.group_id,
            "trained",
            step=step,
            num_tokens=group.num_tokens,
            staleness=staleness,
        )
    policy.committed += 1
    curation, failure = _curation_metrics(ctx)
    record = _record(ctx, policy, batch, command, curation)
    policy.num_discarded = 0
    policy.episodes = EpisodeSums()
    policy.records.append(record)
    ctx.emit(StepCommitted(record=record))
    ctx.wake(f"steps/{name}")
    check_finished(ctx)
    # The step is trained even if a curator fails, so it is committed before the failure ends the run.
    if failure:
        end_run(ctx, failure, is_failure=True)


def _check_commit(policy: PolicyState, session: SessionState, command: CommitStep) -> None:
    name = command.policy
    step = command.step
    if step != session.done or step >= policy.taken:
        refuse(
            "out_of_order",
            f"policy {name!r}: step {step + 1} cannot be committed; this session committed the first "
            f"{session.done} steps, and {policy.taken} have their batch",
        )
    expected = session.version_at(step) + 1
    if command.version != expected or expected > policy.newest:
        refuse(
            "unpublished",
            f"policy {name!r}: step {step + 1} makes version {expected}; version {command.version} was given "
            f"and {policy.newest} is the newest published",
        )


def _curation_metrics(ctx: Context) -> tuple[tuple[MetricItem, ...], str]:
    """The metrics of the curators and "", or no metrics and the error message if a curator fails."""
    try:
        return ctx.curation.metrics(), ""
    except ComponentError as err:
        return (), str(err)


def _record(
    ctx: Context,
    policy: PolicyState,
    batch: BatchState,
    command: CommitStep,
    curation: Sequence[MetricItem],
) -> StepRecord:
    groups = (*batch.groups, *batch.replayed)
    num_episodes = sum(group.num_episodes for group in batch.groups)
    staleness = (*batch.staleness, *batch.replayed_staleness)
    return StepRecord(
        policy=command.policy,
        step=command.step,
        version=command.version,
        at_s=ctx.now_s,
        reward_mean=finite_sum(g.episode_reward_sum for g in batch.groups) / num_episodes,
        staleness_mean=sum(staleness) / len(staleness),
        staleness_max=max(staleness),
        num_groups=len(groups),
        num_samples=sum(len(group.samples) for group in groups),
        num_trained_tokens=sum(group.num_sampled_tokens for group in groups),
        num_discarded_groups=policy.num_discarded,
        num_replayed_groups=len(batch.replayed),
        metrics=(*command.metrics, *_episode_metrics(policy.episodes), *_drop_metrics(policy), *curation),
    )


def _episode_metrics(sums: EpisodeSums) -> tuple[MetricItem, ...]:
    """Metrics of the good episodes since the last commit. The workflow's own get the prefix `episode/`."""
    if sums.num == 0:
        return ()
    items = [
        MetricItem("episodes", float(sums.num), "sum"),
        MetricItem("episode_score_mean", clamp(sums.score_sum / sums.num)),
        MetricItem("episode_s_mean", clamp(sums.duration_sum_s / sums.num)),
        MetricItem("episode_s_max", clamp(sums.duration_max_s), "max"),
    ]
    if sums.num_left_out:
        items.append(MetricItem("episode_metrics_left_out", float(sums.num_left_out), "sum"))
    return (*items, *reduce_sums(sums.metrics, prefix="episode/"))


def _drop_metrics(policy: PolicyState) -> list[MetricItem]:
    """Numbers of groups dropped by each filter and of batches dropped by a person, since the run's start."""
    items = [MetricItem(f"filtered/{by}", float(num), "last") for by, num in policy.filtered_by.items()]
    if policy.num_dropped_batches:
        items.append(MetricItem("dropped_batches", float(policy.num_dropped_batches), "last"))
    return items


def release(ctx: Context, command: ReleaseSteps) -> None:
    """Drops the batches of steps that are in a durable checkpoint. Allowed even after the run's end."""
    policy = ctx.policy(command.policy)
    name = command.policy
    step = command.step
    session = require_session(policy, name, command.epoch)
    if step > session.done:
        refuse(
            "out_of_order",
            f"policy {name!r}: {step} steps cannot be released; this session committed {session.done}",
        )
    for released in [s for s in policy.batches if s < step]:
        del policy.batches[released]
    policy.released = max(policy.released, step)


def needed_versions(ctx: Context, name: str) -> tuple[int, ...]:
    """Versions that someone may still request, oldest first.

    These are:

    - the newest version, and those that an engine or a follower may serve during one more update;
    - the versions that open evaluation rounds pin;
    - the best version by its evaluation, if the plan keeps it;
    - the newest version that contains the model's files;
    - the bases of all of these.
    """
    policy = ctx.policy(name)
    plan = ctx.plan.policies[name]
    oldest = policy.newest - max(plan.table.engine_lag, plan.follower_lag) - 1
    needed = {version for version in policy.manifests if version >= oldest}
    best = () if policy.best is None else (policy.best.version,)
    pinned = (*evals.pinned_versions(ctx, name), *best)
    needed.update(version for version in pinned if version in policy.manifests)
    needed.update([version for version, m in policy.manifests.items() if m.files][-1:])
    for version in sorted(needed, reverse=True):
        manifest = policy.manifests[version]
        while manifest.kind == "delta" and manifest.base in policy.manifests:
            needed.add(manifest.base)
            manifest = policy.manifests[manifest.base]
    return tuple(sorted(needed))


def _strip(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, tensors=())


def versions_reply(ctx: Context, name: str, after: int) -> VersionsReply:
    """The kept manifests newer than `after`, oldest first, and the versions that evaluation pins."""
    if name in ctx.plan.frozen:
        only = ctx.state.frozen.get(name)
        return VersionsReply(
            newest=0 if only else -1,
            manifests=(only,) if only and after < 0 else (),
            pinned=(),
            state=ctx.state.run_state,
        )
    policy = ctx.policy(name)
    newer = (manifest for version, manifest in policy.manifests.items() if version > after)
    return VersionsReply(
        newest=policy.newest,
        manifests=tuple(msgspec.structs.replace(manifest, tensors=policy.tensors) for manifest in newer),
        pinned=evals.pinned_versions(ctx, name),
        state=ctx.state.run_state,
    )

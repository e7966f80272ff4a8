"""Evaluation rounds: opens them when they are due, pins their versions, and sums up their results.

A round evaluates one set at exact versions of all policies. It takes no ticket and decides no fate. Its
episodes have attempts, like training episodes. A round that passes its deadline, or whose episodes took too
long, is reported as incomplete: with what is known of the missing lengths, and without a score, because the
longest answers are missing.

If the plan has a rule for the best version, the best version of each policy so far is kept.
"""

from collections.abc import Mapping, Sequence

import msgspec

from astraflow.algorithms.pass_at_k import pass_estimates
from astraflow.dataflow.core.commands import EpisodeFacts, EvalFinished, ExpireEval, LeaseView
from astraflow.dataflow.core.context import Context, derive_seed
from astraflow.dataflow.core.fates import check_finished
from astraflow.dataflow.core.finite import finite_mean, standard_error
from astraflow.dataflow.core.metric_sums import add_metrics, reduce_sums
from astraflow.dataflow.core.plan import BestRule, EvalSetPlan
from astraflow.dataflow.core.state import BestState, EpisodeState, EvalRound, LeaseState, WorkerState
from astraflow.dataflow.core.strikes import is_left_to_others
from astraflow.types import EvalRecord, MetricItem, ServedVersions

__all__ = [
    "can_serve",
    "close_episode",
    "drop_changed_rounds",
    "expire",
    "next_episode",
    "open_due_rounds",
    "pinned_versions",
    "view",
]

_MAX_METRICS = 4096
"""Largest number of metrics of a round. Its record is sent to every viewer, so it must stay small."""


def open_due_rounds(ctx: Context, name: str, version: int, step: int) -> None:
    """Opens the rounds that become due when `version`, which contains `step` steps, is published.

    Rounds are due at 0 steps, at each multiple of `every`, and at the last step. Each number of steps is
    evaluated once, even if it is published again. Rounds wait until every policy has a version.

    """
    state = ctx.state
    plan = ctx.plan.eval
    policy = state.policies[name]
    is_due = step % plan.every == 0 or step == ctx.num_steps(name)
    if plan.sets and is_due and step > policy.evaluated_step:
        policy.evaluated_step = step
        state.rounds_to_open.append((name, version, step))
    if any(other.newest < 0 for other in state.policies.values()):
        return
    for due in state.rounds_to_open:
        for eval_set in plan.sets:
            _open_round(ctx, due, eval_set)
    state.rounds_to_open.clear()


def _open_round(ctx: Context, due: tuple[str, int, int], eval_set: str) -> None:
    state = ctx.state
    size = ctx.plan.eval.sets[eval_set]
    name, version, step = due
    pinned = {other: policy.newest for other, policy in state.policies.items()} | {name: version}
    num_episodes = size.num_tasks * size.samples
    round_ = EvalRound(
        id=state.next_round_id,
        policy=name,
        version=version,
        step=step,
        eval_set=eval_set,
        pinned=pinned,
        samples=size.samples,
        episodes=[EpisodeState() for _ in range(num_episodes)],
        num_open=num_episodes,
        opened_s=ctx.now_s,
        deadline_s=ctx.now_s + ctx.plan.eval.deadline_s,
    )
    state.next_round_id += 1
    state.rounds[round_.id] = round_
    ctx.wake("leases")
    for other in pinned:
        ctx.wake(f"versions/{other}")


def pinned_versions(ctx: Context, name: str) -> tuple[int, ...]:
    """Versions of a policy that open rounds, and rounds that wait to open, need."""
    pinned = {round_.pinned[name] for round_ in ctx.state.rounds.values()}
    pinned.update(version for due, version, _ in ctx.state.rounds_to_open if due == name)
    return tuple(sorted(pinned))


def can_serve(round_: EvalRound, served: dict[str, frozenset[int]]) -> bool:
    """Whether a service with these versions has all versions that the round pins."""
    return all(version in served.get(name, ()) for name, version in round_.pinned.items())


def next_episode(ctx: Context, round_: EvalRound, worker: WorkerState) -> int:
    """Takes the next episode for a service from the round, retries first. -1 if there is none for it."""
    for episode_idx in round_.retries:
        if not is_left_to_others(ctx, round_.episodes[episode_idx], worker):
            del round_.retries[episode_idx]
            return episode_idx
    if round_.next_fresh < len(round_.episodes):
        round_.next_fresh += 1
        return round_.next_fresh - 1
    return -1


def view(ctx: Context, lease: LeaseState) -> LeaseView:
    """The lease as its service gets it. Its seed doesn't depend on the version, so all get the same draws."""
    round_ = ctx.state.rounds[lease.group_id]
    task_idx, sample = divmod(lease.episode_idx, round_.samples)
    return LeaseView(
        id=lease.id,
        kind="eval",
        group_id=round_.id,
        episode_idx=lease.episode_idx,
        attempt=lease.attempt,
        source=round_.eval_set,
        task_idx=task_idx,
        seed=derive_seed(ctx.plan.seed, "eval", round_.eval_set, task_idx, sample),
        pinned=tuple(ServedVersions(policy=name, versions=(v,)) for name, v in round_.pinned.items()),
        eval_set=round_.eval_set,
    )


def close_episode(
    ctx: Context, round_: EvalRound, episode_idx: int, facts: EpisodeFacts | None, *, is_late: bool = False
) -> None:
    """Ends an episode of the round; `facts` is None if it failed, and `is_late` says that it took too long.

    The last episode ends the round.
    """
    round_.num_late += is_late
    episode = round_.episodes[episode_idx]
    round_.retries.pop(episode_idx, None)
    round_.num_open -= 1
    if facts is None:
        episode.status = "failed"
    else:
        episode.status = "good"
        episode.score = facts.score
        round_.longest_s = max(round_.longest_s, facts.duration_s)
        tokens = (item.value for item in facts.metrics if item.name == "sampled_tokens")
        round_.longest_tokens = max(round_.longest_tokens, *tokens, 0.0)
        add_metrics(round_.metrics, facts.metrics, most=_MAX_METRICS)
    if round_.num_open == 0:
        _finish(ctx, round_)


def drop_changed_rounds(ctx: Context, before: Mapping[str, EvalSetPlan]) -> None:
    """Drops the open rounds of sets that left the plan or whose size differs from `before`.

    Dropped rounds are not reported. Those of sets that the plan still has are due again when the policy's
    trainer publishes the same steps again.
    """
    state = ctx.state
    now = ctx.plan.eval.sets
    for round_ in [r for r in state.rounds.values() if now.get(r.eval_set) != before.get(r.eval_set)]:
        _close(ctx, round_)
        policy = state.policies[round_.policy]
        policy.evaluated_step = min(policy.evaluated_step, round_.step - 1)


def expire(ctx: Context, command: ExpireEval) -> None:
    """Reports a round as incomplete. Does nothing if the round is over."""
    round_ = ctx.state.rounds.get(command.round_id)
    if round_ is not None:
        _finish(ctx, round_)


def _close(ctx: Context, round_: EvalRound) -> None:
    """Removes a round and its leases, and unpins its versions."""
    state = ctx.state
    del state.rounds[round_.id]
    for lease in [i for i in state.leases.values() if i.kind == "eval" and i.group_id == round_.id]:
        del state.leases[lease.id]
        state.workers[lease.worker_id].leases.pop(lease.id, None)
    for name in round_.pinned:
        ctx.wake(f"versions/{name}")


def _finish(ctx: Context, round_: EvalRound) -> None:
    """Reports a round. It has no score if episodes are missing because of their lengths."""
    _close(ctx, round_)
    is_whole = not round_.num_open and not round_.num_late
    mean, stderr, num_samples = _scores(round_.episodes, round_.samples)
    passes = _pass_metrics(round_.episodes, round_.samples)
    if not is_whole:
        passes = _missing_metrics(round_, partial=mean)
        mean = None
        stderr = 0.0
    record = EvalRecord(
        policy=round_.policy,
        version=round_.version,
        step=round_.step,
        eval_set=round_.eval_set,
        num_tasks=len(round_.episodes) // round_.samples,
        num_samples=num_samples,
        num_failed=len(round_.episodes) - num_samples,
        score_mean=mean,
        score_stderr=stderr,
        at_s=ctx.now_s,
        metrics=(*reduce_sums(round_.metrics), *passes),
    )
    if is_whole:
        record = _mark_if_best(ctx, record)
    ctx.state.eval_records.append(record)
    ctx.emit(EvalFinished(record=record))
    ctx.wake("evals")
    check_finished(ctx)


def _mark_if_best(ctx: Context, record: EvalRecord) -> EvalRecord:
    """Adds the rule to the record if its version is the policy's best so far, and stores that version."""
    rule = ctx.plan.eval.best
    value = None if rule is None else _best_value(record, rule)
    if rule is None or value is None:
        return record
    policy = ctx.state.policies[record.policy]
    sign = 1 if rule.mode == "max" else -1
    if policy.best is not None and sign * value <= sign * policy.best.value:
        return record
    policy.best = BestState(version=record.version, value=value)
    return msgspec.structs.replace(record, best_by=rule.text)


def _best_value(record: EvalRecord, rule: BestRule) -> float | None:
    """The value that the rule compares. None if the record does not have it."""
    if record.eval_set != rule.eval_set:
        return None
    if not rule.metric:
        return record.score_mean
    return next((item.value for item in record.metrics if item.name == rule.metric), None)


def _scores(episodes: Sequence[EpisodeState], samples: int) -> tuple[float | None, float, int]:
    """Mean over tasks of the mean over good samples, its standard error, and the number of good samples.

    Tasks without a good sample are left out. The mean is None if no task is left.
    """
    tasks = _scored_tasks(episodes, samples)
    num_good = sum(len(scores) for scores in tasks)
    means = [finite_mean(scores) for scores in tasks]
    if not means:
        return None, 0.0, 0
    return finite_mean(means), standard_error(means), num_good


def _scored_tasks(episodes: Sequence[EpisodeState], samples: int) -> list[list[float]]:
    """The scores of good samples, for each task that has any."""
    tasks = (episodes[first : first + samples] for first in range(0, len(episodes), samples))
    scored = ([episode.score for episode in task if episode.status == "good"] for task in tasks)
    return [scores for scores in scored if scores]


def _missing_metrics(round_: EvalRound, *, partial: float | None) -> tuple[MetricItem, ...]:
    """What is known of an incomplete round; `partial` is the mean of the episodes that have a score."""
    num_begun = sum(e.status == "running" or (e.status == "pending" and e.attempt) for e in round_.episodes)
    found = {
        "unfinished": float(round_.num_open + round_.num_late),
        "unfinished_begun": float(num_begun + round_.num_late),
        "longest_finished_s": round_.longest_s,
        "longest_finished_tokens": round_.longest_tokens,
        **({} if partial is None else {"partial_score_mean": partial}),
    }
    return tuple(MetricItem(name, value) for name, value in found.items())


def _pass_metrics(episodes: Sequence[EpisodeState], samples: int) -> tuple[MetricItem, ...]:
    """`pass@k` with its 95 % interval (`_low`, `_high`), for 1, 2, 4, ... and all samples."""
    found = pass_estimates(_scored_tasks(episodes, samples), samples=samples)
    return tuple(
        MetricItem(f"pass@{k}{end}", value)
        for k, estimate in found.items()
        for end, value in (("", estimate.mean), ("_low", estimate.low), ("_high", estimate.high))
    )

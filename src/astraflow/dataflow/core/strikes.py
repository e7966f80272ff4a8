"""Sets aside rollout services that keep failing, and tries them again from time to time.

A *strike* is a failed lease that was issued after the previous strike. Leases that run together and fail
together therefore count once. A good result clears the strikes of its service. From `SET_ASIDE` strikes on, a
service is set aside: it rests, each time twice as long, and then gets a single lease to show that it works
again. Until that lease succeeds, a failure that it reports as not retryable is retried all the same.

An episode that failed on a service goes to another service, as long as another one is at work.
"""

from collections.abc import Iterator

from astraflow.dataflow.core.commands import ServiceRestored, ServiceSetAside
from astraflow.dataflow.core.context import Context
from astraflow.dataflow.core.state import EpisodeState, FailureStreak, LeaseState, WorkerState
from astraflow.types import Failure

__all__ = [
    "all_services_fail",
    "failing_services_text",
    "is_left_to_others",
    "is_restricted",
    "is_set_aside",
    "next_chance_s",
    "note_failure",
    "note_holder",
    "note_success",
    "num_allowed",
    "remember_worker",
    "rest_left_s",
    "retries_for",
    "take_over_streak",
]

SET_ASIDE = 3
"""Number of strikes. One may be bad luck, and two a hard task; a larger number would waste more attempts."""
_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0
_HOPELESS = 10
"""The run ends when every service has this many strikes. The rests up to there take two minutes."""
_HOPELESS_AT_FIRST = 8
"""The same number while no episode of the run has succeeded yet. The rests take half a minute."""
_PATIENCE_S = 120.0
"""After the first good result, the run ends only after this long without another one."""
_LEFT_TO_OTHERS_S = 30.0
"""Time for which an episode that failed on a service waits for another service."""
_AT_WORK_S = 10.0
"""How long a service counts as at work after its latest lease ended."""
_MAX_ABSENT = 1000
"""Largest number of departed services whose strikes are kept."""
_MAX_GONE_KEYS = 10_000
"""Largest number of departed services whose late results still count."""
_MAX_MESSAGE_CHARS = 300
"""Characters of an error message in events and reasons."""


def take_over_streak(ctx: Context, name: str) -> FailureStreak:
    """Returns the failure streak of a service that joins: that of a departed service with the same name.

    Otherwise, a broken service that restarts in a loop would never be set aside.
    """
    return ctx.state.absent.pop(name, None) or FailureStreak()


def remember_worker(ctx: Context, worker: WorkerState) -> None:
    """Keeps a departed service's strikes, for a successor with its name, and its key, for its late
    results."""
    absent = ctx.state.absent
    absent.pop(worker.name, None)
    if worker.failures.strikes:
        absent[worker.name] = worker.failures
    if len(absent) > _MAX_ABSENT:
        del absent[next(iter(absent))]
    gone_keys = ctx.state.gone_keys
    gone_keys[worker.id] = worker.key
    if len(gone_keys) > _MAX_GONE_KEYS:
        del gone_keys[next(iter(gone_keys))]


def note_holder(episode: EpisodeState, worker: WorkerState) -> None:
    """Records that the current attempt is granted to a service. No other service may send its result."""
    episode.holders = (*episode.holders[: episode.attempt], worker.id if worker.key else "")


def note_failure(ctx: Context, lease: LeaseState, failure: Failure) -> None:
    """Counts a lease that failed, expired, or was lost with its service. It may add a strike."""
    worker = ctx.state.workers.get(lease.worker_id)
    if worker is None:
        return
    failures = worker.failures
    worker.active_s = ctx.now_s
    failures.last_failure = f"{failure.error_class}: {failure.message}"[:_MAX_MESSAGE_CHARS]
    if lease.strikes != failures.strikes:
        return  # the lease was issued before the latest strike, which already covers it
    failures.strikes += 1
    failures.struck_s = ctx.now_s
    ctx.wake(f"worker/{worker.id}")
    if failures.strikes == SET_ASIDE:
        ctx.emit(
            ServiceSetAside(
                worker_id=worker.id,
                name=worker.name,
                strikes=failures.strikes,
                last_failure=failures.last_failure,
            )
        )


def note_success(ctx: Context, worker_id: str) -> None:
    """Clears the strikes of a service that sent a good episode."""
    worker = ctx.state.workers.get(worker_id)
    if worker is None:
        return
    worker.active_s = ctx.now_s
    ctx.state.last_good_s = ctx.now_s
    ctx.state.num_good += 1
    failures = worker.failures
    failures.num_good += 1
    if failures.strikes >= SET_ASIDE:
        ctx.emit(ServiceRestored(worker_id=worker.id, name=worker.name))
        ctx.wake(f"worker/{worker.id}")
    failures.strikes = 0


def is_set_aside(worker: WorkerState) -> bool:
    """Whether the service has failed too often in a row to hold more than one lease."""
    return worker.failures.strikes >= SET_ASIDE


def rest_left_s(worker: WorkerState, now_s: float) -> float:
    """How long a service that is set aside still has to rest. 0 for all other services."""
    if not is_set_aside(worker):
        return 0.0
    failures = worker.failures
    rest_s = min(_FIRST_REST_S * 2.0 ** (failures.strikes - SET_ASIDE), _LONGEST_REST_S)
    passed_s = now_s - failures.struck_s
    # A clock that was set back must not prolong the rest.
    return max(0.0, rest_s - passed_s) if passed_s >= 0 else 0.0


def num_allowed(ctx: Context, worker: WorkerState, num_free: int) -> int:
    """The number of leases that a service may get now when it asks for `num_free`."""
    if not is_set_aside(worker):
        return num_free
    if rest_left_s(worker, ctx.now_s) > 0:
        return 0
    # A lease that was issued since the latest strike is the trial. Its result decides what follows.
    is_tried = any(ctx.state.leases[i].strikes == worker.failures.strikes for i in worker.leases)
    return 0 if is_tried else min(num_free, 1)


def is_left_to_others(ctx: Context, episode: EpisodeState, worker: WorkerState) -> bool:
    """Whether an episode failed on this service and should wait for another service that is at work."""
    if worker.id not in episode.failed_on or not 0 <= ctx.now_s - episode.failed_s < _LEFT_TO_OTHERS_S:
        return False
    others = (other for id_, other in ctx.state.workers.items() if id_ not in episode.failed_on)
    return any(_is_at_work(ctx, other) for other in others)


def _is_at_work(ctx: Context, worker: WorkerState) -> bool:
    """Whether a service will probably ask for leases soon and finish them."""
    if is_set_aside(worker) or not ctx.plan.policies.keys() <= set(worker.hosts):
        return False
    return bool(worker.leases) or 0 <= ctx.now_s - worker.active_s < _AT_WORK_S


def retries_for(ctx: Context, worker_id: str) -> Iterator[EpisodeState]:
    """The pending episodes of which an attempt failed on a service."""
    episodes = [episode for group_id in ctx.state.retries for episode in ctx.state.groups[group_id].episodes]
    episodes += [round_.episodes[idx] for round_ in ctx.state.rounds.values() for idx in round_.retries]
    return (episode for episode in episodes if episode.status == "pending" and worker_id in episode.failed_on)


def is_restricted(ctx: Context, worker_id: str) -> bool:
    """Whether the service is refused a lease that another service with the same versions would get."""
    worker = ctx.state.workers.get(worker_id)
    if worker is None:
        return False
    return is_set_aside(worker) or next(retries_for(ctx, worker_id), None) is not None


def next_chance_s(ctx: Context, worker_id: str, now_s: float) -> float:
    """The next time at which the service may get a lease that it is refused now, even if nothing else
    changes. Infinity if there is no such time."""
    worker = ctx.state.workers.get(worker_id)
    if worker is None:
        return float("inf")
    if (rest_s := rest_left_s(worker, now_s)) > 0:
        return now_s + rest_s
    times = (episode.failed_s + _LEFT_TO_OTHERS_S for episode in retries_for(ctx, worker_id))
    return min((at_s for at_s in times if at_s > now_s), default=float("inf"))


def all_services_fail(ctx: Context) -> bool:
    """Whether every service has failed so often that none will probably work again."""
    state = ctx.state
    workers = ctx.state.workers.values()
    limit = _HOPELESS if state.num_good else _HOPELESS_AT_FIRST
    if not workers or any(worker.failures.strikes < limit for worker in workers):
        return False
    return not (state.num_good and 0 <= ctx.now_s - state.last_good_s < _PATIENCE_S)


def failing_services_text(ctx: Context) -> str:
    """The latest failure of each service, as the reason why the run ends."""
    workers = ctx.state.workers.values()
    texts = [f"{w.name} {w.failures.strikes} times in a row ({w.failures.last_failure})" for w in workers]
    more = f" and {len(texts) - 5} more" if len(texts) > 5 else ""
    return f"every rollout service fails: {', '.join(texts[:5])}{more}"

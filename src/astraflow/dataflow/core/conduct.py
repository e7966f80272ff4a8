"""How rollout services behave: one that fails again and again is set aside, and tried again now and then.

A *strike* is a failed lease that was issued after the previous strike, so leases that run together and fail
together count once. A good result of a service wipes out its strikes. From `SET_ASIDE` strikes on, a service
is set aside: it rests, each time twice as long, and then gets a single lease to show that it works again.
Until then, its word that an episode cannot be retried does not count.

An episode that failed on a service goes to another one, as long as another one is at work.
"""

from collections.abc import Iterator

from astraflow.dataflow.core.commands import ServiceRestored, ServiceSetAside
from astraflow.dataflow.core.context import Context
from astraflow.dataflow.core.state import Conduct, EpisodeState, LeaseState, WorkerState
from astraflow.types import Failure

__all__ = [
    "all_services_fail",
    "failing_services_text",
    "is_apart",
    "is_left_to_others",
    "is_set_aside",
    "next_chance_s",
    "note_failure",
    "note_holder",
    "note_success",
    "num_allowed",
    "remember",
    "rest_left_s",
    "retries_for",
    "starts_with",
]

SET_ASIDE = 3
"""Number of strikes. One may be bad luck, two may be a hard task; more would cost more attempts."""
_FIRST_REST_S = 1.0
_LONGEST_REST_S = 60.0
_HOPELESS = 10
"""The run ends when every service has this many strikes. The rests from `SET_ASIDE` strikes on add up to two
minutes."""
_HOPELESS_AT_FIRST = 8
"""The same number while no episode of the run has succeeded yet. The rests add up to half a minute."""
_PATIENCE_S = 120.0
"""Once there was a good result, the run ends only after this long without another one."""
_LEFT_TO_OTHERS_S = 30.0
"""Time for which an episode that failed on a service waits for another service."""
_AT_WORK_S = 10.0
"""A service without leases counts as at work for this long after its latest one."""
_MAX_ABSENT = 1000
"""Largest number of services that are gone and whose strikes are remembered."""
_MAX_GONE_KEYS = 10_000
"""Largest number of services that are gone and whose late results still count."""
_MAX_TOLD = 300
"""Characters of an error message in events and reasons."""


# --- what happened --------------------------------------------------------------------------------


def starts_with(ctx: Context, name: str) -> Conduct:
    """The conduct of a service that joins. It takes over the strikes of a service of the same name that
    left."""
    return ctx.state.absent.pop(name, None) or Conduct()


def remember(ctx: Context, worker: WorkerState) -> None:
    """Keeps the strikes of a service that is gone, in case one of the same name joins, and its key, because
    its results may still arrive."""
    absent = ctx.state.absent
    absent.pop(worker.name, None)
    if worker.conduct.strikes:
        absent[worker.name] = worker.conduct
    if len(absent) > _MAX_ABSENT:
        del absent[next(iter(absent))]
    gone_keys = ctx.state.gone_keys
    gone_keys[worker.id] = worker.key
    if len(gone_keys) > _MAX_GONE_KEYS:
        del gone_keys[next(iter(gone_keys))]


def note_holder(episode: EpisodeState, worker: WorkerState) -> None:
    """Notes that the current attempt of the episode is granted to a service; no other may answer it."""
    episode.holders = (*episode.holders[: episode.attempt], worker.id if worker.key else "")


def note_failure(ctx: Context, lease: LeaseState, failure: Failure) -> None:
    """Notes that a lease of a service failed, expired or was lost with the service."""
    worker = ctx.state.workers.get(lease.worker_id)
    if worker is None:
        return
    conduct = worker.conduct
    worker.active_s = ctx.now_s
    conduct.last_failure = f"{failure.error_class}: {failure.message}"[:_MAX_TOLD]
    if lease.strikes != conduct.strikes:
        return  # it was issued before the latest strike, and counts with that one
    conduct.strikes += 1
    conduct.struck_s = ctx.now_s
    ctx.wake(f"worker/{worker.id}")
    if conduct.strikes == SET_ASIDE:
        ctx.emit(
            ServiceSetAside(
                worker_id=worker.id,
                name=worker.name,
                strikes=conduct.strikes,
                last_failure=conduct.last_failure,
            )
        )


def note_success(ctx: Context, worker_id: str) -> None:
    """Notes that a service sent a good episode."""
    worker = ctx.state.workers.get(worker_id)
    if worker is None:
        return
    worker.active_s = ctx.now_s
    ctx.state.last_good_s = ctx.now_s
    ctx.state.num_good += 1
    conduct = worker.conduct
    conduct.num_good += 1
    if conduct.strikes >= SET_ASIDE:
        ctx.emit(ServiceRestored(worker_id=worker.id, name=worker.name))
        ctx.wake(f"worker/{worker.id}")
    conduct.strikes = 0


# --- who may run what -----------------------------------------------------------------------------


def is_set_aside(worker: WorkerState) -> bool:
    """Whether the service failed too often in a row to be trusted with more than one lease."""
    return worker.conduct.strikes >= SET_ASIDE


def rest_left_s(worker: WorkerState, now_s: float) -> float:
    """How long a service that is set aside still gets no lease; 0 for any other."""
    if not is_set_aside(worker):
        return 0.0
    conduct = worker.conduct
    rest_s = min(_FIRST_REST_S * 2.0 ** (conduct.strikes - SET_ASIDE), _LONGEST_REST_S)
    passed_s = now_s - conduct.struck_s
    # A clock that was set back must not make the rest longer.
    return max(0.0, rest_s - passed_s) if passed_s >= 0 else 0.0


def num_allowed(ctx: Context, worker: WorkerState, num_free: int) -> int:
    """How many leases a service that asks for `num_free` may have now."""
    if not is_set_aside(worker):
        return num_free
    if rest_left_s(worker, ctx.now_s) > 0:
        return 0
    is_tried = any(ctx.state.leases[i].strikes == worker.conduct.strikes for i in worker.leases)
    return 0 if is_tried else min(num_free, 1)


def is_left_to_others(ctx: Context, episode: EpisodeState, worker: WorkerState) -> bool:
    """Whether an episode that failed on this service should go to another one, and one is at work."""
    if worker.id not in episode.failed_on or not 0 <= ctx.now_s - episode.failed_s < _LEFT_TO_OTHERS_S:
        return False
    others = (other for id_, other in ctx.state.workers.items() if id_ not in episode.failed_on)
    return any(_is_at_work(ctx, other) for other in others)


def _is_at_work(ctx: Context, worker: WorkerState) -> bool:
    """Whether a service can be expected to ask for leases soon, and to do well."""
    if is_set_aside(worker) or not ctx.plan.policies.keys() <= set(worker.hosts):
        return False
    return bool(worker.leases) or 0 <= ctx.now_s - worker.active_s < _AT_WORK_S


# --- when to look again ---------------------------------------------------------------------------


def retries_for(ctx: Context, worker_id: str) -> Iterator[EpisodeState]:
    """Pending episodes that failed on a service."""
    episodes = [episode for group_id in ctx.state.retries for episode in ctx.state.groups[group_id].episodes]
    episodes += [round_.episodes[idx] for round_ in ctx.state.rounds.values() for idx in round_.retries]
    return (episode for episode in episodes if episode.status == "pending" and worker_id in episode.failed_on)


def is_apart(ctx: Context, worker_id: str) -> bool:
    """Whether the service is refused some lease that another one with its versions would get."""
    worker = ctx.state.workers.get(worker_id)
    if worker is None:
        return False
    return is_set_aside(worker) or next(retries_for(ctx, worker_id), None) is not None


def next_chance_s(ctx: Context, worker_id: str, now_s: float) -> float:
    """The next time at which the service may get a lease that it is refused now, even if nothing else
    changes; infinity if there is none."""
    worker = ctx.state.workers.get(worker_id)
    if worker is None:
        return float("inf")
    if (rest_s := rest_left_s(worker, now_s)) > 0:
        return now_s + rest_s
    times = (episode.failed_s + _LEFT_TO_OTHERS_S for episode in retries_for(ctx, worker_id))
    return min((at_s for at_s in times if at_s > now_s), default=float("inf"))


# --- when nobody works ----------------------------------------------------------------------------


def all_services_fail(ctx: Context) -> bool:
    """Whether every service has failed so often that none can be expected to work again."""
    state = ctx.state
    workers = ctx.state.workers.values()
    limit = _HOPELESS if state.num_good else _HOPELESS_AT_FIRST
    if not workers or any(worker.conduct.strikes < limit for worker in workers):
        return False
    return not (state.num_good and 0 <= ctx.now_s - state.last_good_s < _PATIENCE_S)


def failing_services_text(ctx: Context) -> str:
    """The latest failures of all services, for the reason of the run's end."""
    workers = ctx.state.workers.values()
    told = [f"{w.name} {w.conduct.strikes} times in a row ({w.conduct.last_failure})" for w in workers]
    more = f" and {len(told) - 5} more" if len(told) > 5 else ""
    return f"every rollout service fails: {', '.join(told[:5])}{more}"

"""The rollout service: catches up on weights, takes leases, runs episodes, sends results.

    loop             consumes            produces            waits for              woken by
    follow (policy)  versions, chunks    engine weights      a newer version        dataflow (long-poll)
    lease            leases              a task per episode  room, weights, leases  a slot that frees,
                                                                                    dataflow (long-poll)
    episode (many)   engine tokens       a result            engine, scoring pool,  all three
                                                             environment
    send (outbox)    results             receipts            results                an episode that ends
    heartbeat        revocations, state  lease life, load    its interval           the clock, new weights
    progress         completions         reports of them     its interval           the clock

All tasks belong to one task group in `run`. An episode's task ends by itself, or is cancelled when its lease
is revoked or the service leaves. The loops share `_running` (the lease loop adds, the end of an episode
removes), the outbox, and the weight slots of each host (only its follow loop writes them).

A stop signal ends leasing at once, gives running episodes `drain_s`, sends what is finished and what the
others have sampled, and says goodbye, within 5 s. An engine that will never serve again ends the service the
same way, and `run` then raises its error; the supervisor restarts the service.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from astraflow.config import Use
from astraflow.errors import Error, RolloutError, ServiceError, UnavailableError
from astraflow.protocols import Capacity, Engine, Renderer
from astraflow.rollout.config import RolloutConfig
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.environments import Environments
from astraflow.rollout.evaluation import Evaluation
from astraflow.rollout.judging import JudgedScoring
from astraflow.rollout.membership import Membership, WorkerLink
from astraflow.rollout.outbox import Outbox
from astraflow.rollout.policy_host import PolicyHost, WeightFetcher
from astraflow.rollout.progress_reports import ProgressReports
from astraflow.rollout.runner import EpisodeRunner, Proposing, failure_of
from astraflow.rollout.scoring import ScoringPool
from astraflow.rollout.waiting import done_or_set, first_of, unless
from astraflow.types import (
    EpisodeResult,
    Failure,
    Fingerprints,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Load,
    PolicyInfo,
    RegisterWorker,
    ServedVersions,
    WaitReason,
)
from astraflow.types.bounds import as_label
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.workflows.conversation import Workflow

__all__ = ["RolloutService"]

_log = logging.getLogger(__name__)

_WAIT_S = 25.0
"""Length of a lease long-poll."""
_COALESCE_S = 0.02
"""Longest wait after a slot frees before leases are requested, so that slots that free together share one
request. Scaled by the share of slots that run: an idle service asks at once."""
_PAUSE_S = 0.25
"""Pause after an answer without leases, and after an outage that lasted longer than the link's retries."""
_GOODBYE_S = 1.5
"""Longest time for sending what is finished, and then for the goodbye, when the service is told to stop."""
_MANY = 0.5
"""Share of the running episodes that wait for scores from which the service is said to wait for scoring."""
_MAX_WAIT_REASONS = 16
"""Reasons for a wait that fit into a heartbeat."""
_MAX_UNSENT = 4
"""Leasing pauses when this many times `max_episodes` results wait for a dataflow that does not answer."""


class RolloutService:
    """Serves a run until it ends, the dataflow drains it, or it is told to stop.

    Example: `await RolloutService(link, policies=run_info.policies, ...).run(stop)`. `run` is called once; it
    closes the engines, the environments and the scoring pool that it was given.
    """

    # size: sets each field that the loops share, one statement per field
    def __init__(
        self,
        link: WorkerLink,
        *,
        name: str,
        policies: Sequence[PolicyInfo],
        workflow: Workflow,
        scoring: ScoringPool | JudgedScoring,
        environments: Environments | None = None,
        weights: WeightFetcher,
        config: RolloutConfig,
        make_engine: Callable[[WeightSnapshot], Engine],
        make_renderer: Callable[[PolicyInfo, Path], Renderer],
        evaluation: Evaluation | None = None,
        labels: Mapping[str, str] | None = None,
        peer_url: str = "",
        fingerprints: Fingerprints | None = None,
        resumes: bool = False,
        drain_s: float = 2.0,
    ) -> None:
        """`policies`: those that it hosts, in the recipe's order. `peer_url`: where it serves their weights
        to other services; empty if it does not. `resumes`: unfinished episodes of other services go on here,
        and the other way round, because the workflow is replayable."""
        self._link = link
        self._scoring = scoring
        self._evaluation = evaluation or Evaluation({})
        self._environments = environments or Environments({})
        self._config = config
        self._drain_s = drain_s
        self._served_changed = asyncio.Event()
        self._beat_due = asyncio.Event()
        self._hosts = {
            info.name: PolicyHost(
                info,
                link=link,
                weights=weights,
                make_engine=make_engine,
                make_renderer=make_renderer,
                changed=self._note_served,
            )
            for info in policies
        }
        request = RegisterWorker(
            name=name,
            hosts=tuple(self._hosts),
            engine=config.engine.use if isinstance(config.engine, Use) else config.engine.name,
            num_slots=config.max_episodes,
            labels=dict(labels or {}),
            peer_url=peer_url,
            fingerprints=fingerprints or Fingerprints(),
        )
        self._membership = Membership(link, request)
        self._running: dict[str, asyncio.Task[None]] = {}
        """Lease id -> its episode."""
        self._outbox = Outbox(link, self._membership, busy_share=self._busy_share)
        self._progress = ProgressReports(link, self._membership, is_on=resumes)
        self._hosted: dict[str, HostedPolicy] = {}
        """Filled once all policies are served: the runner reads it when an episode starts."""
        self._evaluation.host(self._hosted)
        if isinstance(scoring, JudgedScoring):
            scoring.host(self._hosted)
        self._runner = EpisodeRunner(
            self._hosted,
            workflow,
            scoring.score,
            proposing=Proposing(link.push_tasks, config.max_proposals),
            environments=self._environments,
            timeout_s=config.episode_timeout_s,
            evaluation=self._evaluation.conducts,
        )
        self._freed = asyncio.Event()
        """A slot may have become free."""
        self._ended = asyncio.Event()
        """The run is over."""
        self._draining = asyncio.Event()
        """The dataflow asked the service to finish what runs and leave."""
        self._broken = asyncio.Event()
        """An engine will never serve again; `_failure` says why."""
        self._failure = ServiceError()
        self._waits_for: Sequence[WaitReason] = ()
        """What the lease loop waits for, as the status shows it."""
        self._tokens_before = 0
        self._beat_at_s = time.monotonic()

    async def run(self, stop: asyncio.Event) -> None:
        """Serves the run. Raises: the error that made the service fail; a failed episode never does."""
        try:
            if await unless(self._membership.join(), stop) is None:
                return
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(loop, name=name) for name, loop in self._loops(group)]
                await first_of(stop, self._ended, self._draining, self._broken)
                await self._leave(loops, self._broken if self._broken.is_set() else stop)
            if self._broken.is_set() and not self._ended.is_set():
                raise self._failure
        except ExceptionGroup as failures:
            raise _first_leaf(failures) from failures
        finally:
            await self._runner.close()
            await self._environments.close()
            await self._evaluation.close()
            await self._scoring.close()
            for host in self._hosts.values():
                await host.close()

    def _loops(self, group: asyncio.TaskGroup) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Name and loop. The lease loop comes first, since a service that leaves ends it first."""
        follows = [(f"follow {name}", self._follow(host)) for name, host in self._hosts.items()]
        return [
            ("lease", self._lease(group)),
            ("send", self._outbox.run()),
            ("heartbeat", self._beat()),
            ("progress", self._progress.run()),
            *follows,
        ]

    # --- leaving ---

    async def _leave(self, loops: Sequence[asyncio.Task[None]], stop: asyncio.Event) -> None:
        loops[0].cancel()
        if not self._ended.is_set():
            _log.info("leaving: %d episodes run", len(self._running))
            num_abandoned = await self._finish_running(stop)
            # An episode that was given up goes on elsewhere as soon as its lease is back: its progress first.
            sending = (
                _within(_GOODBYE_S, self._outbox.emptied()),
                _within(_GOODBYE_S, self._progress.tell()),
            )
            await asyncio.gather(*sending)
            await _within(_GOODBYE_S, self._say_goodbye(num_abandoned))
        for task in (*loops, *self._running.values()):
            task.cancel()

    async def _say_goodbye(self, num_abandoned: int) -> None:
        """Takes leave of the dataflow. Leases of abandoned episodes go back by a request that no longer names
        them as held."""
        if num_abandoned or self._broken.is_set():
            await self._request_leases(0, (), 0.0)
        await self._membership.call(self._link.drain)

    async def _finish_running(self, stop: asyncio.Event) -> int:
        """Waits for running episodes: until all have ended if drained, for `drain_s` once told to stop.

        Returns how many were abandoned.
        """
        rest = asyncio.ensure_future(self._all_done())
        try:
            await done_or_set(rest, stop)
            if not rest.done():
                await asyncio.wait({rest}, timeout=self._drain_s)
        finally:
            rest.cancel()
        abandoned = list(self._running.values())
        for task in abandoned:
            task.cancel()
        await asyncio.gather(*abandoned, return_exceptions=True)
        return len(abandoned)

    async def _all_done(self) -> None:
        while self._running:
            self._freed.clear()
            await self._freed.wait()

    # --- weights ---

    async def _follow(self, host: PolicyHost) -> None:
        await host.follow()
        self._ended.set()

    async def _all_served(self) -> None:
        while any(host.live_version < 0 for host in self._hosts.values()):
            self._served_changed.clear()
            await self._served_changed.wait()
        for name, host in self._hosts.items():
            assert host.hosted is not None
            self._hosted[name] = host.hosted

    def _note_served(self) -> None:
        self._served_changed.set()
        self._beat_due.set()

    def _served(self) -> tuple[ServedVersions, ...]:
        return tuple(host.served for host in self._hosts.values())

    # --- leases and episodes ---

    async def _lease(self, group: asyncio.TaskGroup) -> None:
        await self._environments.open()
        await self._runner.open()
        await self._scoring.start()
        await self._evaluation.start()
        await self._all_served()
        while True:
            num_free = await self._room()
            try:
                reply = await self._request_leases(num_free, self._served(), _WAIT_S)
            except UnavailableError as err:
                _log.warning("no leases, the dataflow does not answer: %s", err)
                self._waits_for = (WaitReason(kind="no_dataflow"),)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._note_state(reply.state)
            self._waits_for = reply.waits_for
            for lease in reply.leases:
                self._start(group, lease)
            if not reply.leases:
                await asyncio.sleep(_PAUSE_S)

    async def _room(self) -> int:
        """Free slots, at least one."""
        while self._num_free() <= 0:
            self._freed.clear()
            await self._freed.wait()
        await asyncio.sleep(_COALESCE_S * self._busy_share())
        return self._num_free()

    def _busy_share(self) -> float:
        return min(1.0, len(self._running) / self._config.max_episodes)

    def _num_free(self) -> int:
        if len(self._outbox.lease_ids) >= _MAX_UNSENT * self._config.max_episodes:
            return 0
        return self._config.max_episodes - len(self._running)

    async def _request_leases(
        self, num_free: int, served: tuple[ServedVersions, ...], wait_s: float
    ) -> LeaseReply:
        """Requests leases and names those that it holds: a lease whose reply was lost then goes out again.

        A request that waits is never given up: leases on their way would be lost. What is served from then
        on reaches the dataflow by heartbeat.
        """
        held = (*self._running, *self._outbox.lease_ids)
        return await self._membership.call(
            lambda me: self._link.leases(
                LeaseRequest(worker_id=me, num_free=num_free, served=served, wait_s=wait_s, held=held)
            )
        )

    def _start(self, group: asyncio.TaskGroup, lease: Lease) -> None:
        if lease.id in self._running:
            return
        task = group.create_task(self._run_episode(lease), name=f"episode {lease.id}")
        self._running[lease.id] = task
        task.add_done_callback(lambda _: self._episode_ended(lease.id))

    def _episode_ended(self, lease_id: str) -> None:
        del self._running[lease_id]
        self._freed.set()

    async def _run_episode(self, lease: Lease) -> None:
        result = await self._result(lease)
        if not (isinstance(result.outcome, Failure) and self._has_lost_an_engine()):
            self._outbox.put(result)
            self._progress.end(lease.id)
        self._freed.set()

    def _has_lost_an_engine(self) -> bool:
        """Whether an engine will never serve again. The service then leaves, and the leases of the episodes
        that failed because of it go back."""
        try:
            self._capacities()
        except ServiceError as err:
            self._failure = err
            self._broken.set()
        return self._broken.is_set()

    async def _result(self, lease: Lease) -> EpisodeResult:
        if not lease.pinned:
            return await self._runner.run(lease, await self._progress.begin(lease))
        with ExitStack() as held:
            try:
                for pin in lease.pinned:
                    held.enter_context(self._hosts[pin.policy].holding(pin.versions[-1]))
            except RolloutError as err:
                return EpisodeResult(lease_id=lease.id, outcome=failure_of(err))
            return await self._runner.run(lease)

    # --- heartbeat ---

    async def _beat(self) -> None:
        while True:
            try:
                registration = await self._membership.join()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(registration.heartbeat_s):
                        await self._beat_due.wait()
                self._beat_due.clear()
                if self._has_lost_an_engine():
                    return
                held = (*self._running, *self._outbox.lease_ids)
                beat = Heartbeat(lease_ids=held, load=self._load(), peer_url=self._membership.peer_url)
                self._obey(await self._membership.call(lambda me, beat=beat: self._link.heartbeat(me, beat)))
            except UnavailableError as err:
                if self._membership.silence_s > self._config.outage_s:
                    raise
                _log.warning("no heartbeat, the dataflow does not answer: %s", err)
                await asyncio.sleep(_PAUSE_S)

    def _obey(self, reply: HeartbeatReply) -> None:
        self._note_state(reply.state)
        if reply.is_draining:
            self._draining.set()
        for lease_id in reply.revoked:
            if (task := self._running.get(lease_id)) is not None:
                task.cancel()
            self._progress.end(lease_id)
        self._outbox.discard(reply.revoked)
        self._freed.set()

    def _note_state(self, state: str) -> None:
        if state in {"finished", "failed"}:
            self._ended.set()

    def _capacities(self) -> list[Capacity]:
        """Raises: ServiceError if an engine will never serve again."""
        return [engine.capacity() for engine in self._engines()]

    def _engines(self) -> list[Engine]:
        return [host.hosted.engine for host in self._hosts.values() if host.hosted is not None]

    def _wait_reasons(self) -> Sequence[WaitReason]:
        """What keeps the service from generating; empty if nothing does."""
        of_hosts = [reason for host in self._hosts.values() if (reason := host.waits_for) is not None]
        if of_hosts:
            return of_hosts[:1]
        if self._scoring.num_calls > _MANY * len(self._running):  # most of the episodes wait for their score
            return (WaitReason(kind="scoring", detail=as_label(self._scoring.queue)),)
        return () if self._running else self._waits_for

    def _load(self) -> Load:
        capacities = self._capacities()
        generated = sum(capacity.generated_tokens for capacity in capacities)
        now_s = time.monotonic()
        speed = (generated - self._tokens_before) / max(now_s - self._beat_at_s, 1e-6)
        self._tokens_before = generated
        self._beat_at_s = now_s
        return Load(
            num_running=len(self._running),
            num_slots=self._config.max_episodes,
            num_waiting=sum(capacity.num_waiting for capacity in capacities),
            generated_tokens=generated,
            tokens_per_s=speed,
            versions=self._served(),
            waits_for=tuple(self._wait_reasons()[:_MAX_WAIT_REASONS]),
            spans=tuple(
                span for source in (*self._engines(), *self._hosts.values()) for span in source.take_spans()
            ),
            transfers=tuple(t for host in self._hosts.values() if (t := host.transfer()) is not None),
            num_scoring=self._scoring.num_calls,
            scoring_s=self._scoring.oldest_call_s,
            num_late_scores=self._runner.num_late_scores,
            num_scorer_errors=self._runner.num_scorer_errors,
        )


# --- leaving --------------------------------------------------------------------------------------


async def _within(seconds: float, call: Coroutine[Any, Any, None]) -> None:
    """Waits for the call, at most so long. A failure on the way out is logged and goes no further."""
    try:
        async with asyncio.timeout(seconds):
            await call
    except (TimeoutError, Error) as err:
        _log.warning("left without saying everything: %s", err or f"no answer within {seconds} s")


def _first_leaf(error: Exception) -> Exception:
    return _first_leaf(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType] - its type parameter is lost

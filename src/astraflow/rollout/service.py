"""The rollout service: catches up on weights, takes leases, runs episodes, sends results.

    loop             consumes            produces            waits for              woken by
    follow (policy)  versions, chunks    engine weights      a newer version        dataflow (long-poll)
    lease            leases              a task per episode  slot, weights, leases  a slot that frees,
                                                                                    dataflow (long-poll)
    turns            turns on a device   hand-ins            its device, the other  the device's arbiter
                     that is shared                          service that needs it
    episode (many)   engine tokens       a result            engine, scoring pool,  all three
                                                             environment
    send (outbox)    results             receipts            results                an episode that ends
    heartbeat        revocations, state  lease life, load    its interval           the clock, new weights
    progress         completions         reports of them     its interval           the clock

All tasks belong to one task group in `run`. An episode's task ends by itself, or is cancelled when its lease
is revoked or the service leaves. The loops share `_running` (the lease loop adds, the end of an episode
removes), the outbox, and the weight slots of each host (only its follow loop writes them).

A service whose device is asked back gives running episodes 0.2 s, and hands in the other ones with what they
have sampled. What its request for leases grants before its next turn is handed in at once.

On a stop signal, the service stops leasing, gives running episodes `drain_s`, sends finished results and what
the other episodes have sampled, and says goodbye, all within 5 s. An engine that will never serve again ends
the service the same way. `run` then raises the engine's error, and the supervisor restarts the service.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from astraflow.config import Use
from astraflow.errors import Error, RolloutError, ServiceError, UnavailableError
from astraflow.protocols import Capacity, Engine, Renderer
from astraflow.rollout.config import RolloutConfig
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.rollout.environments import Environments
from astraflow.rollout.episode_limit import EpisodeLimit
from astraflow.rollout.evaluation import Evaluation
from astraflow.rollout.membership import Membership, WorkerLink
from astraflow.rollout.outbox import Outbox
from astraflow.rollout.policy_host import PolicyHost, WeightFetcher
from astraflow.rollout.progress_reports import ProgressReports
from astraflow.rollout.runner import EpisodeRunner, ProposalSink, classify_failure
from astraflow.rollout.scoring import ScoringPool
from astraflow.rollout.waiting import run_unless, wait_for_any, wait_for_done_or_set
from astraflow.service.turns import Turns, own_turns
from astraflow.types import (
    HANDED_IN,
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
from astraflow.user_input.own_code import first_error
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
"""Time limit for sending the finished results, and again for the goodbye, when the service has to stop."""
_HAND_IN_S = 0.2
"""Time that episodes have to end after the device is asked back. The other ones are handed in."""
_MIN_SCORING_FRAC = 0.5
"""The service reports that it waits for scoring once more than this share of its episodes wait for scores."""
_MAX_WAIT_REASONS = 16
"""Number of wait reasons that fit into a heartbeat."""
_MAX_UNSENT = 4
"""Leasing pauses once this many times `max_episodes` results wait for a dataflow that does not answer."""


class _End:
    """Why the service leaves, other than a stop signal."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        """The run is over."""
        self.is_draining = asyncio.Event()
        """The dataflow asked the service to finish its running episodes and leave."""
        self.is_broken = asyncio.Event()
        """An engine will never serve again; `failure` says why."""
        self.failure = ServiceError()


class _SpeedMeter:
    """Measures tokens per second between two heartbeats."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._at_s = time.monotonic()

    def measure(self, num_tokens: int) -> float:
        """Returns the tokens per second since the last call. `num_tokens`: generated in all."""
        now_s = time.monotonic()
        speed = (num_tokens - self._num_tokens) / max(now_s - self._at_s, 1e-6)
        self._num_tokens = num_tokens
        self._at_s = now_s
        return speed


class RolloutService:
    """Serves a run until the run ends, the dataflow drains the service, or `stop` is set.

    Example: `await RolloutService(link, policies=run_info.policies, ...).run(stop)`. Call `run` once. It
    closes the engines, the environments, and the scoring pool that the service was given.
    """

    # size: sets each field that the loops share, one statement per field
    def __init__(
        self,
        link: WorkerLink,
        *,
        name: str,
        policies: Sequence[PolicyInfo],
        workflow: Workflow,
        scoring: ScoringPool,
        environments: Environments | None = None,
        weights: WeightFetcher,
        config: RolloutConfig,
        make_engine: Callable[[WeightSnapshot], Engine | Awaitable[Engine]],
        make_renderer: Callable[[PolicyInfo, Path], Renderer],
        evaluation: Evaluation | None = None,
        peer_url: str = "",
        fingerprints: Fingerprints | None = None,
        resumes: bool = False,
        drain_s: float = 2.0,
        turns: Turns | None = None,
    ) -> None:
        """`policies`: the policies that the service hosts, in the recipe's order. `peer_url`: where it serves
        their weights to other services; empty if it doesn't. `resumes`: the workflow is replayable, so an
        episode that another service left unfinished continues here, and vice versa. `turns`: when it may use
        its device; by default, as the environment says."""
        self._link = link
        self._scoring = scoring
        self._evaluation = evaluation or Evaluation({})
        self._environments = environments or Environments({})
        self._config = config
        self._episode_limit = EpisodeLimit(config.max_episodes)
        self._drain_s = drain_s
        self._turns = turns or own_turns(name)
        self._has_device = False
        self._served_changed = asyncio.Event()
        self._beat_due = asyncio.Event()
        make_engine = self._turns.share_engines(make_engine)
        make_host = partial(
            PolicyHost, link=link, weights=weights, make_engine=make_engine, make_renderer=make_renderer
        )
        self._hosts = {info.name: make_host(info, changed=self._note_served) for info in policies}
        request = RegisterWorker(
            name=name,
            hosts=tuple(self._hosts),
            engine=config.engine.use if isinstance(config.engine, Use) else config.engine.name,
            num_slots=config.max_episodes,
            peer_url=peer_url,
            fingerprints=fingerprints or Fingerprints(),
        )
        self._membership = Membership(link, request)
        self._running: dict[str, asyncio.Task[None]] = {}
        """Lease id -> the task that runs its episode."""
        self._outbox = Outbox(link, self._membership, busy_share=self._busy_share)
        self._progress = ProgressReports(link, self._membership, is_on=resumes)
        self._hosted: dict[str, HostedPolicy] = {}
        """Filled once all policies are served. The runner reads it when an episode starts."""
        self._runner = EpisodeRunner(
            self._hosted,
            workflow,
            scoring.score,
            proposals=ProposalSink(link.push_tasks, config.max_proposals),
            environments=self._environments,
            timeout_s=config.episode_timeout_s,
            evaluation=self._evaluation.overrides,
        )
        self._freed = asyncio.Event()
        """A slot may have become free."""
        self._end = _End()
        self._waits_for: Sequence[WaitReason] = ()
        """What the lease loop waits for, as the status reports it."""
        self._speed = _SpeedMeter()

    async def run(self, stop: asyncio.Event) -> bool:
        """Serves the run. Returns whether it was asked to leave. Raises: why it failed, if it did."""
        try:
            if await run_unless(self._membership.join(), stop) is None:
                return False
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(loop, name=name) for name, loop in self._loops(group)]
                await wait_for_any(stop, self._end.is_over, self._end.is_draining, self._end.is_broken)
                # Read now: a heartbeat after the goodbye also says that the service leaves.
                was_asked = self._end.is_draining.is_set() and not stop.is_set()
                await self._leave(loops, self._end.is_broken if self._end.is_broken.is_set() else stop)
            if self._end.is_broken.is_set() and not self._end.is_over.is_set():
                raise self._end.failure
            return was_asked
        except ExceptionGroup as failures:
            raise first_error(failures) from failures
        finally:
            parts = (self._runner, self._environments, self._evaluation, self._scoring, *self._hosts.values())
            async with AsyncExitStack() as closing:  # if one of them fails, the others are still closed
                for part in reversed(parts):
                    closing.push_async_callback(part.close)

    def _loops(self, group: asyncio.TaskGroup) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """The loops with their names. The lease loop comes first because `_leave` cancels it first."""
        follows = [(f"follow {name}", self._follow(host)) for name, host in self._hosts.items()]
        return [
            ("lease", self._lease(group)),
            ("turns", self._take_turns()),
            ("send", self._outbox.run()),
            ("heartbeat", self._send_heartbeats()),
            ("progress", self._progress.run()),
            *follows,
        ]

    # --- leaving ---

    async def _leave(self, loops: Sequence[asyncio.Task[None]], stop: asyncio.Event) -> None:
        loops[0].cancel()
        if not self._end.is_over.is_set():
            _log.info("leaving: %d episodes run", len(self._running))
            num_abandoned = len(await self._finish_running(stop, self._drain_s))
            # Progress goes out before the goodbye returns the leases. An abandoned episode continues
            # elsewhere as soon as its lease is back, and must not sample again what it has sampled here.
            sending = (
                _try_within(_GOODBYE_S, self._outbox.is_empty.wait()),
                _try_within(_GOODBYE_S, self._progress.report()),
            )
            await asyncio.gather(*sending)
            await _try_within(_GOODBYE_S, self._say_goodbye(num_abandoned))
        for task in (*loops, *self._running.values()):
            task.cancel()

    async def _say_goodbye(self, num_abandoned: int) -> None:
        """Leaves the run. First returns the leases of abandoned episodes, with a request that doesn't list
        them as held."""
        if num_abandoned or self._end.is_broken.is_set():
            await self._request_leases(0, (), 0.0)
        await self._membership.call(self._link.drain)

    async def _finish_running(self, stop: asyncio.Event, grace_s: float) -> Sequence[str]:
        """Waits until all running episodes have ended, but only `grace_s` longer once `stop` is set. Returns
        the leases of the abandoned episodes."""
        idle = asyncio.ensure_future(self._wait_until_idle())
        try:
            await wait_for_done_or_set(idle, stop)
            if not idle.done():
                await asyncio.wait({idle}, timeout=grace_s)
        finally:
            idle.cancel()
        abandoned = dict(self._running)
        for task in abandoned.values():
            task.cancel()
        await asyncio.gather(*abandoned.values(), return_exceptions=True)
        return tuple(abandoned)

    async def _wait_until_idle(self) -> None:
        while self._running:
            self._freed.clear()
            await self._freed.wait()

    # --- turns on the device ---

    async def _take_turns(self) -> None:
        while True:
            async with self._turns:
                self._has_device = True
                self._freed.set()
                await self._turns.until_asked_back()
                self._has_device = False
                await self._hand_in(await self._finish_running(self._turns.is_asked_back, _HAND_IN_S))

    async def _hand_in(self, lease_ids: Sequence[str]) -> None:
        """Gives back leases, so that their episodes continue elsewhere with what they have sampled here."""
        # Progress goes out before the leases, because the episodes continue as soon as these are back.
        await _try_within(_GOODBYE_S, self._progress.report())
        for lease_id in lease_ids:
            self._progress.end(lease_id)
            failure = Failure(error_class=HANDED_IN, message="the device of the service was asked back")
            self._outbox.put(EpisodeResult(lease_id=lease_id, outcome=failure))
        await _try_within(_GOODBYE_S, self._outbox.is_empty.wait())

    # --- weights ---

    async def _follow(self, host: PolicyHost) -> None:
        await host.follow()
        self._end.is_over.set()

    async def _wait_until_served(self) -> None:
        """Waits until every policy has its first version, and then hands the policies to the runner."""
        while any(host.live_version < 0 for host in self._hosts.values()):
            self._served_changed.clear()
            await self._served_changed.wait()
        for name, host in self._hosts.items():
            assert host.hosted is not None
            self._hosted[name] = host.hosted

    def _note_served(self) -> None:
        self._served_changed.set()
        self._beat_due.set()

    def _served_versions(self) -> tuple[ServedVersions, ...]:
        return tuple(host.served_versions for host in self._hosts.values())

    # --- leases and episodes ---

    async def _lease(self, group: asyncio.TaskGroup) -> None:
        self._evaluation.host(self._hosted)
        self._scoring.policies = self._hosted
        await self._environments.open()
        await self._runner.open()
        await self._scoring.start()
        await self._evaluation.start()
        await self._wait_until_served()
        self._has_lost_an_engine()  # shows the limit which engines have a bounded KV cache
        while True:
            num_free = await self._wait_for_slots()
            try:
                reply = await self._request_leases(num_free, self._served_versions(), _WAIT_S)
            except UnavailableError as err:
                _log.warning("no leases, the dataflow does not answer: %s", err)
                self._waits_for = (WaitReason(kind="no_dataflow"),)
                await asyncio.sleep(_PAUSE_S)
                continue
            self._note_state(reply.state)
            self._waits_for = reply.waits_for
            if not self._has_device:
                await self._hand_in([lease.id for lease in reply.leases])
                continue
            for lease in reply.leases:
                self._start(group, lease)
            if not reply.leases:
                await asyncio.sleep(_PAUSE_S)

    async def _wait_for_slots(self) -> int:
        """Waits until a slot is free. Returns: the number of free slots."""
        while True:
            while self._num_free() <= 0:
                self._freed.clear()
                await self._freed.wait()
            await asyncio.sleep(_COALESCE_S * self._busy_share())
            if (num_free := self._num_free()) > 0:
                return num_free

    def _busy_share(self) -> float:
        return min(1.0, len(self._running) / self._episode_limit.num_slots)

    def _num_free(self) -> int:
        if not self._has_device or len(self._outbox.lease_ids) >= _MAX_UNSENT * self._config.max_episodes:
            return 0
        return self._episode_limit.num_free(len(self._running))

    async def _request_leases(
        self, num_free: int, served: tuple[ServedVersions, ...], wait_s: float
    ) -> LeaseReply:
        """Requests leases, and lists the leases that the service holds.

        From the list, the dataflow sees which leases were in a reply that got lost, and grants them again. A
        waiting request is never cancelled, because leases on their way would be lost. Newly served versions
        reach the dataflow by heartbeat meanwhile.
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

        def note_end(_: object) -> None:
            del self._running[lease.id]
            self._freed.set()

        task.add_done_callback(note_end)

    async def _run_episode(self, lease: Lease) -> None:
        result = await self._run_lease(lease)
        # A failure that a dead engine caused is not reported: the lease goes back instead, so another service
        # can run the episode.
        has_lost = self._has_lost_an_engine(num_ended=1)
        if not (isinstance(result.outcome, Failure) and has_lost):
            self._outbox.put(result)
            self._progress.end(lease.id)
        self._freed.set()

    def _has_lost_an_engine(self, *, num_ended: int = 0) -> bool:
        """Whether an engine will never serve again. If so, the service starts to leave, and the leases of the
        episodes that failed because of it go back. Otherwise, the load decides how many episodes may run."""
        num_running = len(self._running) - num_ended
        try:
            self._episode_limit.observe(self._capacities(), num_running=num_running, num_ended=num_ended)
        except ServiceError as err:
            self._end.failure = err
            self._end.is_broken.set()
        return self._end.is_broken.is_set()

    async def _run_lease(self, lease: Lease) -> EpisodeResult:
        """Runs the episode, and holds the pinned versions that an evaluation lease names in their slots."""
        if not lease.pinned:
            return await self._runner.run(lease, await self._progress.begin(lease))
        with ExitStack() as held:
            try:
                for pin in lease.pinned:
                    held.enter_context(self._hosts[pin.policy].hold_version(pin.versions[-1]))
            except RolloutError as err:
                return EpisodeResult(lease_id=lease.id, outcome=classify_failure(err))
            return await self._runner.run(lease)

    # --- heartbeat ---

    async def _send_heartbeats(self) -> None:
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
                beat = Heartbeat(
                    lease_ids=held, load=self._measure_load(), peer_url=self._membership.peer_url
                )
                self._obey(await self._membership.call(lambda me, beat=beat: self._link.heartbeat(me, beat)))
            except UnavailableError as err:
                if self._membership.silence_s > self._config.outage_s:
                    raise
                _log.warning("no heartbeat, the dataflow does not answer: %s", err)
                await asyncio.sleep(_PAUSE_S)

    def _obey(self, reply: HeartbeatReply) -> None:
        self._note_state(reply.state)
        if reply.is_draining:
            self._end.is_draining.set()
        for lease_id in reply.revoked:
            if (task := self._running.get(lease_id)) is not None:
                task.cancel()
            self._progress.end(lease_id)
        self._outbox.discard(reply.revoked)
        self._freed.set()

    def _note_state(self, state: str) -> None:
        if state in {"finished", "failed"}:
            self._end.is_over.set()

    def _capacities(self) -> list[Capacity]:
        """The capacity of each engine. Raises: ServiceError if an engine will never serve again."""
        return [engine.capacity() for engine in self._engines()]

    def _engines(self) -> list[Engine]:
        return [host.hosted.engine for host in self._hosts.values() if host.hosted is not None]

    def _wait_reasons(self) -> Sequence[WaitReason]:
        """Why the service isn't generating; empty if it is."""
        of_hosts = [reason for host in self._hosts.values() if (reason := host.wait_reason) is not None]
        if of_hosts:
            return sorted(of_hosts, key=lambda reason: reason.kind != "weights_failed")[:1]
        if self._scoring.calls.num > _MIN_SCORING_FRAC * len(self._running):
            return (WaitReason(kind="scoring", detail=as_label(self._scoring.queue)),)
        return () if self._running else self._waits_for

    def _measure_load(self) -> Load:
        capacities = self._capacities()
        generated = sum(capacity.generated_tokens for capacity in capacities)
        return Load(
            num_running=len(self._running),
            num_slots=self._episode_limit.num_slots if self._has_device else 0,
            max_slots=self._config.max_episodes,
            num_waiting=sum(capacity.num_waiting for capacity in capacities),
            generated_tokens=generated,
            tokens_per_s=self._speed.measure(generated),
            versions=self._served_versions(),
            waits_for=tuple(self._wait_reasons()[:_MAX_WAIT_REASONS]),
            spans=tuple(
                span for source in (*self._engines(), *self._hosts.values()) for span in source.take_spans()
            ),
            transfers=tuple(t for host in self._hosts.values() if (t := host.transfer()) is not None),
            num_scoring=self._scoring.calls.num,
            scoring_s=self._scoring.calls.oldest_s,
            num_late_scores=self._runner.num_late_scores,
            num_scorer_errors=self._runner.num_scorer_errors,
        )


async def _try_within(seconds: float, call: Coroutine[Any, Any, object]) -> None:
    """Awaits the call for at most `seconds`. A failure is only logged, because the service leaves anyway."""
    try:
        async with asyncio.timeout(seconds):
            await call
    except (TimeoutError, Error) as err:
        _log.warning("shut down before everything was sent: %s", err or f"no answer within {seconds} s")

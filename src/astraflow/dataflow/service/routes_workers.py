"""Handlers of the rollout services' routes: join, heartbeat, drain, leases, episodes, tasks."""

import asyncio
import logging
import re
from collections.abc import Callable, Hashable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from astraflow.dataflow.core.commands import (
    AddTasks,
    AddWorker,
    ExpireLeases,
    IssueLeases,
    LeaseView,
    StopRun,
)
from astraflow.dataflow.service.liveness import WorkerLife
from astraflow.dataflow.service.result_recorder import ResultRecorder
from astraflow.dataflow.service.results import DecodedResults, EpisodeResults, decode_results, split_results
from astraflow.dataflow.service.routes_shared import (
    ServedRun,
    caller,
    check_fingerprints,
    check_protocol,
    read_body,
)
from astraflow.errors import DataError, RefusedError, WireError
from astraflow.service.messages import item_response, media_type_of, read_item
from astraflow.service.worker_ids import new_worker_id
from astraflow.types import (
    EpisodeReceipt,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Load,
    PushTasks,
    Receipts,
    RegisterWorker,
    Registration,
    ServedVersions,
    Wait,
    WaitReason,
)
from astraflow.types.bounds import MAX_ERROR_CHARS
from astraflow.types.waits import DATAFLOW, Party

__all__ = ["WorkerRoutes"]

_log = logging.getLogger(__name__)
_PEER_URL = re.compile(r"http://[A-Za-z0-9.:\[\]-]{1,255}")
_MAX_SERVED = 1024
"""Most versions that a service may list, over all its policies, because each status repeats them."""
_SLICE_BYTES = 4 * 1024 * 1024
"""Results are decoded and recorded in slices of this size. Other requests are served between two slices."""
_SLICE_RESULTS = 256


class WorkerRoutes:
    """One method per route."""

    def __init__(self, run: ServedRun, recorder: ResultRecorder) -> None:
        self._run = run
        self._dispatcher = run.dispatcher
        self._core = run.dispatcher.core
        self._liveness = run.dispatcher.liveness
        self._recorder = recorder

    async def register(self, request: Request) -> Response:
        """`POST /v1/workers`."""
        body = await read_body(request, RegisterWorker)
        who = f"rollout service {body.name!r}"
        check_protocol(body.protocol, who)
        unknown = [name for name in body.hosts if name not in self._run.policies]
        if unknown or not body.hosts:
            raise RefusedError(
                f"{who} hosts {list(body.hosts)}; the run's policies are {list(self._run.policies)}",
                code="unknown_policy",
            )
        check_fingerprints(body.fingerprints, self._run.run_info.fingerprints, who)
        peer_url = self._check_peer_url(body.peer_url, who, request)
        self._make_room()
        id_ = new_worker_id(body.name)
        while self._core.worker_key(id_.handle):
            id_ = new_worker_id(body.name)
        self._dispatcher.apply(AddWorker(worker_id=id_.handle, name=body.name, hosts=body.hosts, key=id_.key))
        now_s = self._dispatcher.loop.time()
        life = WorkerLife(
            id_.handle,
            body.name,
            body.engine,
            body.hosts,
            last_seen_s=now_s,
            peer_url=peer_url,
            address=caller(request),
        )
        if self._liveness.add(life):
            self._dispatcher.deadline_moved.set()  # a silent service that this one replaces may be overdue
        await self._dispatcher.wait_durable()
        reply = Registration(
            worker_id=id_.worker_id,
            heartbeat_s=life.heartbeat_s,
            lease_timeout_s=self._run.config.lease_timeout_s,
        )
        return item_response(reply, request)

    async def heartbeat(self, request: Request) -> Response:
        """`POST /v1/workers/{worker_id}/heartbeat`: changes soft state; only the spans are journaled."""
        secret_id = str(request.path_params["worker_id"])
        beat = await read_body(request, Heartbeat)
        state = self._core.state
        if state != "running":
            # A service that learns of the end leaves, so a crash must not undo the end.
            await self._dispatcher.wait_durable()
        worker_id = self._run.sender(secret_id)
        if self._liveness.has_left(worker_id):
            reply = HeartbeatReply(revoked=beat.lease_ids, state=state, is_draining=True)
            return item_response(reply, request)
        worker = self._liveness.worker(worker_id) or self._run.known_worker(secret_id)
        _check_served(beat.load.versions, worker_id)
        if beat.peer_url and beat.peer_url != worker.peer_url:
            self._note_peer_url(worker, beat.peer_url, request)
        revoked = self._core.revoked_leases(worker_id, beat.lease_ids)
        live = set(beat.lease_ids) - set(revoked)
        has_loaded = bool(beat.load.versions) and beat.load.versions != worker.served
        # Spans are only for the journal. In the load, they would be part of every status.
        load = msgspec.structs.replace(beat.load, spans=())
        self._liveness.note_beat(worker_id, live, load, self._dispatcher.loop.time())
        self._dispatcher.journal.note_spans(worker.name, beat.load.spans)
        self._note_share(worker_id, beat.load)
        self._end_if_refused(beat.load.waits_for)
        if has_loaded:
            self._dispatcher.lease_queue.recheck(worker_id)
        reply = HeartbeatReply(revoked=revoked, state=state, is_draining=worker.is_draining)
        self._note_end(worker_id)
        return item_response(reply, request)

    async def drain(self, request: Request) -> Response:
        """`POST /v1/workers/{worker_id}/drain`."""
        secret_id = str(request.path_params["worker_id"])
        if not self._liveness.has_left(self._run.sender(secret_id)):
            self._start_drain(self._run.known_worker(secret_id))
            self._drop_if_drained(self._run.sender(secret_id))
        await self._dispatcher.wait_durable()
        return Response(status_code=204)

    async def ask_to_leave(self, request: Request) -> Response:
        """`POST /v1/workers/{handle}/leave`: changes soft state, which a restart loses.

        A service that is gone is ignored. All others, even those without leases, learn of the request from
        their next heartbeat and leave by themselves."""
        worker = self._liveness.worker(str(request.path_params["handle"]))
        if worker is not None:
            self._start_drain(worker)
        return Response(status_code=204)

    async def leases(self, request: Request) -> Response:
        """`POST /v1/leases`: long-poll."""
        body = await read_body(request, LeaseRequest)
        worker = self._run.known_worker(body.worker_id)
        _check_served(body.served, worker.id)
        is_newest = self._reclaim_lost(worker, body.held)
        since_s = self._dispatcher.clock()
        worker.served = body.served

        def served() -> tuple[ServedVersions, ...]:
            """Read anew each time: heartbeats report versions that the service loads while it waits."""
            return worker.served

        def look() -> tuple[LeaseView, ...] | None:
            if (
                not is_newest()
                or worker.is_draining
                or body.num_free <= 0
                or self._liveness.worker(worker.id) is None
            ):
                return ()
            command = IssueLeases(worker_id=worker.id, num_free=body.num_free, served=served())
            return self._dispatcher.apply(command).answer or None

        def wait() -> Wait:
            who = Party(kind="service", name=worker.name)
            reasons = self._core.why_no_lease(served(), worker.id)
            return Wait(who=who, whom=_find_awaited(who, reasons), reasons=reasons, since_s=since_s)

        def kind() -> Hashable:
            """Services with equal versions can run the same leases, except one that keeps failing."""
            return served(), worker.id if self._core.is_restricted(worker.id) else ""

        views = await self._run.polls.poll_leases(
            look, worker_id=worker.id, kind=kind, wait_s=body.wait_s, wait=wait, request=request
        )
        leases = self._add_tasks(views or ())
        waits_for = () if leases else self._core.why_no_lease(served(), worker.id)
        reply = LeaseReply(leases=leases, state=self._core.state, waits_for=waits_for)
        await self._dispatcher.wait_durable()
        self._note_end(worker.id)
        return item_response(reply, request)

    async def episodes(self, request: Request) -> Response:
        """`POST /v1/episodes`: each result is checked, its payloads are stored, then it is recorded."""
        body = await read_item(request, EpisodeResults)
        media_type = media_type_of(request)
        sender = self._run.sender(body.worker_id)
        self._liveness.note_seen(sender, self._dispatcher.loop.time())
        # All are decoded before the first is recorded, because one malformed result fails the whole request.
        decoded: list[DecodedResults] = []
        for raws in split_results(body.results, max_bytes=_SLICE_BYTES, max_num=_SLICE_RESULTS):
            if decoded:
                await asyncio.sleep(0)
            decoded.append(decode_results(raws, media_type))
        receipts: list[EpisodeReceipt] = []
        for results in decoded:
            if receipts:
                await asyncio.sleep(0)
            receipts += self._recorder.record(sender, results, await self._recorder.check(sender, results))
        self._drop_if_drained(sender)
        await self._dispatcher.wait_durable()
        return item_response(Receipts(receipts=tuple(receipts)), request)

    async def push_tasks(self, request: Request) -> Response:
        """`POST /v1/tasks`."""
        body = await read_body(request, PushTasks)
        reply = self._dispatcher.apply(AddTasks(tasks=body.tasks)).answer
        await self._dispatcher.wait_durable()
        return item_response(reply, request)

    def _add_tasks(self, views: Sequence[LeaseView]) -> tuple[Lease, ...]:
        """Adds the tasks to the leases.

        A source that fails ends the run, because no service could run the episodes. Fix it, then resume.
        """
        try:
            return tuple(self._run.lookup.lease(view) for view in views)
        except DataError as err:
            _log.error("the run ends: %s", err, exc_info=err)
            self._dispatcher.apply(StopRun(reason=str(err)[:MAX_ERROR_CHARS], is_failure=True))
            return ()

    def _end_if_refused(self, reasons: Sequence[WaitReason]) -> None:
        """Ends the run if none of the services can install a version."""
        loads = [worker.load for worker in self._liveness.workers() if not worker.is_draining]
        for reason in reasons:
            key = (reason.kind, reason.policy, reason.version)
            if (
                reason.kind == "weights_failed"
                and reason.version >= 0
                and loads  # a service that leaves doesn't speak for those that may still join
                and all(
                    any((other.kind, other.policy, other.version) == key for other in load.waits_for)
                    for load in loads
                )
            ):
                cause = (
                    f"no rollout service can install version {reason.version} of {reason.policy}: "
                    f"{reason.detail}"
                )
                self._dispatcher.apply(StopRun(reason=cause[:MAX_ERROR_CHARS], is_failure=True))

    def _make_room(self) -> None:
        """Makes room for another service. Raises: RefusedError if there are too many, and none is silent."""
        if not self._liveness.is_full:
            return
        silent = sorted(self._liveness.silent(self._dispatcher.loop.time()), key=lambda w: w.last_seen_s)
        if not silent:
            num = self._liveness.max_workers
            problem = f"the maximum of {num} rollout services has joined, and none is silent; join later"
            raise RefusedError(problem, code="unavailable", status=503)
        self._dispatcher.drop_worker(silent[0].id, "silent, and another service needs its place")

    def _reclaim_lost(self, worker: WorkerLife, held_ids: Sequence[str] | None) -> Callable[[], bool]:
        """Reissues leases that never reached the service: its request doesn't list them among those it holds.

        Returns a function that says whether this is still the service's newest request. An older request,
        which the service gave up, must not grant leases, even if its hang-up has not been detected yet.
        """
        if held_ids is None:
            return lambda: True
        this_request = object()
        worker.newest_request = this_request
        held = set(held_ids)
        lost = tuple(id_ for id_ in self._core.worker_leases(worker.id) if id_ not in held)
        if lost:
            _log.info("%s never received %d leases; they are reissued", worker.id, len(lost))
            self._dispatcher.apply(ExpireLeases(lease_ids=lost, never_arrived=True))
            self._liveness.end(lost)
        return lambda: worker.newest_request is this_request

    def _note_share(self, worker_id: str, load: Load) -> None:
        """Notes the service's share of idle slots, and whether they are idle because of a trainer. A service
        that doesn't report its slots counts as busy."""
        free_frac = max(0.0, 1 - load.num_running / load.num_slots) if load.num_slots else 0.0
        self._dispatcher.shares.note_beat(
            worker_id,
            free_frac=free_frac,
            is_held_back=free_frac > 0 and self._core.is_held_back(load.versions),
            now_s=self._dispatcher.clock(),
            tokens=load.generated_tokens if load.num_slots else 0,
        )

    def _note_end(self, worker_id: str) -> None:
        """If the run has ended, notes that this reply tells the service."""
        if self._core.state != "running":
            self._liveness.note_end_told(worker_id)

    def _start_drain(self, worker: WorkerLife) -> None:
        worker.is_draining = True
        self._dispatcher.lease_queue.recheck(worker.id)

    def _drop_if_drained(self, worker_id: str) -> None:
        worker = self._liveness.worker(worker_id)
        if worker is not None and worker.is_draining and not self._core.worker_leases(worker_id):
            self._dispatcher.drop_worker(worker_id, "drained")

    def _check_peer_url(self, url: str, who: str, request: Request) -> str:
        """The URL at which a service serves weights; empty if it doesn't, or if peers are turned off.

        Raises: WireError if it is not a URL; RefusedError if the service may not announce that address.
        """
        if url and not _PEER_URL.fullmatch(url):
            raise WireError(f"{who}: peer_url {url[:300]!r} must have the form http://HOST:PORT")
        rules = self._run.peer_rules
        if not url or not rules.is_on:
            return ""
        rules.check(url, caller(request), who)
        return url

    def _note_peer_url(self, worker: WorkerLife, url: str, request: Request) -> None:
        """Notes the peer address in a heartbeat.

        If the service may not announce it, the service stays in the run without a peer address: its own
        address may have changed since it joined.
        """
        try:
            worker.peer_url = self._check_peer_url(url, worker.id, request)
        except RefusedError as err:
            worker.peer_url = ""
            _log.warning("%s; it is not announced", err)


def _find_awaited(service: Party, reasons: Sequence[WaitReason]) -> Party:
    """For whom a service without a lease waits; the service itself if it must load a version first."""
    main = next((reason for reason in reasons if reason.kind != "admission_all"), None)
    if main is None or main.kind == "run_over":
        return DATAFLOW
    return service if main.kind in {"behind", "set_aside"} else Party(kind="trainer", name=main.policy)


def _check_served(served: Sequence[ServedVersions], who: str) -> None:
    num = sum(len(entry.versions) for entry in served)
    if num > _MAX_SERVED:
        raise WireError(f"{who}: serves {num} versions; list at most {_MAX_SERVED}, the newest ones")

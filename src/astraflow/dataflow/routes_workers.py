"""Handlers of rollout services: join, heartbeat, drain, leases, episodes, tasks."""

import asyncio
import logging
import re
from collections.abc import Callable, Hashable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from astraflow import wire
from astraflow.bounds import MAX_REASON
from astraflow.dataflow.core.commands import (
    AddWorker,
    EpisodeFacts,
    ExpireLeases,
    IssueLeases,
    LeaseView,
    PushTaskIds,
    RecordResult,
    StopRun,
)
from astraflow.dataflow.ingest import (
    PolicyLimits,
    check_results,
    facts_of,
    lease_kind,
    vocab_size,
)
from astraflow.dataflow.liveness import WorkerLife
from astraflow.dataflow.results import DecodedResults, EpisodeResults, decode_results, sliced
from astraflow.dataflow.routes_shared import ServedRun, caller, check_fingerprints, check_protocol, read_body
from astraflow.dataflow.transcripts import TranscriptKeeper
from astraflow.errors import DataError, Error, RefusedError, WireError
from astraflow.service.messages import item_response, read_item
from astraflow.types import (
    Episode,
    EpisodeReceipt,
    EpisodeResult,
    Failure,
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
)
from astraflow.worker_ids import handle_of, is_key_of, new_worker_id

__all__ = ["WorkerRoutes"]

_log = logging.getLogger(__name__)
_PEER_URL = re.compile(r"http://[A-Za-z0-9.:\[\]-]{1,255}")
_MAX_SERVED = 1024
"""Versions that a service names, of all its policies: each status repeats them."""
_MAX_MISSED_BEATS = 2
"""A service that missed so many heartbeats may have to make room."""
_SLICE_BYTES = 4 * 1024 * 1024
_SLICE_RESULTS = 256
"""Results are decoded and recorded so many at a time, and the event loop goes on between two slices."""


class WorkerRoutes:
    """One method a route."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._dispatcher = run.dispatcher
        self._core = run.dispatcher.core
        self._liveness = run.dispatcher.liveness
        self._keeper = TranscriptKeeper(run.dispatcher.core, run.dispatcher.journal, run.lookup)
        self._vocab_sizes: dict[str, int] = {}

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
        peer_url = self._checked_peer_url(body.peer_url, who, request)
        self._make_room()
        id_ = new_worker_id(body.name)
        while self._core.worker_key(id_.handle):
            id_ = new_worker_id(body.name)
        self._dispatcher.apply(AddWorker(worker_id=id_.handle, name=body.name, hosts=body.hosts, key=id_.key))
        now_s = asyncio.get_running_loop().time()
        life = WorkerLife(
            id_.handle, body.name, body.engine, body.hosts, last_seen_s=now_s, peer_url=peer_url
        )
        self._liveness.add(life)
        self._dispatcher.watch()
        await self._dispatcher.settled()
        config = self._run.config
        reply = Registration(
            worker_id=id_.worker_id, heartbeat_s=config.heartbeat_s, lease_timeout_s=config.lease_timeout_s
        )
        return item_response(reply, request)

    async def heartbeat(self, request: Request) -> Response:
        """`POST /v1/workers/{worker_id}/heartbeat`: soft state only, nothing is journaled but spans."""
        secret_id = str(request.path_params["worker_id"])
        beat = await read_body(request, Heartbeat)
        state = self._core.state
        if state != "running":
            await self._dispatcher.settled()  # Who hears of the end leaves; it must outlive a crash.
        if self._liveness.has_left(self._sender(secret_id)):
            reply = HeartbeatReply(revoked=beat.lease_ids, state=state, is_draining=True)
            return item_response(reply, request)
        worker = self._known(secret_id)
        worker_id = worker.id
        _check_served(beat.load.versions, worker_id)
        if beat.peer_url and beat.peer_url != worker.peer_url:
            self._note_peer_url(worker, beat.peer_url, request)
        revoked = self._core.revoked(worker_id, beat.lease_ids)
        live = set(beat.lease_ids) - set(revoked)
        has_loaded = bool(beat.load.versions) and beat.load.versions != worker.served
        # Spans are for the journal alone: kept here, every status would carry them.
        load = msgspec.structs.replace(beat.load, spans=())
        self._liveness.beat(worker_id, live, load, asyncio.get_running_loop().time())
        self._dispatcher.journal.note_spans(worker.name, beat.load.spans)
        self._note_share(worker_id, beat.load)
        if has_loaded:
            self._dispatcher.lease_queue.recheck(worker_id)
        reply = HeartbeatReply(revoked=revoked, state=state, is_draining=worker.is_draining)
        self._note_end(worker_id)
        return item_response(reply, request)

    async def drain(self, request: Request) -> Response:
        """`POST /v1/workers/{worker_id}/drain`."""
        secret_id = str(request.path_params["worker_id"])
        if not self._liveness.has_left(self._sender(secret_id)):
            worker = self._known(secret_id)
            worker.is_draining = True
            self._dispatcher.lease_queue.recheck(worker.id)
            self._drop_if_drained(worker.id)
        await self._dispatcher.settled()
        return Response(status_code=204)

    async def leases(self, request: Request) -> Response:
        """`POST /v1/leases`: long-poll."""
        body = await read_body(request, LeaseRequest)
        worker = self._known(body.worker_id)
        _check_served(body.served, worker.id)
        is_newest = self._reclaim_lost(worker, body.held)
        since_s = self._dispatcher.clock()
        worker.served = body.served

        def served() -> tuple[ServedVersions, ...]:
            """A service that waits here may have loaded a version meanwhile; its heartbeats say so."""
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
            whom = self._core.why_no_lease(served(), worker.id)
            return Wait(who=worker.name, whom=whom or "the tables", what="leases", since_s=since_s)

        def kind() -> Hashable:
            """Services with the same versions may have the same leases, but for those that fail."""
            return served(), worker.id if self._core.is_apart(worker.id) else ""

        views = await self._run.polls.poll_leases(
            look, worker_id=worker.id, kind=kind, wait_s=body.wait_s, wait=wait, request=request
        )
        leases = self._completed(views or ())
        waits_for = "" if leases else self._core.why_no_lease(served(), worker.id)
        reply = LeaseReply(leases=leases, state=self._core.state, waits_for=waits_for)
        await self._dispatcher.settled()
        self._note_end(worker.id)
        return item_response(reply, request)

    async def episodes(self, request: Request) -> Response:
        """`POST /v1/episodes`: each result is checked, its payloads stored, then recorded."""
        body = await read_item(request, EpisodeResults)
        media_type = request.headers.get("content-type", wire.MSGPACK)
        sender = self._sender(body.worker_id)
        self._liveness.seen(sender, asyncio.get_running_loop().time())
        # All are decoded before the first is recorded: a malformed one refuses the request whole.
        decoded: list[DecodedResults] = []
        for raws in sliced(body.results, max_bytes=_SLICE_BYTES, max_num=_SLICE_RESULTS):
            if decoded:
                await asyncio.sleep(0)
            decoded.append(decode_results(raws, media_type))
        receipts: list[EpisodeReceipt] = []
        for results in decoded:
            if receipts:
                await asyncio.sleep(0)
            receipts += self._record(sender, results)
        self._drop_if_drained(sender)
        await self._dispatcher.settled()
        return item_response(Receipts(receipts=tuple(receipts)), request)

    async def push_tasks(self, request: Request) -> Response:
        """`POST /v1/tasks`."""
        body = await read_body(request, PushTasks)
        reply = self._dispatcher.apply(PushTaskIds(tasks=body.tasks)).answer
        await self._dispatcher.settled()
        return item_response(reply, request)

    # --- parts ---

    def _completed(self, views: Sequence[LeaseView]) -> tuple[Lease, ...]:
        """The leases with their tasks. A source that fails ends the run, which can be resumed once the source
        is mended: no service could run the episodes."""
        try:
            return tuple(self._run.lookup.lease(view) for view in views)
        except DataError as err:
            _log.error("the run ends: %s", err, exc_info=err)
            self._dispatcher.apply(StopRun(reason=str(err)[:MAX_REASON], is_failure=True))
            return ()

    def _sender(self, secret_id: str) -> str:
        """The handle of the service that was given this id; empty if none was, or too long ago."""
        handle = handle_of(secret_id)
        return handle if is_key_of(secret_id, self._core.worker_key(handle)) else ""

    def _known(self, secret_id: str) -> WorkerLife:
        """The service, seen now. Raises: RefusedError if it must register (again)."""
        worker = self._liveness.worker(self._sender(secret_id))
        if worker is None:
            raise RefusedError(
                f"rollout service {handle_of(secret_id)!r} is not known here under this id: it never joined, "
                "left, or was silent for too long; register again",
                code="unknown_worker",
                status=404,
            )
        self._liveness.seen(worker.id, asyncio.get_running_loop().time())
        return worker

    def _make_room(self) -> None:
        """One more service may join. Raises: RefusedError if too many are here and none of them is silent."""
        if not self._liveness.is_full:
            return
        silent = self._liveness.most_silent()
        grace_s = _MAX_MISSED_BEATS * self._run.config.heartbeat_s
        if silent.last_seen_s + grace_s > asyncio.get_running_loop().time():
            raise RefusedError(
                f"{self._liveness.max_workers} rollout services are here, as many as may be, and none is "
                "silent; join later",
                code="unavailable",
                status=503,
            )
        self._dispatcher.drop_worker(silent.id, "silent, and others need the room")

    def _reclaim_lost(self, worker: WorkerLife, held_ids: Sequence[str] | None) -> Callable[[], bool]:
        """Leases whose answer never reached the service (it asks without holding them) go out again.

        Returns whether this is still the service's newest request: one that it gave up must grant nothing
        more, even if its hang-up has not been noticed yet.
        """
        if held_ids is None:
            return lambda: True
        me = worker.newest_ask = object()
        held = set(held_ids)
        lost = tuple(id_ for id_ in self._core.worker_leases(worker.id) if id_ not in held)
        if lost:
            _log.info("%s never got %d leases; they go out again", worker.id, len(lost))
            self._dispatcher.apply(ExpireLeases(lease_ids=lost, never_arrived=True))
            self._liveness.end(lost)
        return lambda: worker.newest_ask is me

    def _note_share(self, worker_id: str, load: Load) -> None:
        """How much of the service is idle, and whether a trainer keeps it so."""
        if load.num_slots > 0:
            self._dispatcher.shares.beat(
                worker_id,
                free_frac=max(0.0, 1 - load.num_running / load.num_slots),
                is_held_back=self._core.why_no_lease(load.versions).startswith("trainer: "),
                now_s=self._dispatcher.clock(),
            )

    def _note_end(self, worker_id: str) -> None:
        """The service is about to read the run's state."""
        if self._core.state != "running":
            self._liveness.tell_the_end(worker_id)

    def _drop_if_drained(self, worker_id: str) -> None:
        worker = self._liveness.worker(worker_id)
        if worker is not None and worker.is_draining and not self._core.worker_leases(worker_id):
            self._dispatcher.drop_worker(worker_id, "drained")

    def _limits(self) -> dict[str, PolicyLimits]:
        """What trajectories must keep to now."""
        limits: dict[str, PolicyLimits] = {}
        for name, info in self._run.policies.items():
            newest = self._core.newest_version(name) if info.is_trained else -1
            limits[name] = PolicyLimits(
                info,
                newest,
                self._vocab_size(name) if newest >= 0 else 0,
                self._run.max_tokens.get(name, 0),
            )
        return limits

    def _vocab_size(self, policy: str) -> int:
        """Of the policy's newest manifest; a policy's architecture never changes."""
        if policy not in self._vocab_sizes:
            manifests = self._core.versions(policy, after=-1).manifests
            if not manifests:
                return 0
            self._vocab_sizes[policy] = vocab_size(manifests[-1])
        return self._vocab_sizes[policy]

    def _record(self, worker_id: str, decoded: DecodedResults) -> tuple[EpisodeReceipt, ...]:
        """Results of one request: an invalid one is recorded as a failed attempt, so that it is not lost
        silently."""
        worker = self._liveness.worker(worker_id)
        hosts = worker.hosts if worker is not None else ()
        results = decoded.results
        broken = {**check_results(results, policies=self._limits(), hosts=hosts), **decoded.beyond_bounds}
        self._dispatcher.check()
        commands = [
            RecordResult(
                lease_id=result.lease_id,
                worker_id=worker_id,
                outcome=self._outcome(result, broken.get(idx)),
            )
            for idx, result in enumerate(results)
        ]
        # Before the commands are applied: a group that they complete takes its pushed task with it.
        rows = [self._keeper.row_of(result) for result in results]
        decisions = self._dispatcher.apply_all(commands)
        receipts: list[EpisodeReceipt] = []
        for idx, (result, decision) in enumerate(zip(results, decisions, strict=True)):
            if isinstance(decision, RefusedError):
                receipts.append(_invalid(result, decision))
                continue
            receipt: EpisodeReceipt = decision.answer
            if receipt.status == "accepted":
                self._liveness.end((result.lease_id,))
            receipts.append(_invalid(result, broken[idx]) if idx in broken else receipt)
            row, episode = rows[idx], result.outcome
            if row and receipt.status == "accepted" and isinstance(episode, Episode) and idx not in broken:
                self._keeper.keep(row, episode.messages)
        return tuple(receipts)

    def _checked_peer_url(self, url: str, who: str, request: Request) -> str:
        """Where a service serves weights, or nothing: where peers are off, nobody hears of it.

        Raises: WireError if it is no URL; RefusedError if the service may not name that address.
        """
        if url and not _PEER_URL.fullmatch(url):
            raise WireError(f"{who}: peer_url {url[:300]!r} is not http://HOST:PORT")
        rules = self._run.peer_rules
        if not url or not rules.is_on:
            return ""
        rules.check(url, caller(request), who)
        return url

    def _note_peer_url(self, worker: WorkerLife, url: str, request: Request) -> None:
        """A service names its address again. It goes on without being announced if it may not name this one:
        its own address may have changed under way."""
        try:
            worker.peer_url = self._checked_peer_url(url, worker.id, request)
        except RefusedError as err:
            worker.peer_url = ""
            _log.warning("%s; it is not announced", err)

    def _outcome(self, result: EpisodeResult, problem: WireError | None) -> EpisodeFacts | Failure:
        """What is recorded of a result; its payloads are stored."""
        if problem is not None:
            return Failure(error_class="invalid", message=str(problem)[:MAX_REASON])
        if isinstance(result.outcome, Failure):
            return result.outcome
        stored = self._run.trained if lease_kind(result.lease_id) == "train" else ()
        return facts_of(
            result.outcome, stored, self._dispatcher.journal.store, repetition_of=self._core.repetition_of
        )


def _check_served(served: Sequence[ServedVersions], who: str) -> None:
    num = sum(len(entry.versions) for entry in served)
    if num > _MAX_SERVED:
        raise WireError(f"{who}: serves {num} versions; name at most {_MAX_SERVED}, the newest ones")


def _invalid(result: EpisodeResult, problem: Error) -> EpisodeReceipt:
    return EpisodeReceipt(lease_id=result.lease_id, status="invalid", reason=str(problem)[:MAX_REASON])

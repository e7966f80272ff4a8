"""The dataflow's client: `WorkerLink` and `TrainerLink` over HTTP or in memory, and what viewers read."""

from collections.abc import Mapping

import msgspec

from astraflow.dataflow.api import MAX_WAIT_S
from astraflow.errors import RefusedError, WireError
from astraflow.service.client import ServiceClient
from astraflow.types import (
    Batch,
    BatchReply,
    Commit,
    DropReply,
    DropRequest,
    EarlierProgress,
    EpisodeResults,
    EvalRecord,
    EvalsReply,
    Health,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    ProgressReply,
    ProgressReport,
    ProgressTotals,
    Publication,
    PublicationReply,
    PushTasks,
    PushTasksReply,
    Receipts,
    RegisterWorker,
    Registration,
    Release,
    RunInfo,
    Sample,
    Session,
    SessionRequest,
    StatusReply,
    StepFailure,
    StepRecord,
    StepsReply,
    StopRequest,
    TensorInfo,
    VersionsReply,
)

__all__ = ["STATUS_S", "DataflowClient"]

STATUS_S = 2.0
"""Longest time for a status. A dataflow that needs longer is stopped, hangs, or cannot be reached."""
_ANSWER_S = 10.0
"""Longest time for an answer, in addition to the long-poll."""
_BATCH_ANSWER_S = 120.0
"""A batch may be hundreds of megabytes."""


class DataflowClient:
    """Calls a dataflow service. Implements `WorkerLink` and `TrainerLink`.

    Example: `DataflowClient(ServiceClient("http://127.0.0.1:8000", token="..."))`. The caller closes
    the `ServiceClient`. Calls retry until its patience ends (UnavailableError); a refusal is RefusedError.
    """

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._pinned: dict[str, tuple[int, ...]] = {}
        """Policy -> pinned versions in the last answer. A change ends the next long-poll at once."""
        self._tables: dict[str, tuple[tuple[TensorInfo, ...], str]] = {}
        """Policy -> tensor table of its versions, and the dataflow's name for it."""

    async def register(self, request: RegisterWorker) -> Registration:
        """Joins the run. Raises: RefusedError, naming it, if model, tokenizer or recipe differ from the
        run's."""
        return await self._client.call("POST", "/v1/workers", Registration, body=request)

    async def heartbeat(self, worker_id: str, beat: Heartbeat) -> HeartbeatReply:
        """Extends leases. Raises: RefusedError with code `unknown_worker`: register again."""
        return await self._client.call(
            "POST", f"/v1/workers/{worker_id}/heartbeat", HeartbeatReply, body=beat
        )

    async def drain(self, worker_id: str) -> None:
        """Announces that the service leaves once its leases have results."""
        await self._client.call("POST", f"/v1/workers/{worker_id}/drain", None)

    async def ask_to_leave(self, handle: str) -> None:
        """Asks a service to leave once its leases have results. `handle`: its id in the status."""
        await self._client.call("POST", f"/v1/workers/{handle}/leave", None, timeout_s=STATUS_S)

    async def leases(self, request: LeaseRequest) -> LeaseReply:
        """Leases, or none after `request.wait_s`."""
        timeout_s = min(request.wait_s, MAX_WAIT_S) + _ANSWER_S
        return await self._client.call("POST", "/v1/leases", LeaseReply, body=request, timeout_s=timeout_s)

    async def episodes(self, results: EpisodeResults) -> Receipts:
        """Sends results; safe to repeat."""
        return await self._client.call(
            "POST", "/v1/episodes", Receipts, body=results, timeout_s=_BATCH_ANSWER_S
        )

    async def tell_progress(self, worker_id: str, report: ProgressReport) -> ProgressReply:
        """Reports completions of running episodes."""
        return await self._client.call(
            "POST", f"/v1/workers/{worker_id}/progress", ProgressReply, body=report
        )

    async def earlier_progress(self, worker_id: str, lease_id: str) -> EarlierProgress:
        """What earlier attempts at the episode of a lease sampled."""
        return await self._client.call("GET", f"/v1/workers/{worker_id}/progress/{lease_id}", EarlierProgress)

    async def push_tasks(self, tasks: PushTasks) -> PushTasksReply:
        """Adds tasks that are drawn before the sources' own."""
        return await self._client.call("POST", "/v1/tasks", PushTasksReply, body=tasks)

    async def versions(self, policy: str, *, after: int, wait_s: float = MAX_WAIT_S) -> VersionsReply:
        """Newer manifests; returns early when the pinned versions change or the run ends."""
        pinned = ",".join(str(version) for version in self._pinned.get(policy, ()))
        tensors, known = self._tables.get(policy, ((), ""))
        reply = await self._client.call(
            "GET",
            f"/v1/policies/{policy}/versions",
            VersionsReply,
            params={"after": str(after), "wait_s": str(wait_s), "pinned": pinned, "table": known},
            timeout_s=min(wait_s, MAX_WAIT_S) + _ANSWER_S,
        )
        self._pinned[policy] = reply.pinned
        if not reply.table or not reply.manifests:
            return reply
        if reply.table != known:
            tensors = reply.manifests[0].tensors
            if not tensors:
                raise WireError(f"the versions of {policy!r} came without their tensors, {reply.table!r}")
            self._tables[policy] = (tensors, reply.table)
        # All manifests share one table in memory, whether they came with it or not.
        whole = tuple(msgspec.structs.replace(manifest, tensors=tensors) for manifest in reply.manifests)
        return msgspec.structs.replace(reply, manifests=whole, table="")

    async def attach(self, policy: str, request: SessionRequest) -> Session:
        """Opens a session; older ones of the policy are fenced."""
        return await self._client.call("POST", f"/v1/policies/{policy}/session", Session, body=request)

    async def batch(
        self, policy: str, step: int, *, epoch: int, rank: int = 0, world: int = 1
    ) -> Batch | None:
        """Waits for the slice of a step. None if the run ends first. Raises: FencedError."""
        slice_params = {"epoch": str(epoch), "rank": str(rank), "world": str(world)}
        samples: list[Sample] = []
        page = 0
        num_pages = 1
        batch: Batch | None = None
        while page < num_pages:
            reply = await self._page(policy, step, {**slice_params, "page": str(page)})
            if reply.batch is None:
                return None
            batch = reply.batch
            samples += batch.samples
            num_pages = reply.num_pages
            page += 1
        return None if batch is None else msgspec.structs.replace(batch, samples=tuple(samples))

    async def _page(self, policy: str, step: int, params: Mapping[str, str]) -> BatchReply:
        """Waits for a page of a slice. No batch if the run ends first."""
        params = {**params, "zeroed": "1", "wait_s": str(MAX_WAIT_S)}
        while True:
            reply = await self._client.call(
                "GET",
                f"/v1/policies/{policy}/batches/{step}",
                BatchReply,
                params=params,
                timeout_s=MAX_WAIT_S + _BATCH_ANSWER_S,
            )
            if reply.batch is not None or reply.state in {"finished", "failed"}:
                return reply

    async def publish(self, policy: str, publication: Publication) -> PublicationReply:
        """Announces a version. The answer lists the versions that someone still needs.

        The tensor table is left out if an earlier answer named it.
        """
        path = f"/v1/policies/{policy}/versions"
        tensors, known = self._tables.get(policy, ((), ""))
        reply: PublicationReply | None = None
        if known and publication.manifest.tensors == tensors:
            bare = msgspec.structs.replace(publication.manifest, tensors=())
            body = msgspec.structs.replace(publication, manifest=bare, table=known)
            try:
                reply = await self._client.call("POST", path, PublicationReply, body=body)
            except RefusedError as err:
                if err.code != "unknown_table":
                    raise
        if reply is None:
            reply = await self._client.call("POST", path, PublicationReply, body=publication)
        if reply.table:
            self._tables[policy] = (publication.manifest.tensors, reply.table)
        return reply

    async def commit(self, policy: str, commit: Commit) -> None:
        """Reports that a step is trained and published."""
        await self._client.call("POST", f"/v1/policies/{policy}/commit", None, body=commit)

    async def release(self, policy: str, release: Release) -> None:
        """Reports that a checkpoint of the first steps is durable."""
        await self._client.call("POST", f"/v1/policies/{policy}/release", None, body=release)

    async def step_failed(self, policy: str, failure: StepFailure) -> None:
        """Reports that the batch of a step could not be trained on."""
        await self._client.call("POST", f"/v1/policies/{policy}/failure", None, body=failure)

    async def run(self) -> RunInfo:
        """The description of the run, for services that join."""
        return await self._client.call("GET", "/v1/run", RunInfo)

    async def health(self) -> Health:
        """Returns if the service can take commands. Raises: UnavailableError after the client's patience."""
        return await self._client.call("GET", "/v1/health", Health)

    async def steps(self, policy: str, after: int = -1, wait_s: float = MAX_WAIT_S) -> tuple[StepRecord, ...]:
        """Committed steps above `after`; empty after `wait_s` or when the run ended."""
        params = {"after": str(after), "wait_s": str(wait_s)}
        path = f"/v1/policies/{policy}/steps"
        reply = await self._client.call("GET", path, StepsReply, params=params, timeout_s=wait_s + _ANSWER_S)
        return reply.steps

    async def evals(self, after: int = 0, wait_s: float = MAX_WAIT_S) -> tuple[EvalRecord, ...]:
        """Finished evaluation rounds without the first `after` of them."""
        params = {"after": str(after), "wait_s": str(wait_s)}
        reply = await self._client.call(
            "GET", "/v1/evals", EvalsReply, params=params, timeout_s=wait_s + _ANSWER_S
        )
        return reply.evals

    async def status(self) -> StatusReply:
        """Who waits for whom, and since when. A try takes at most `STATUS_S`."""
        return await self._client.call("GET", "/v1/status", StatusReply, timeout_s=STATUS_S)

    async def progress(self) -> ProgressTotals:
        """Totals of completions kept for unfinished episodes. A try takes at most `STATUS_S`."""
        return await self._client.call("GET", "/v1/progress", ProgressTotals, timeout_s=STATUS_S)

    async def drop_batch(self, policy: str, request: DropRequest) -> DropReply:
        """Drops the batch of an uncommitted step. Raises: FencedError if `request.epoch` is not the
        newest."""
        return await self._client.call("POST", f"/v1/policies/{policy}/drop", DropReply, body=request)

    async def stop(self, reason: str, is_failure: bool = False) -> None:
        """Ends the run: live groups are cancelled."""
        request = StopRequest(reason=reason, is_failure=is_failure)
        await self._client.call("POST", "/v1/stop", None, body=request)

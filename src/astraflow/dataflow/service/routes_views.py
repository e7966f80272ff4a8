"""Handlers of the routes that only read: run, versions, steps, evaluations, status, metrics; and `stop`."""

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from astraflow import added
from astraflow.dataflow.core.commands import StopRun
from astraflow.dataflow.service.liveness import WorkerLife
from astraflow.dataflow.service.openapi import openapi_json
from astraflow.dataflow.service.routes_shared import ServedRun, caller, float_param, int_param, read_body
from astraflow.metrics import row_from_record
from astraflow.service.messages import item_response
from astraflow.types import (
    EvalRecord,
    EvalsReply,
    Health,
    PolicyStatus,
    ScalingAdvice,
    SourceLink,
    StatusReply,
    StepRecord,
    StepsReply,
    StopRequest,
    VersionsReply,
    Wait,
    WaitReason,
    WorkerStatus,
)
from astraflow.types.waits import OVERDUE, POOL, RUN, SILENT, Party

__all__ = ["ViewRoutes"]


class ViewRoutes:
    """One method per route."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._dispatcher = run.dispatcher
        self._core = run.dispatcher.core

    async def run(self, request: Request) -> Response:
        """`GET /v1/run`."""
        await self._wait_for_durable_end()
        return item_response(msgspec.structs.replace(self._run.run_info, state=self._core.state), request)

    async def health(self, request: Request) -> Response:
        """`GET /v1/health`."""
        self._dispatcher.check()
        reply = Health(state=self._core.state, num_records=self._dispatcher.journal.seq)
        return item_response(reply, request)

    async def versions(self, request: Request) -> Response:
        """`GET /v1/policies/{policy}/versions`: long-poll."""
        policy = self._run.published_policy(request)
        after = int_param(request, "after", -1)
        wait_s = float_param(request, "wait_s", 0.0)
        known = request.query_params.get("pinned", "")
        table = request.query_params.get("table", "")

        def look() -> VersionsReply | None:
            reply = self._core.versions(policy, after=after)
            pinned = ",".join(str(version) for version in reply.pinned)
            return reply if reply.manifests or pinned != known else None

        found = await self._run.polls.poll(f"versions/{policy}", look, wait_s=wait_s, request=request)
        reply = found or self._core.versions(policy, after=after)
        await self._dispatcher.wait_durable()
        reply = self._run.tables.name_table(policy, reply, known=table)
        return item_response(self._with_peers(policy, reply, caller(request)), request)

    def _with_peers(self, policy: str, reply: VersionsReply, asker: str) -> VersionsReply:
        """Adds the services that serve the policy's weights to the sources of its versions."""
        rules = self._run.peer_rules
        if not rules.is_on:
            return reply
        peers = tuple(
            SourceLink(kind="http", url=worker.peer_url, labels={"peer": worker.name})
            for worker in self._dispatcher.liveness.workers()
            if worker.peer_url
            and policy in worker.hosts
            and not worker.is_draining
            and rules.is_for(worker.peer_url, asker)
        )
        if not peers:
            return reply
        manifests = tuple(
            msgspec.structs.replace(manifest, sources=(*manifest.sources, *peers))
            for manifest in reply.manifests
        )
        return msgspec.structs.replace(reply, manifests=manifests)

    async def steps(self, request: Request) -> Response:
        """`GET /v1/policies/{policy}/steps`: long-poll."""
        policy = self._run.trained_policy(request)
        after = int_param(request, "after", -1)
        wait_s = float_param(request, "wait_s", 0.0)

        def look() -> tuple[StepRecord, ...] | None:
            return self._core.steps(policy, after) or None

        found = await self._run.polls.poll(f"steps/{policy}", look, wait_s=wait_s, request=request)
        reply = StepsReply(steps=found or (), state=self._core.state)
        await self._dispatcher.wait_durable()
        return item_response(reply, request)

    async def evals(self, request: Request) -> Response:
        """`GET /v1/evals`: long-poll."""
        after = int_param(request, "after", 0)
        wait_s = float_param(request, "wait_s", 0.0)

        def look() -> tuple[EvalRecord, ...] | None:
            return self._core.evals(after) or None

        found = await self._run.polls.poll("evals", look, wait_s=wait_s, request=request) or ()
        num_evals = min(max(0, after), len(self._core.evals())) + len(found)
        reply = EvalsReply(evals=found, num_evals=num_evals, state=self._core.state)
        await self._dispatcher.wait_durable()
        return item_response(reply, request)

    async def status(self, request: Request) -> Response:
        """`GET /v1/status`."""
        await self._wait_for_durable_end()
        return item_response(await self._status(), request)

    async def stop(self, request: Request) -> Response:
        """`POST /v1/stop`."""
        body = await read_body(request, StopRequest)
        self._dispatcher.apply(StopRun(reason=body.reason, is_failure=body.is_failure))
        await self._dispatcher.wait_durable()
        return Response(status_code=204)

    async def metrics(self, request: Request) -> Response:
        """`GET /metrics`."""
        newest = [row_from_record(record) for record in self._core.newest_records()]
        num_records = self._dispatcher.journal.seq
        text = added.prometheus_text(
            await self._status(), num_records=num_records, newest=newest, progress=self._run.progress.totals
        )
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        """`GET /openapi.json`."""
        return Response(openapi_json(), media_type="application/json")

    async def _wait_for_durable_end(self) -> None:
        """If the run has ended, waits until the end is durable.

        Callers act on the end (the launcher stops all services), so a crash must not undo it. While the run
        continues, the status may show state that is not durable yet, so that it is there even on a full disk.
        """
        if self._core.state != "running":
            await self._dispatcher.wait_durable()

    async def _status(self) -> StatusReply:
        workers = await self._workers()
        now_s = self._dispatcher.clock()
        silent = self._silent_waits()
        held = self._run.failed_steps.waits()
        waiting = {wait.who for wait in held}
        waits = silent + tuple(
            self._complete_wait(wait, now_s)
            if wait.whom not in waiting
            else msgspec.structs.replace(wait, reasons=(WaitReason(kind="held_back", policy=wait.whom.name),))
            for wait in self._core.waits(now_s, self._dispatcher.started_s)
        )
        listed = {wait.who for wait in waits}
        parked = tuple(wait for wait in self._run.polls.waits.current() if wait.who not in listed)
        return StatusReply(
            name=self._run.run_info.name,
            state=self._core.state,
            reason=self._core.reason,
            now_s=now_s,
            policies=tuple(self._add_contact(policy, now_s) for policy in self._core.policy_status()),
            workers=workers,
            waits=(*self._run.oversized.values(), *held, *waits, *parked),
            curation=self._core.curation(),
            pushed=self._core.pushed,
            scaling=self._scaling(now_s, waits, workers),
        )

    def _silent_waits(self) -> tuple[Wait, ...]:
        """A wait for each rollout service that has missed its heartbeats."""
        now_s = asyncio.get_running_loop().time()
        to_unix_s = self._dispatcher.clock() - now_s
        return tuple(
            Wait(
                who=RUN,
                whom=Party(kind="service", name=worker.name),
                reasons=(WaitReason(kind="silent"),),
                since_s=worker.last_seen_s + to_unix_s,
            )
            for worker in self._dispatcher.liveness.silent(now_s)
        )

    def _add_contact(self, policy: PolicyStatus, now_s: float) -> PolicyStatus:
        request, seen_s = self._run.contacts.last(policy.name, now_s)
        return msgspec.structs.replace(policy, trainer_request=request, trainer_seen_s=seen_s)

    def _complete_wait(self, wait: Wait, now_s: float) -> Wait:
        """Adds what only the service knows to a wait of the core."""
        reasons = wait.reasons
        if wait.whom == POOL and not self._dispatcher.liveness.workers():
            reasons = (*reasons, WaitReason(kind="no_service"))
        completed = msgspec.structs.replace(wait, reasons=reasons)
        return self._run.contacts.explain(completed, now_s)

    def _scaling(self, now_s: float, waits: Sequence[Wait], workers: Sequence[WorkerStatus]) -> ScalingAdvice:
        waiting_since_s = {
            policy: wait.since_s
            for wait in waits
            for policy in self._run.trained_names
            if wait.who == Party(kind="trainer", name=policy) and wait.whom == POOL
        }
        staying = [worker.id for worker in workers if not worker.is_draining]
        advice = self._dispatcher.shares.advice(now_s, waiting_since_s, staying)
        unheard = tuple(wait.whom for wait in waits if wait.has(SILENT | OVERDUE))
        if unheard:
            advice = msgspec.structs.replace(advice, missing_services=0, verdict="unheard", unheard=unheard)
        return advice

    async def _workers(self) -> tuple[WorkerStatus, ...]:
        # Signs of life are timed by the loop's clock, but the status shows Unix time.
        to_unix_s = self._dispatcher.clock() - asyncio.get_running_loop().time()
        found: list[WorkerStatus] = []
        for life in self._dispatcher.liveness.workers():
            found.append(self._worker(life, to_unix_s))
            if len(found) % 500 == 0:  # other requests are served in between
                await asyncio.sleep(0)
        return tuple(found)

    def _worker(self, worker: WorkerLife, to_unix_s: float) -> WorkerStatus:
        failures = self._core.failure_streak(worker.id)
        return WorkerStatus(
            id=worker.id,
            name=worker.name,
            engine=worker.engine,
            hosts=worker.hosts,
            num_leases=len(self._core.worker_leases(worker.id)),
            load=worker.load,
            last_seen_s=worker.last_seen_s + to_unix_s,
            is_draining=worker.is_draining,
            is_set_aside=self._core.is_set_aside(worker.id),
            failed_in_a_row=failures.strikes,
            last_failure=failures.last_failure,
        )

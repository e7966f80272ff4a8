"""Handlers of trainers' routes: session, batch, version, commit, release, failure; and a person's `drop`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from astraflow import wire
from astraflow.dataflow.api import WHOLE_SLICE
from astraflow.dataflow.core.commands import (
    AttachTrainer,
    BatchView,
    CommitStep,
    DropBatch,
    PublishFrozen,
    PublishVersion,
    ReleaseSteps,
    TakeBatch,
)
from astraflow.dataflow.journal.tensor_tables import strip_tensors
from astraflow.dataflow.service.batch_slices import SliceRequest, encode_slice
from astraflow.dataflow.service.ingest import check_metrics, check_publication
from astraflow.dataflow.service.routes_shared import (
    ServedRun,
    check_fingerprints,
    check_protocol,
    float_param,
    int_param,
    path_int,
    read_body,
)
from astraflow.errors import FencedError, RefusedError, WireError
from astraflow.service.messages import item_response
from astraflow.types import (
    BatchReply,
    Commit,
    DropRequest,
    Publication,
    Release,
    SampleRules,
    SessionRequest,
    StepFailure,
    Wait,
    WaitReason,
)
from astraflow.types.wait_words import reason_text
from astraflow.types.waits import PERSON, POOL, Party

__all__ = ["Handler", "TrainerRoutes"]

_log = logging.getLogger(__name__)
_MAX_WORLD = 4096
Handler = Callable[[Request], Awaitable[Response]]
"""Answers a request."""


class TrainerRoutes:
    """One method per route."""

    def __init__(self, run: ServedRun) -> None:
        self._run = run
        self._dispatcher = run.dispatcher
        self._core = run.dispatcher.core

    def track_contact(self, name: str, handler: Handler) -> Handler:
        """Wraps a handler that only trainers call, because requests are their only signs of life."""

        async def answer(request: Request) -> Response:
            policy = str(request.path_params["policy"])
            with self._run.contacts.request(policy, name, self._dispatcher.clock):
                return await handler(request)

        return answer

    async def attach(self, request: Request) -> Response:
        """`POST /v1/policies/{policy}/session`."""
        policy = self._run.trained_policy(request)
        body = await read_body(request, SessionRequest)
        who = f"trainer {body.trainer_id!r} of policy {policy!r}"
        check_protocol(body.protocol, who)
        check_fingerprints(body.fingerprints, self._run.run_info.fingerprints, who)
        command = AttachTrainer(
            policy=policy,
            trainer_id=body.trainer_id,
            durable_step=body.durable_step,
            rules=body.rules or SampleRules(),
        )
        session = self._dispatcher.apply(command).answer
        self._dispatcher.shares.note_session(policy, self._dispatcher.clock())
        await self._dispatcher.wait_durable()
        return item_response(session, request)

    async def batch(self, request: Request) -> Response:
        """`GET /v1/policies/{policy}/batches/{step}`: long-poll."""
        policy = self._run.trained_policy(request)
        step = path_int(request, "step")
        epoch = int_param(request, "epoch", None)
        rank = int_param(request, "rank", 0)
        world = int_param(request, "world", 1)
        page = int_param(request, "page", WHOLE_SLICE)
        says_zeroed = int_param(request, "zeroed", 0) == 1
        wait_s = float_param(request, "wait_s", 0.0)
        since_s = self._dispatcher.clock()
        trainer = Party(kind="trainer", name=policy)
        if not 0 <= rank < world <= _MAX_WORLD:
            raise WireError(f"rank {rank} of world {world}: must be 0 <= rank < world <= {_MAX_WORLD}")

        def look() -> BatchView | None:
            if self._core.state != "running":
                return None
            view = self._dispatcher.apply(TakeBatch(policy=policy, epoch=epoch, step=step)).answer
            return None if self._run.failed_steps.wait(policy, step) else view

        def wait() -> Wait:
            reason = WaitReason(kind="groups", policy=policy, step=step)
            return Wait(who=trainer, whom=POOL, reasons=(reason,), since_s=since_s)

        view = await self._run.polls.poll(f"batch/{policy}", look, wait_s=wait_s, wait=wait, request=request)
        state = self._core.state
        if view is None:
            held = self._run.failed_steps.wait(policy, step)
            waits = (held,) if held else self._core.waits()
            reasons = tuple(reason for wait in waits if wait.who == trainer for reason in wait.reasons)
            await self._dispatcher.wait_durable()
            return item_response(BatchReply(batch=None, state=state, waits_for=reasons), request)
        await self._dispatcher.wait_durable()
        media_type = wire.MSGPACK if wire.MSGPACK in request.headers.get("accept", "") else wire.JSON
        # In the event loop, reading and encoding hundreds of megabytes would hold up all other requests.
        content = await asyncio.to_thread(
            encode_slice,
            view,
            self._dispatcher.journal.read_all,
            SliceRequest(rank, world, media_type, page, self._run.page_bytes, says_zeroed),
            state=state,
        )
        self._check_size(policy, step, len(content))
        return Response(content, media_type=media_type)

    def _check_size(self, policy: str, step: int, num_bytes: int) -> None:
        """Raises: RefusedError if a slice is too large for one body, and was not requested in pages. The
        status then shows the same problem."""
        limit = self._run.max_batch_bytes
        if num_bytes <= limit:
            self._run.oversized.pop(policy, None)
            return
        reason = WaitReason(kind="batch_too_large", policy=policy, step=step, num=num_bytes, total=limit)
        who = Party(kind="trainer", name=policy)
        wait = Wait(who=who, whom=PERSON, reasons=(reason,), since_s=self._dispatcher.clock())
        self._run.oversized.setdefault(policy, wait)
        raise RefusedError(f"policy {policy!r}: {reason_text(reason)}", code="too_large", status=413)

    async def publish(self, request: Request) -> Response:
        """`POST /v1/policies/{policy}/versions`; a frozen policy has no session, and its `epoch` is 0."""
        policy = self._run.published_policy(request)
        body = await read_body(request, Publication)
        is_trained = self._run.policies[policy].is_trained
        kept = self._core.versions(policy).manifests
        known = kept[-1].tensors if kept else ()
        manifest = self._run.tables.restore_table(body, policy, known)
        check_publication(manifest, kept[-1] if kept and is_trained else None)
        if is_trained:
            # The journal has the table of tensors from the first version, so later ones go without.
            recorded = strip_tensors(manifest) if kept else manifest
            command = PublishVersion(policy=policy, epoch=body.epoch, step=body.step, manifest=recorded)
        else:
            command = PublishFrozen(policy=policy, manifest=manifest)
        reply = self._dispatcher.apply(command).answer
        await self._dispatcher.wait_durable()
        table = self._run.tables.digest(policy, known or manifest.tensors)
        return item_response(msgspec.structs.replace(reply, table=table), request)

    async def commit(self, request: Request) -> Response:
        """`POST /v1/policies/{policy}/commit`."""
        policy = self._run.trained_policy(request)
        body = await read_body(request, Commit)
        check_metrics(body.metrics)
        command = CommitStep(
            policy=policy,
            epoch=body.epoch,
            step=body.step,
            version=body.version,
            metrics=body.metrics,
        )
        self._dispatcher.apply(command)
        self._run.failed_steps.forget(policy, body.step)
        self._dispatcher.journal.note_spans(f"trainer {policy}", body.spans)
        waited_s = sum(span.end_s - span.start_s for span in body.spans if span.kind == "wait:dataflow")
        self._dispatcher.shares.note_step(
            policy,
            waited_s=max(0.0, waited_s),
            now_s=self._dispatcher.clock(),
            batches=self._core.num_batches(policy),
        )
        await self._dispatcher.wait_durable()
        return Response(status_code=204)

    async def release(self, request: Request) -> Response:
        """`POST /v1/policies/{policy}/release`."""
        policy = self._run.trained_policy(request)
        body = await read_body(request, Release)
        self._dispatcher.apply(ReleaseSteps(policy=policy, epoch=body.epoch, step=body.step))
        await self._dispatcher.wait_durable()
        return Response(status_code=204)

    async def step_failed(self, request: Request) -> Response:
        """`POST /v1/policies/{policy}/failure`."""
        policy = self._run.trained_policy(request)
        body = await read_body(request, StepFailure)
        (status,) = (known for known in self._core.policy_status() if known.name == policy)
        if body.epoch != status.epoch:
            raise FencedError(f"policy {policy!r}: the newest session is {status.epoch}, not {body.epoch}")
        if body.step >= status.step:  # an earlier step was trained before, so its batch is not the cause
            self._run.failed_steps.note(policy, body, self._dispatcher.clock())
            if wait := self._run.failed_steps.wait(policy, body.step):
                (held,) = wait.reasons
                _log.error(
                    "policy %s: the batch of step %d failed to train %d times in a row, and is held back "
                    "until a person acts: %s",
                    policy, held.step + 1, held.num, held.detail,
                )  # fmt: skip
        return Response(status_code=204)

    async def drop_batch(self, request: Request) -> Response:
        """`POST /v1/policies/{policy}/drop`."""
        policy = self._run.trained_policy(request)
        body = await read_body(request, DropRequest)
        command = DropBatch(policy=policy, epoch=body.epoch, step=body.step, reason=body.reason)
        reply = self._dispatcher.apply(command).answer
        self._run.failed_steps.forget(policy)
        await self._dispatcher.wait_durable()
        return item_response(reply, request)

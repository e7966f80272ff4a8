"""The route table of the protocol, from which the app and the OpenAPI document are built."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from astraflow import wire
from astraflow.types import (
    BatchReply,
    Commit,
    DropReply,
    DropRequest,
    EarlierProgress,
    EpisodeResults,
    EvalsReply,
    Health,
    Heartbeat,
    HeartbeatReply,
    Item,
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
    Session,
    SessionRequest,
    StatusReply,
    StepFailure,
    StepsReply,
    StopRequest,
    VersionsReply,
)

__all__ = ["MAX_WAIT_S", "ROUTES", "WHOLE_SLICE", "Param", "Role", "Route"]

WHOLE_SLICE = -1
"""Page number that requests all samples of a slice at once."""

MAX_WAIT_S = 25.0
"""Longest long-poll: less than the 30 s after which common proxies cut an idle connection."""

_MIB = 1024 * 1024
_CONTROL_BYTES = 1 * _MIB
_LEASES_BYTES = 8 * _MIB
"""Room for 65,536 lease ids and 10,000 spans."""
_TASKS_BYTES = 32 * _MIB
_PROGRESS_BYTES = 32 * _MIB
"""Four million tokens of 8 bytes each. A service sends more in several reports."""
_MANIFEST_BYTES = 64 * _MIB
"""Room for 2^18 tensors and 2^19 chunks, with their names and hashes."""

Role = Literal["worker", "trainer", "viewer", "admin"]
_ALL: tuple[Role, ...] = ("worker", "trainer", "viewer", "admin")
_WORKER: tuple[Role, ...] = ("worker", "admin")
_TRAINER: tuple[Role, ...] = ("trainer", "admin")
_ADMIN: tuple[Role, ...] = ("admin",)


@dataclass(frozen=True, slots=True)
class Param:
    """A query parameter."""

    kind: Literal["integer", "number", "string"]
    text: str
    default: int | float | str | None = None
    """Value if the caller leaves it out; None if it is required."""


@dataclass(frozen=True, slots=True)
class Route:
    """One route: what it takes, what it answers, and who may call it."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    """Path parameters in braces; `{step:int}` is a whole number."""
    text: str
    roles: tuple[Role, ...]
    body: type[Item] | None = None
    max_bytes: int = _CONTROL_BYTES
    """Largest body. Items that hold no tokens, tensors or tasks are small."""
    reply: type[Item] | None = None
    """Item of the answer. None means text in `media_type`, or status 204 without a body if that is empty."""
    params: Mapping[str, Param] = field(default_factory=dict[str, Param])
    media_type: str = ""


_WAIT = Param("number", f"Long-poll: wait up to this many seconds (at most {MAX_WAIT_S:.0f}).", 0.0)

ROUTES: tuple[Route, ...] = (
    Route("run", "GET", "/v1/run", "What a joining service must know.", _ALL, reply=RunInfo),
    Route("health", "GET", "/v1/health", "200 if the journal can be written, else 503.", _ALL, reply=Health),
    Route(
        "register",
        "POST",
        "/v1/workers",
        "A rollout service joins.",
        _WORKER,
        body=RegisterWorker,
        reply=Registration,
    ),
    Route(
        "heartbeat",
        "POST",
        "/v1/workers/{worker_id}/heartbeat",
        "Extends leases, reports load. 404 `unknown_worker`: register again.",
        _WORKER,
        body=Heartbeat,
        max_bytes=_LEASES_BYTES,
        reply=HeartbeatReply,
    ),
    Route(
        "drain",
        "POST",
        "/v1/workers/{worker_id}/drain",
        "The service takes no further leases; it leaves once its leases have results.",
        _WORKER,
    ),
    Route(
        "ask_to_leave",
        "POST",
        "/v1/workers/{handle}/leave",
        "The service with this handle (its id in the status) takes no further leases, as its next "
        "heartbeat says, and leaves once its leases have results.",
        _ADMIN,
    ),
    Route(
        "leases",
        "POST",
        "/v1/leases",
        "Asks for leases; waits `wait_s` when there are none.",
        _WORKER,
        body=LeaseRequest,
        max_bytes=_LEASES_BYTES,
        reply=LeaseReply,
    ),
    Route(
        "episodes",
        "POST",
        "/v1/episodes",
        "Results of leases. Idempotent by lease.",
        _WORKER,
        body=EpisodeResults,
        max_bytes=wire.MAX_BODY_BYTES,
        reply=Receipts,
    ),
    Route(
        "tell_progress",
        "POST",
        "/v1/workers/{worker_id}/progress",
        "Completions of running episodes, for their next attempts if the service is lost.",
        _WORKER,
        body=ProgressReport,
        max_bytes=_PROGRESS_BYTES,
        reply=ProgressReply,
    ),
    Route(
        "earlier_progress",
        "GET",
        "/v1/workers/{worker_id}/progress/{lease_id}",
        "What earlier attempts at the episode of a lease sampled; empty if the service does not hold it.",
        _WORKER,
        reply=EarlierProgress,
    ),
    Route(
        "push_tasks",
        "POST",
        "/v1/tasks",
        "Tasks from outside, which are drawn before those of the sources.",
        _WORKER,
        body=PushTasks,
        max_bytes=_TASKS_BYTES,
        reply=PushTasksReply,
    ),
    Route(
        "attach",
        "POST",
        "/v1/policies/{policy}/session",
        "A trainer attaches; older sessions are fenced.",
        _TRAINER,
        body=SessionRequest,
        reply=Session,
    ),
    Route(
        "batch",
        "GET",
        "/v1/policies/{policy}/batches/{step:int}",
        "One rank's slice of a step, which never changes. `batch` is null until there is one.",
        _TRAINER,
        reply=BatchReply,
        params={
            "epoch": Param("integer", "Epoch of the caller's session."),
            "rank": Param("integer", "Which slice.", 0),
            "world": Param("integer", "Number of slices.", 1),
            "page": Param("integer", "Which page of the slice, from 0; -1: all of it at once.", WHOLE_SLICE),
            "zeroed": Param("integer", "1: samples that a rule set to zero carry `zeroed_by`.", 0),
            "wait_s": _WAIT,
        },
    ),
    Route(
        "publish",
        "POST",
        "/v1/policies/{policy}/versions",
        "A version's chunks are downloadable. 409 `unknown_table`: send the manifest with its tensors.",
        _TRAINER,
        body=Publication,
        max_bytes=_MANIFEST_BYTES,
        reply=PublicationReply,
    ),
    Route(
        "versions",
        "GET",
        "/v1/policies/{policy}/versions",
        "Manifests newer than `after`. Returns early when `pinned` of the answer would differ from the "
        "parameter.",
        _ALL,
        reply=VersionsReply,
        params={
            "after": Param("integer", "Newest version that the caller has.", -1),
            "wait_s": _WAIT,
            "pinned": Param("string", "The pinned versions that the caller knows, comma separated.", ""),
            "table": Param("string", "Name of the tensor table that the caller has, from an answer.", ""),
        },
    ),
    Route(
        "commit",
        "POST",
        "/v1/policies/{policy}/commit",
        "A step is trained and published.",
        _TRAINER,
        body=Commit,
        max_bytes=_LEASES_BYTES,
    ),
    Route(
        "release",
        "POST",
        "/v1/policies/{policy}/release",
        "A checkpoint of the first steps is durable.",
        _TRAINER,
        body=Release,
    ),
    Route(
        "step_failed",
        "POST",
        "/v1/policies/{policy}/failure",
        "The batch of a step could not be trained on; after the second time, it is held back.",
        _TRAINER,
        body=StepFailure,
    ),
    Route(
        "drop_batch",
        "POST",
        "/v1/policies/{policy}/drop",
        "Drops the batch of the oldest uncommitted step, and fences sessions.",
        _ADMIN,
        body=DropRequest,
        reply=DropReply,
    ),
    Route(
        "steps",
        "GET",
        "/v1/policies/{policy}/steps",
        "Committed steps above `after`.",
        _ALL,
        reply=StepsReply,
        params={"after": Param("integer", "Newest step that the caller has.", -1), "wait_s": _WAIT},
    ),
    Route(
        "evals",
        "GET",
        "/v1/evals",
        "Finished evaluation rounds without the first `after`.",
        _ALL,
        reply=EvalsReply,
        params={"after": Param("integer", "Rounds that the caller has.", 0), "wait_s": _WAIT},
    ),
    Route("status", "GET", "/v1/status", "Who waits for whom, since when.", _ALL, reply=StatusReply),
    Route(
        "progress",
        "GET",
        "/v1/progress",
        "Totals of the completions kept for unfinished episodes, and of their reuse.",
        _ALL,
        reply=ProgressTotals,
    ),
    Route("stop", "POST", "/v1/stop", "Ends the run: live groups are cancelled.", _ADMIN, body=StopRequest),
    Route(
        "metrics",
        "GET",
        "/metrics",
        "Prometheus text format.",
        _ALL,
        media_type="text/plain; version=0.0.4; charset=utf-8",
    ),
    Route(
        "openapi",
        "GET",
        "/openapi.json",
        "This document.",
        _ALL,
        media_type="application/json",
    ),
)
"""Every route of the dataflow."""

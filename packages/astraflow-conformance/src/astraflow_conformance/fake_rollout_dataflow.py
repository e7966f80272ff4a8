"""The fake dataflow for a rollout service under test.

It grants the leases that a scenario offers, and checks every request.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from astraflow import wire
from astraflow.errors import RefusedError
from astraflow.service.messages import item_response, read_item
from astraflow.types import (
    PROTOCOL_VERSION,
    Episode,
    EpisodeReceipt,
    EpisodeResult,
    EpisodeResults,
    Failure,
    Health,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Manifest,
    PushTasks,
    PushTasksReply,
    Receipts,
    RegisterWorker,
    Registration,
    RunInfo,
    RunState,
    ServedVersions,
    VersionsReply,
)
from astraflow_conformance.columns import COLUMN_RULES, Limits, flaws_of
from astraflow_conformance.fake_dataflow import FakeDataflow
from astraflow_conformance.report import Checks

__all__ = ["FakeRolloutDataflow", "Granted", "Reference"]

Reference = Callable[[str, int, NDArray[np.int32]], NDArray[np.float32]]
"""`(policy, version, token_ids [T]) -> logprobs [T]` of a full forward pass at temperature 1. Entry 0 has no
meaning."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MAX_OMITTED = 3
"""Number of consecutive heartbeats without a lease that breaks the rule. The first one may have been sent
before the lease arrived."""
_TOLERANCE = 0.02
"""Mean over a span, in nats. It is enough for bfloat16. The kit's versions differ by tenths of a nat."""
_WORKER_ROUTES = re.compile(r"/v1/workers/([^/]+)/(heartbeat|drain)")
_VERSIONS = re.compile(r"/v1/policies/([^/]+)/versions")
_PLAIN = {
    ("GET", "/v1/run"): "run",
    ("GET", "/v1/health"): "health",
    ("POST", "/v1/workers"): "register",
    ("POST", "/v1/leases"): "leases",
    ("POST", "/v1/episodes"): "episodes",
    ("POST", "/v1/tasks"): "push_tasks",
}


@dataclass
class Granted:
    """A lease that was granted, and its results."""

    lease: Lease
    omitted: int = 0
    """Number of consecutive heartbeats that did not name it."""
    results: list[EpisodeResult] = field(default_factory=list[EpisodeResult])
    has_receipt: bool = False
    is_void: bool = False
    """Whether its scenario is over, so that nothing checks whether a result arrives."""


class FakeRolloutDataflow(FakeDataflow):
    """A run from the view of a rollout service. Scenarios set its fields, and wait with `expect`."""

    def __init__(
        self,
        checks: Checks,
        info: RunInfo,
        *,
        token: str,
        patience_s: float,
        heartbeat_s: float,
        vocab_sizes: dict[str, int],
        reference: Reference | None,
    ) -> None:
        super().__init__(checks, token=token, patience_s=patience_s, item_rule="W2", token_rule="W3")
        self.info = info
        self.heartbeat_s = heartbeat_s
        self.policies = {policy.name: policy for policy in info.policies}
        self.manifests: dict[str, list[Manifest]] = {name: [] for name in self.policies}
        self.bad: set[tuple[str, int]] = set()
        """Published versions that cannot be fetched or applied."""
        self.state: RunState = "running"
        self.is_draining = False
        self.worker_id = ""
        self.registered: RegisterWorker | None = None
        self.served: dict[str, tuple[int, ...]] = {}
        """Policy -> versions that the service serves according to its last request."""
        self.offered: list[Lease] = []
        self.granted: dict[str, Granted] = {}
        self.statuses: dict[str, str] = {}
        """Lease -> status of its receipt, if the status isn't `accepted`."""
        self.holds_receipts = False
        self.goodbyes: list[str] = []
        self.asks_while_draining = 0
        self.num_trajectories = 0
        """Number of trajectories in training episodes."""
        self.failures: list[tuple[str, Failure]] = []
        self._vocab_sizes = vocab_sizes
        self._reference = reference
        self.handlers = {
            "run": self._run,
            "health": self._health,
            "register": self._register,
            "leases": self._leases,
            "heartbeat": self._heartbeat,
            "drain": self._drain,
            "episodes": self._episodes,
            "push_tasks": self._push_tasks,
            "versions": self._versions,
        }

    def route_of(self, method: str, path: str) -> str:
        """Returns the name of a route; empty if there is no such route."""
        if (method, path) in _PLAIN:
            return _PLAIN[method, path]
        if method == "POST" and (match := _WORKER_ROUTES.fullmatch(path)):
            return match[2]
        return "versions" if method == "GET" and _VERSIONS.fullmatch(path) else ""

    # --- for scenarios ---

    def newest(self, policy: str) -> int:
        """Returns the newest published version, even if it cannot be fetched; -1 if there is none."""
        return max((manifest.version for manifest in self.manifests[policy]), default=-1)

    def is_done(self, leases: Sequence[Lease]) -> bool:
        """Returns whether each lease has its receipt."""
        return all(lease.id in self.granted and self.granted[lease.id].has_receipt for lease in leases)

    async def offer(self, *leases: Lease) -> None:
        """Offers leases. The next request with free slots gets them."""
        self.offered += leases
        await self.notify()

    async def publish(self, manifest: Manifest, *, is_bad: bool = False) -> None:
        """Publishes a version. `is_bad`: whether it cannot be fetched or applied."""
        if is_bad:
            self.bad.add((manifest.policy, manifest.version))
        self.manifests[manifest.policy].append(manifest)
        await self.notify()

    def forget_worker(self) -> None:
        """Forgets the service's registration and its leases."""
        self.worker_id = ""
        self.void()

    def void(self) -> None:
        """Ends all leases without a receipt, and withdraws the leases on offer."""
        for entry in self.granted.values():
            entry.is_void = entry.is_void or not entry.has_receipt
        self.offered.clear()

    # --- routes ---

    async def _run(self, request: Request) -> Response:
        return item_response(self.info, request)

    async def _health(self, request: Request) -> Response:
        return item_response(Health(state=self.state, num_records=0), request)

    async def _register(self, request: Request) -> Response:
        body = await read_item(request, RegisterWorker)
        unknown = set(body.hosts) - set(self.policies)
        good = (
            body.protocol == PROTOCOL_VERSION
            and _NAME.fullmatch(body.name)
            and body.hosts
            and not unknown
            and body.num_slots >= 1
        )
        self.checks.that("W1", good, f"{body}"[:250])
        self.registered = body
        self.served = {}
        self.worker_id = f"{body.name}.{self.num['register']}"
        reply = Registration(worker_id=self.worker_id, heartbeat_s=self.heartbeat_s, lease_timeout_s=60.0)
        return item_response(reply, request)

    async def _heartbeat(self, request: Request) -> Response:
        self._known(request.url.path.split("/")[3])
        beat = await read_item(request, Heartbeat)
        self._note_served(beat.load.versions)
        named = set(beat.lease_ids)
        for entry in self.granted.values():
            if entry.results or entry.is_void:
                continue
            entry.omitted = 0 if entry.lease.id in named else entry.omitted + 1
            if entry.omitted >= _MAX_OMITTED:
                self.checks.broke("W5", f"{entry.omitted} heartbeats in a row leave out {entry.lease.id}")
        reply = HeartbeatReply(revoked=(), state=self.state, is_draining=self.is_draining)
        return item_response(reply, request)

    async def _drain(self, request: Request) -> Response:
        self.goodbyes.append(request.url.path.split("/")[3])
        return Response(status_code=204)

    async def _leases(self, request: Request) -> Response:
        body = await read_item(request, LeaseRequest)
        self._known(body.worker_id)
        self._note_served(body.served)
        if self.is_draining and body.num_free > 0:
            self.asks_while_draining += 1
        if body.num_free > 0:
            wait_s = min(max(body.wait_s, 0.0), 25.0)
            await self.until(lambda: self._may_answer(body.worker_id), wait_s=wait_s)
        leases: list[Lease] = []
        if body.worker_id == self.worker_id and self._is_fit() and not self.is_draining:
            leases = self.offered[: body.num_free]
            self.offered = self.offered[max(0, body.num_free) :]
        if self.lost["leases"] > 0:
            # This answer will be lost, so its leases stay on offer.
            self.offered = [*leases, *self.offered]
            leases = []
        self.granted.update({lease.id: Granted(lease) for lease in leases})
        return item_response(LeaseReply(leases=tuple(leases), state=self.state), request)

    def _may_answer(self, worker_id: str) -> bool:
        if self.state != "running" or self.is_draining or worker_id != self.worker_id:
            return True
        return (bool(self.offered) and self._is_fit()) or self.lost["leases"] > 0

    def _is_fit(self) -> bool:
        """Returns whether the service is recent enough for training leases.

        Versions that cannot be fetched don't count. If W7 is already broken, lag is ignored. Otherwise, the
        service would get no leases, and would break other rules as a consequence.
        """
        if self.checks.is_broken("W7"):
            return True
        for name, policy in self.policies.items():
            good = [m.version for m in self.manifests[name] if (name, m.version) not in self.bad]
            oldest = max(0, max(good, default=-1) - policy.max_lag)
            if policy.is_trained and max(self.served.get(name, ()), default=-1) < oldest:
                return False
        return True

    async def _episodes(self, request: Request) -> Response:
        body = await read_item(request, EpisodeResults)
        if self.holds_receipts:
            await self.until(lambda: not self.holds_receipts, wait_s=60.0)
        is_lost = self.lost["episodes"] > 0
        receipts = tuple(self._receipt(result, is_lost=is_lost) for result in body.results)
        return item_response(Receipts(receipts=receipts), request)

    async def _push_tasks(self, request: Request) -> Response:
        body = await read_item(request, PushTasks)
        return item_response(PushTasksReply(num_accepted=len(body.tasks), num_known=0), request)

    async def _versions(self, request: Request) -> Response:
        policy = request.url.path.split("/")[3]
        if policy not in self.policies:
            raise RefusedError(f"no policy {policy!r}", code="unknown_policy", status=404)
        query = request.query_params
        after = int(query.get("after", "-1"))
        wait_s = float(query.get("wait_s", "0"))
        await self.until(
            lambda: self.newest(policy) > after or query.get("pinned", "") or self.state != "running",
            wait_s=min(max(wait_s, 0.0), 25.0),
        )
        newer = tuple(manifest for manifest in self.manifests[policy] if manifest.version > after)
        reply = VersionsReply(newest=self.newest(policy), manifests=newer, pinned=(), state=self.state)
        return item_response(reply, request)

    # --- checks ---

    def _known(self, worker_id: str) -> None:
        if worker_id != self.worker_id:
            self.checks.that("W1", self.num["register"], f"{worker_id!r} asks before it has registered")
            raise RefusedError(
                f"no rollout service {worker_id!r}; register again", code="unknown_worker", status=404
            )

    def _note_served(self, served: Sequence[ServedVersions]) -> None:
        for entry in served:
            published = {manifest.version for manifest in self.manifests.get(entry.policy, ())}
            wrong = [v for v in entry.versions if v not in published or (entry.policy, v) in self.bad]
            self.checks.that("W6", not wrong, f"says that it serves {wrong} of {entry.policy}: not to be had")
            self.served[entry.policy] = entry.versions

    def _receipt(self, result: EpisodeResult, *, is_lost: bool) -> EpisodeReceipt:
        entry = self.granted.get(result.lease_id)
        if entry is None:
            self.checks.broke("W8", f"a result of {result.lease_id!r}, which was never granted")
            return EpisodeReceipt(lease_id=result.lease_id, status="invalid", reason="never granted")
        if entry.has_receipt and not entry.is_void:
            self.checks.broke("W9", f"the result of {result.lease_id} came again after its receipt")
        if not entry.results:
            self._look_at(entry.lease, result)
        entry.results.append(result)
        entry.has_receipt = entry.has_receipt or not is_lost
        status = self.statuses.get(result.lease_id, "accepted")
        return EpisodeReceipt(
            lease_id=result.lease_id,
            status=status,  # type: ignore[arg-type]
            reason="" if status == "accepted" else "as the kit's scenario says",
        )

    def _look_at(self, lease: Lease, result: EpisodeResult) -> None:
        outcome = result.outcome
        if isinstance(outcome, Failure):
            self.failures.append((lease.id, outcome))
            return
        hosts = self.registered.hosts if self.registered else ()
        limits = {
            name: Limits(info, self.newest(name), self._vocab_sizes[name])
            for name, info in self.policies.items()
        }
        flaws = dict[str, str]()
        for rule, detail in flaws_of(outcome, limits, hosts, is_training=lease.kind == "train"):
            flaws.setdefault(rule, detail)
        for rule in COLUMN_RULES:
            if outcome.trajectories:
                self.checks.that(rule, rule not in flaws, f"lease {lease.id}: {flaws.get(rule, '')}")
        if lease.kind == "train":
            self.num_trajectories += len(outcome.trajectories)
            if not flaws:
                self._look_at_logprobs(lease, outcome)

    def _look_at_logprobs(self, lease: Lease, episode: Episode) -> None:
        if self._reference is None:
            self.checks.skip("W10", "there is no reference to compare with")
            return
        for item in episode.trajectories:
            if not self.policies[item.policy].is_trained or item.temperature != 1.0:
                continue
            ids = wire.array(item.token_ids, "int32")
            given = wire.array(item.behavior_logprobs, "float32")
            for span in item.versions:
                where = slice(span.start, span.start + span.length)
                expected = self._reference(item.policy, span.version, ids)
                error = float(np.abs(given[where] - expected[where]).mean())
                detail = (
                    f"{lease.id}: logprobs of version {span.version} are {error:.3f} nats off, on average"
                )
                self.checks.that("W10", error <= _TOLERANCE, detail)

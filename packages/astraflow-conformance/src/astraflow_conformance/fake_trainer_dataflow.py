"""The fake dataflow for a trainer under test.

It serves the batches that a scenario allows, and checks every request.
"""

import math
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from astraflow.errors import Error, FencedError
from astraflow.service.messages import item_response, read_item
from astraflow.types import (
    PROTOCOL_VERSION,
    Batch,
    BatchReply,
    BatchTotals,
    Health,
    Item,
    Manifest,
    Publication,
    PublicationReply,
    Release,
    RunInfo,
    RunState,
    Sample,
    Session,
    SessionRequest,
    VersionsReply,
)
from astraflow.types.host_tensors import WeightSnapshot
from astraflow_conformance.fake_dataflow import FakeDataflow
from astraflow_conformance.report import Checks

__all__ = ["FakeTrainerDataflow", "Fetches"]

_NULL_S = 0.05
"""Seconds until an answer without a batch, as long as no batch is allowed. It is short so that the trainer
soon asks again (T9)."""
_MAX_IN_FLIGHT = 3
"""Number of requests of a fenced session that may have been in flight: a batch, a publication, a release."""
_ROUTE = re.compile(r"/v1/policies/([^/]+)/(session|batches|versions|commit|release)(?:/(\d+))?")


class _Metric(Item, frozen=True, array_like=True):
    """A `MetricItem` without bounds on its value."""

    name: str
    value: float
    reduction: str = "mean"


class _Span(Item, frozen=True, array_like=True):
    """A `BusySpan` without bounds on its times."""

    kind: str
    start_s: float
    end_s: float


class _Commit(Item, frozen=True, kw_only=True):
    """A `Commit` without bounds.

    Numbers that are not finite break rule T18, and they must be decoded to be reported.
    """

    epoch: int
    step: int
    version: int
    metrics: tuple[_Metric, ...] = ()
    spans: tuple[_Span, ...] = ()


class Fetches(Protocol):
    """Downloads and verifies versions."""

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        """Downloads a version. Raises: an Error if a part of it cannot be fetched or is damaged."""
        ...

    async def close(self) -> None:
        """Closes the connections."""
        ...


@dataclass
class _Session:
    epoch: int
    base_step: int
    base_version: int
    done: int
    is_begun: bool = False
    """Whether its first version is published."""


class FakeTrainerDataflow(FakeDataflow):
    """A run of one policy from the view of its trainer. Scenarios set its fields, and wait with `expect`."""

    def __init__(
        self,
        checks: Checks,
        info: RunInfo,
        *,
        policy: str,
        token: str,
        patience_s: float,
        samples: Callable[[int], Sequence[Sample]],
        num_steps: int,
        receiver: Callable[[Path], Fetches],
    ) -> None:
        """`samples`: makes the samples of a step, which are the same at each call. `receiver`: makes a
        downloader with a cache in the given folder."""
        super().__init__(checks, token=token, patience_s=patience_s, item_rule="T2", token_rule="T3")
        self.info = info
        self.policy = policy
        self.num_steps = num_steps
        self.state: RunState = "running"
        self.ready = 0
        """Number of steps whose batches are served."""
        self.session: _Session | None = None
        self.num_sessions = 0
        self.newest = -1
        self.committed = self.released = self.taken = 0
        self.asked: list[int] = []
        """Steps in the order in which the trainer asked for them."""
        self.manifests: dict[int, Manifest] = {}
        self.num_fenced = 0
        """Number of requests from sessions that had already been told that they are fenced."""
        self._answered: set[int] = set()
        self._epoch = 0
        self._samples = samples
        self._receiver = receiver
        self._folder = tempfile.TemporaryDirectory(prefix="conformance-")
        self._weights = receiver(Path(self._folder.name) / "kept")
        self._told_fenced: set[int] = set()
        self.handlers = {
            "run": self._run,
            "health": self._health,
            "session": self._attach,
            "batches": self._batch,
            "publish": self._publish,
            "versions": self._versions,
            "commit": self._commit,
            "release": self._release,
        }

    def route_of(self, method: str, path: str) -> str:
        """Returns the name of a route; empty if there is no such route."""
        if method == "GET" and path in {"/v1/run", "/v1/health"}:
            return path.rpartition("/")[2]
        match = _ROUTE.fullmatch(path)
        if match is None or match[1] != self.policy:
            return ""
        if match[2] == "versions":
            return "publish" if method == "POST" else "versions"
        return match[2]

    async def close(self) -> None:
        """Closes connections, and deletes the downloaded weights."""
        await self._weights.close()
        self._folder.cleanup()

    async def allow(self, num_steps: int) -> None:
        """Starts to serve the batches of the first `num_steps` steps."""
        self.ready = num_steps
        await self.notify()

    async def fence(self) -> None:
        """Ends the trainer's session, as if another trainer had opened one."""
        self._epoch += 1
        self.session = None
        await self.notify()

    async def check_needed(self) -> None:
        """Checks T16: a receiver with an empty cache can fetch every version that was listed as needed."""
        if self.checks.is_broken("T5"):
            return
        for version in self.needed():
            receiver = self._receiver(Path(self._folder.name) / f"needed-{version}")
            try:
                await receiver.fetch(self.manifests[version])
            except Error as err:
                self.checks.broke("T16", f"version {version} is needed: {err}")
            else:
                self.checks.kept("T16")
            finally:
                await receiver.close()

    def needed(self) -> tuple[int, ...]:
        """Returns the versions that must stay downloadable.

        These are the two newest versions, the first one, which an evaluation may pin, and the bases of their
        deltas.
        """
        needed = {version for version in (0, self.newest - 1, self.newest) if version in self.manifests}
        for version in sorted(needed, reverse=True):
            manifest = self.manifests[version]
            while manifest.kind == "delta" and manifest.base in self.manifests:
                needed.add(manifest.base)
                manifest = self.manifests[manifest.base]
        return tuple(sorted(needed))

    # --- routes ---

    async def _run(self, request: Request) -> Response:
        return item_response(self.info, request)

    async def _health(self, request: Request) -> Response:
        return item_response(Health(state=self.state, num_records=0), request)

    async def _attach(self, request: Request) -> Response:
        body = await read_item(request, SessionRequest)
        step = body.durable_step
        fits = body.protocol == PROTOCOL_VERSION and step >= 0
        self.checks.that("T1", fits and (step == 0 or self.num_sessions > 0), f"{body}"[:250])
        self.checks.that(
            "T15", step <= self.committed, f"begins at {step}, {self.committed} steps are committed"
        )
        if self.num["release"]:
            detail = f"begins at {step}, but released the first {self.released} steps"
            self.checks.that("T14", step >= self.released, detail)
        self._epoch += 1
        self.num_sessions += 1
        step = min(max(step, 0), self.committed)
        self.session = _Session(self._epoch, step, self.newest + 1, step)
        reply = Session(epoch=self._epoch, step=step, next_version=self.newest + 1, num_steps=self.num_steps)
        return item_response(reply, request)

    async def _batch(self, request: Request) -> Response:
        query = request.query_params
        step = int(request.url.path.rpartition("/")[2])
        epoch = int(query.get("epoch", "-1"))
        session = self._session(epoch)
        detail = f"asks for step {step} of {self.num_steps}, {session.done} are committed"
        in_order = session.base_step <= step <= session.done + 1 and step < self.num_steps
        self.checks.that("T8", in_order and session.is_begun, detail)
        self.asked.append(step)
        wait_s = min(float(query.get("wait_s", "0")), 25.0 if self.ready else _NULL_S)
        await self.until(lambda: self._may_take(step) or self._is_gone(epoch), wait_s=wait_s)
        session = self._session(epoch)
        batch = self._slice(session, step) if self._may_take(step) and self.state == "running" else None
        if batch is not None:
            self.taken = max(self.taken, step + 1)
        return item_response(BatchReply(batch=batch, state=self.state), request)

    def _may_take(self, step: int) -> bool:
        return step < min(self.ready, self.num_steps)

    def _is_gone(self, epoch: int) -> bool:
        return self.state != "running" or self.session is None or self.session.epoch != epoch

    async def _publish(self, request: Request) -> Response:
        body = await read_item(request, Publication)
        session = self._session(body.epoch)
        manifest = body.manifest
        version = manifest.version
        if version in self.manifests and version == self.newest and session.is_begun:
            same = self.manifests[version].digest == manifest.digest
            self.checks.that("T11", same, f"version {version} came again with another content")
        else:
            self._look_at(session, body)
            await self._fetch(manifest)
            self.manifests[version] = manifest
            self.newest = version
            session.is_begun = True
        if self.lost["publish"] == 0:
            self._answered.add(version)
        return item_response(PublicationReply(needed=self.needed()), request)

    async def _versions(self, request: Request) -> Response:
        after = int(request.query_params.get("after", "-1"))
        newer = tuple(manifest for version, manifest in self.manifests.items() if version > after)
        reply = VersionsReply(newest=self.newest, manifests=newer, pinned=(), state=self.state)
        return item_response(reply, request)

    async def _commit(self, request: Request) -> Response:
        body = await read_item(request, _Commit)
        session = self._session(body.epoch)
        numbers = [item.value for item in body.metrics]
        numbers += [time for span in body.spans for time in (span.start_s, span.end_s)]
        self.checks.that("T18", all(map(math.isfinite, numbers)), f"metrics {body.metrics}"[:250])
        if session.base_step <= body.step < session.done:
            return Response(status_code=204)
        version = session.base_version + body.step + 1 - session.base_step
        holds = body.step == session.done and body.step < self.taken
        if not self.checks.is_broken("T6"):
            holds = holds and body.version == version and version in self._answered
        detail = f"commits step {body.step} as {body.version}; {session.done} are committed, answered are "
        self.checks.that("T10", holds, detail + f"the publications {sorted(self._answered)}")
        session.done = max(session.done, body.step + 1)
        self.committed = max(self.committed, session.done)
        return Response(status_code=204)

    async def _release(self, request: Request) -> Response:
        body = await read_item(request, Release)
        session = self._session(body.epoch)
        detail = f"releases {body.step} steps, {session.done} are committed"
        if self.checks.that("T14", body.step <= session.done, detail):
            self.released = max(self.released, body.step)
        return Response(status_code=204)

    # --- checks ---

    def _session(self, epoch: int) -> _Session:
        """Returns the session of a request. Raises: FencedError if another session holds the policy."""
        if self.session is None or self.session.epoch != epoch:
            self.checks.that("T1", self.num_sessions, "asks before it has opened a session")
            if epoch in self._told_fenced:
                self.num_fenced += 1
                detail = (
                    f"{self.num_fenced} further requests of session {epoch} after it was told of the fence"
                )
                self.checks.that("T13", self.num_fenced <= _MAX_IN_FLIGHT, detail)
            self._told_fenced.add(epoch)
            raise FencedError(f"policy {self.policy!r}: session {epoch} is over")
        return self.session

    def _look_at(self, session: _Session, body: Publication) -> None:
        that = self.checks.that
        manifest = body.manifest
        version = manifest.version
        if not session.is_begun:
            names = {info.name for info in manifest.files}
            good = manifest.kind == "full" and manifest.policy == self.policy and "config.json" in names
            good = good and (version, body.step) == (session.base_version, session.base_step)
            detail = (
                f"version {version} ({manifest.kind}) of {body.step} steps with {sorted(names)}; wanted is "
            )
            that("T4", good, detail + f"{session.base_version} of {session.base_step}, with config.json")
        else:
            expected = session.base_step + version - session.base_version
            good = version == self.newest + 1 and body.step == expected and body.step <= self.taken
            that(
                "T6", good, f"version {version} of {body.step} steps after {self.newest}; {self.taken} taken"
            )
        before = self.manifests.get(self.newest)
        if before is None:
            return
        tables = [
            [(t.name, t.shape, t.dtype) for t in sorted(m.tensors, key=lambda t: t.name)]
            for m in (before, manifest)
        ]
        that("T7", tables[0] == tables[1], f"the tensors of version {version} are not those of {self.newest}")
        if session.is_begun:
            detail = f"version {version} is bit for bit version {self.newest}"
            that("T12", manifest.digest != before.digest, detail)

    async def _fetch(self, manifest: Manifest) -> None:
        try:
            await self._weights.fetch(manifest)
        except Error as err:
            self.checks.broke("T5", str(err))
        else:
            self.checks.kept("T5")

    def _slice(self, session: _Session, step: int) -> Batch:
        samples = tuple(self._samples(step))
        num_trained = sum(sum(sample.trajectory.mask) for sample in samples)
        weighted = [
            (sum(sample.trajectory.mask[span.start : span.end]), span.value)
            for sample in samples
            for span in sample.advantages
        ]
        totals = BatchTotals(
            num_groups=len({sample.group_id for sample in samples}),
            num_samples=len(samples),
            num_tokens=sum(len(sample.trajectory.mask) for sample in samples),
            num_trained_tokens=num_trained,
            advantage_sum=sum(count * value for count, value in weighted),
            advantage_square_sum=sum(count * value * value for count, value in weighted),
            reward_sum=sum(sample.trajectory.reward for sample in samples),
        )
        return Batch(
            policy=self.policy,
            step=step,
            rank=0,
            world=1,
            trainer_version=session.base_version + step - session.base_step,
            samples=samples,
            totals=totals,
            staleness_mean=0.0,
            staleness_max=0,
            is_redo=step < self.committed,
        )

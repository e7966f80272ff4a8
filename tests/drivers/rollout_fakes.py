"""Fakes of the rollout side: character renderer, scripted engine, weights and dataflow in memory."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import HistoryRewrittenError, RefusedError, RolloutError, UnavailableError
from astraflow.protocols import Capacity
from astraflow.rollout.dialogue import HostedPolicy
from astraflow.types import (
    BusySpan,
    EarlierProgress,
    EpisodeReceipt,
    EpisodeResult,
    EpisodeResults,
    FinishReason,
    GenerateRequest,
    Generation,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Manifest,
    Message,
    PastCompletion,
    PolicyInfo,
    ProgressReply,
    ProgressReport,
    PushTasks,
    PushTasksReply,
    Receipts,
    RegisterWorker,
    Registration,
    RunState,
    Sampling,
    ServedVersions,
    Task,
    VersionsReply,
)
from astraflow.types.host_tensors import WeightSnapshot
from astraflow.weights.arrival import Arrival

STOP = 1
ROLES = {"system": 2, "user": 3, "assistant": 4, "tool": 5}


def ids_of(text: str) -> tuple[int, ...]:
    """One id a character."""
    return tuple(ord(c) for c in text)


class CharRenderer:
    """Role id, characters, stop id; with `strips` it drops reasoning of earlier turns."""

    def __init__(self, *, strips: bool = False) -> None:
        self._strips = strips

    @property
    def stop_ids(self) -> frozenset[int]:
        return frozenset({STOP})

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        ids = [self._message(m) for m in messages]
        return (*(i for part in ids for i in part), ROLES["assistant"])

    def extend(
        self, prefix: Sequence[int], history: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        if self._strips and any("</think>" in m.content for m in history):
            raise HistoryRewrittenError("reasoning is stripped")
        end = () if prefix[-1] == STOP else (STOP,)
        return (*prefix, *end, *self.render(messages))

    def parse(self, token_ids: Sequence[int]) -> Message:
        return Message(role="assistant", content="".join(chr(i) for i in token_ids if i > 5))

    def _message(self, message: Message) -> tuple[int, ...]:
        content = message.content
        if self._strips and message.role == "assistant":
            content = content.rpartition("</think>")[2]
        return (ROLES[message.role], *ids_of(content), STOP)


class ScriptedEngine:
    """Says what `reply` answers to a prompt's ids; each token carries the version of its slot.

    `gate`, if set, is waited for before each answer; `error` is raised instead of an answer, `loss` by
    `capacity`.
    """

    def __init__(
        self, reply: Callable[[GenerateRequest], str] | str = "ok", *, max_context: int = 512
    ) -> None:
        self.reply = reply
        self.requests: list[GenerateRequest] = []
        self.asked = asyncio.Event()
        """Somebody asked for a completion."""
        self.slots: dict[str, int] = {}
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.loss: Exception | None = None
        """Why it will never serve again."""
        self.load_errors: list[Exception] = []
        self.is_closed = False
        self.kv_frac: float | None = None
        self.num_preemptions = 0
        self._max_context = max_context
        self._num_tokens = 0

    async def generate(self, request: GenerateRequest) -> Generation:
        self.requests.append(request)
        self.asked.set()
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        if request.version >= 0 and request.version not in self.slots.values():
            raise RolloutError(f"version {request.version} is not loaded")
        text = self.reply if isinstance(self.reply, str) else self.reply(request)
        ids, finish_reason = self._cut((*ids_of(text), STOP), request.sampling.max_tokens)
        self._num_tokens += len(ids)
        version = request.version if request.version >= 0 else self.slots.get("live", 0)
        return Generation(
            token_ids=ids,
            logprobs=tuple(-0.25 for _ in ids),
            versions=(version,) * len(ids),
            finish_reason=finish_reason,
        )

    @staticmethod
    def _cut(ids: tuple[int, ...], max_tokens: int) -> tuple[tuple[int, ...], FinishReason]:
        return (ids, "stop") if len(ids) <= max_tokens else (ids[:max_tokens], "length")

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        return np.zeros(len(token_ids) - 1, np.float32)

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        if self.load_errors:
            raise self.load_errors.pop(0)
        self.slots[slot] = snapshot.version

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    def capacity(self) -> Capacity:
        if self.loss is not None:
            raise self.loss
        return Capacity(
            num_slots=64,
            num_running=0,
            num_waiting=0,
            max_context=self._max_context,
            generated_tokens=self._num_tokens,
            kv_frac=self.kv_frac,
            num_preemptions=self.num_preemptions,
        )

    def take_spans(self) -> tuple[BusySpan, ...]:
        return ()

    async def close(self) -> None:
        self.is_closed = True


def make_policy(name: str, *, max_tokens: int = 64, is_trained: bool = True) -> PolicyInfo:
    return PolicyInfo(
        name=name,
        is_trained=is_trained,
        sampling=Sampling(temperature=1.0, max_tokens=max_tokens),
        max_lag=1,
    )


def make_hosted(
    name: str, engine: ScriptedEngine, *, renderer: CharRenderer | None = None, is_trained: bool = True
) -> HostedPolicy:
    return HostedPolicy(make_policy(name, is_trained=is_trained), engine, renderer or CharRenderer())


def make_task(prompt: str = "2+3", answer: str = "5", idx: int = 0) -> Task:
    return Task(id=f"sums/{idx}", source="sums", prompt=prompt, answer=answer)


def make_lease(
    lease_id: str, *, task: Task | None = None, pinned: dict[str, int] | None = None, seed: int = 7
) -> Lease:
    return Lease(
        id=lease_id,
        kind="eval" if pinned else "train",
        group_id=0,
        episode_idx=0,
        attempt=0,
        task=task or make_task(),
        seed=seed,
        pinned=tuple(ServedVersions(policy=p, versions=(v,)) for p, v in (pinned or {}).items()),
    )


async def exact(task: Task, text: str) -> float:
    """1 if the text is the answer."""
    return float(text == task.answer)


def make_empty_manifest(policy: str, version: int) -> Manifest:
    return Manifest(
        policy=policy, version=version, kind="full", tensors=(), chunks=(), digest="", num_bytes=0
    )


class MemoryWeights:
    """Fetches versions that have no bytes; `errors` are raised first, one a fetch; `gate`, if set, is waited
    for."""

    def __init__(self) -> None:
        self.fetched: list[int] = []
        self.gate: asyncio.Event | None = None
        self.errors: list[Exception] = []
        self.received_bytes = 0

    async def fetch(self, manifest: Manifest) -> WeightSnapshot:
        if self.errors:
            raise self.errors.pop(0)
        self.fetched.append(manifest.version)
        if self.gate is not None:
            await self.gate.wait()
        return WeightSnapshot(manifest.policy, manifest.version, (), Path("model"))

    def arrival(self, policy: str) -> Arrival:
        return Arrival(num_bytes=1000, received_bytes=self.received_bytes)


class MemoryRolloutLink:
    """A dataflow in memory, seen by one rollout service. Tests put leases and versions in and read what came.

    `is_up = False` makes every call raise UnavailableError; `forget()` makes the worker unknown.
    """

    def __init__(self, policies: Sequence[str] = ("actor",)) -> None:
        self.is_up = True
        self.state: RunState = "running"
        self.is_draining = False
        self.registered: list[RegisterWorker] = []
        self.lease_requests: list[LeaseRequest] = []
        self.beats: list[Heartbeat] = []
        self.batches: list[tuple[EpisodeResult, ...]] = []
        self.drained: list[str] = []
        self.revoked: list[str] = []
        self.invalid: dict[str, str] = {}
        self.manifests: dict[str, list[Manifest]] = {name: [] for name in policies}
        self.pinned: dict[str, tuple[int, ...]] = dict.fromkeys(policies, ())
        self.reports: list[ProgressReport] = []
        self.progress_reply = ProgressReply()
        """The answer to the next report; those after it are kept whole."""
        self.knows_progress = True
        self.earlier: dict[str, tuple[PastCompletion, ...]] = {}
        """Lease -> what earlier attempts at its episode sampled."""
        self.heartbeat_s = 0.01
        self.refused = asyncio.Event()
        """A call failed because `is_up` is False."""
        self._leases: list[Lease] = []
        self._forced: list[Lease] = []
        self._known = ""
        self._served: tuple[ServedVersions, ...] = ()
        self._changed = asyncio.Condition()

    # --- for tests ---

    @property
    def results(self) -> dict[str, EpisodeResult]:
        return {result.lease_id: result for batch in self.batches for result in batch}

    async def offer(self, *leases: Lease) -> None:
        self._leases.extend(leases)
        await self.notify()

    async def publish(self, policy: str, version: int, *, pinned: tuple[int, ...] | None = None) -> None:
        self.manifests[policy].append(make_empty_manifest(policy, version))
        if pinned is not None:
            self.pinned[policy] = pinned
        await self.notify()

    async def pin(self, policy: str, *versions: int) -> None:
        self.pinned[policy] = versions
        await self.notify()

    async def end(self, state: RunState = "finished") -> None:
        self.state = state
        await self.notify()

    def force(self, lease: Lease) -> None:
        """Goes out with the next answer, whatever the service serves."""
        self._forced.append(lease)

    def forget(self) -> None:
        self._known = ""

    async def notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], object], *, wait_s: float = 5.0) -> None:
        """Waits until something that the service told makes the condition true."""
        async with asyncio.timeout(wait_s), self._changed:
            await self._changed.wait_for(condition)

    # --- WorkerLink ---

    async def register(self, request: RegisterWorker) -> Registration:
        self._check_up()
        self.registered.append(request)
        self._known = f"w{len(self.registered)}"
        await self.notify()
        return Registration(worker_id=self._known, heartbeat_s=self.heartbeat_s, lease_timeout_s=1.0)

    async def heartbeat(self, worker_id: str, beat: Heartbeat) -> HeartbeatReply:
        self._check(worker_id)
        self.beats.append(beat)
        self._served = beat.load.versions
        await self.notify()
        revoked, self.revoked = tuple(self.revoked), []
        return HeartbeatReply(revoked=revoked, state=self.state, is_draining=self.is_draining)

    async def drain(self, worker_id: str) -> None:
        self._check(worker_id)
        self.drained.append(worker_id)

    async def leases(self, request: LeaseRequest) -> LeaseReply:
        self._check(request.worker_id)
        self.lease_requests.append(request)
        await self.notify()
        self._served = request.served
        if request.num_free > 0:
            await self._wait(lambda: self._forced or (self._leases and self._fits()), request.wait_s)
        self._check(request.worker_id)
        taken = self._leases[: request.num_free] if self._fits() else []
        self._leases = self._leases[len(taken) :]
        forced, self._forced = self._forced, []
        return LeaseReply(leases=(*taken, *forced), state=self.state)

    async def episodes(self, results: EpisodeResults) -> Receipts:
        self._check(results.worker_id)
        self.batches.append(results.results)
        await self.notify()
        return Receipts(receipts=tuple(self._receipt(result.lease_id) for result in results.results))

    async def tell_progress(self, worker_id: str, report: ProgressReport) -> ProgressReply:
        self._check(worker_id)
        self._check_progress()
        self.reports.append(report)
        reply, self.progress_reply = self.progress_reply, ProgressReply()
        await self.notify()
        return reply

    async def earlier_progress(self, worker_id: str, lease_id: str) -> EarlierProgress:
        self._check(worker_id)
        self._check_progress()
        return EarlierProgress(completions=self.earlier.get(lease_id, ()))

    def _check_progress(self) -> None:
        if not self.knows_progress:
            raise RefusedError("no such route", code="not_found", status=404)

    async def push_tasks(self, tasks: PushTasks) -> PushTasksReply:
        return PushTasksReply(num_accepted=len(tasks.tasks), num_known=0)

    async def versions(self, policy: str, *, after: int, wait_s: float = 25.0) -> VersionsReply:
        self._check_up()
        asked = self.pinned[policy]
        await self._wait(lambda: self._newer(policy, after) or self.pinned[policy] != asked, wait_s)
        newer = self._newer(policy, after)
        newest = max((m.version for m in self.manifests[policy]), default=-1)
        return VersionsReply(newest=newest, manifests=newer, pinned=self.pinned[policy], state=self.state)

    def _newer(self, policy: str, after: int) -> tuple[Manifest, ...]:
        return tuple(m for m in self.manifests[policy] if m.version > after)

    def _fits(self) -> bool:
        """A request that waits serves what the last heartbeat says."""
        served = {s.policy: s.versions for s in self._served}
        return all(
            pin.versions[0] in served[pin.policy] for lease in self._leases[:1] for pin in lease.pinned
        )

    def _receipt(self, lease_id: str) -> EpisodeReceipt:
        if lease_id in self.invalid:
            return EpisodeReceipt(lease_id=lease_id, status="invalid", reason=self.invalid[lease_id])
        return EpisodeReceipt(lease_id=lease_id, status="accepted")

    def _check_up(self) -> None:
        if not self.is_up:
            self.refused.set()
            raise UnavailableError("the dataflow is down")

    def _check(self, worker_id: str) -> None:
        self._check_up()
        if worker_id != self._known:
            raise RefusedError(f"no worker {worker_id}", code="unknown_worker", status=404)

    async def _wait(self, condition: Callable[[], object], wait_s: float) -> None:
        try:
            async with asyncio.timeout(min(wait_s, 1.0)), self._changed:
                await self._changed.wait_for(lambda: condition() or self.state != "running" or not self.is_up)
        except TimeoutError:
            return


Scores = Callable[[Task, str], Awaitable[float]]

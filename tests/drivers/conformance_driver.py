"""Candidates for the conformance kit: our own services in this process, whole or deliberately broken."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from starlette.types import ASGIApp

from astraflow import wire
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import RolloutError
from astraflow.rollout.config import RolloutConfig
from astraflow.rollout.scoring import OpenCalls
from astraflow.rollout.service import RolloutService
from astraflow.service.client import HttpReply, MemoryTransport, ServiceClient, Transport
from astraflow.trainer.checkpoint import Checkpoint, CheckpointStore, sync_path
from astraflow.trainer.loop import Trainer, TrainerSettings
from astraflow.types import (
    Fingerprints,
    GenerateRequest,
    Generation,
    Item,
    PolicyInfo,
    RunInfo,
    Sampling,
    Task,
)
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.config import WeightsConfig
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.readers import HttpReader
from astraflow.weights.receiver import Receiver
from astraflow.workflows.single_turn import single_turn
from astraflow_conformance.fake_rollout_dataflow import FakeRolloutDataflow
from astraflow_conformance.fake_trainer_dataflow import FakeTrainerDataflow
from astraflow_conformance.report import Checks, Report
from astraflow_conformance.rollout_kit import ROLLOUT_RULES, RolloutKit
from astraflow_conformance.trainer_kit import NUM_STEPS, TRAINER_RULES, TrainerKit, make_samples
from astraflow_conformance.versions import DamagedChunks, PublishedVersions
from drivers.rollout_fakes import STOP, CharRenderer, ScriptedEngine, ids_of
from drivers.trainer_fakes import CountingLearner
from drivers.weight_fakes import ScriptedReader


class Mutation:
    """Changes requests and answers between two services. `request` and `answer` may be overridden."""

    inner: Transport
    """The way on, for further requests."""

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        """What goes on instead; or the answer, without asking."""
        return path, body

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        """What comes back instead."""
        return reply


class Mutant:
    """A `Transport` whose other end is changed by a mutation."""

    def __init__(self, inner: Transport, mutation: Mutation) -> None:
        self.inner, self.mutation = inner, mutation
        mutation.inner = inner

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> HttpReply:
        changed = await self.mutation.request(method, target, body)
        if isinstance(changed, HttpReply):
            return changed
        target, body = changed
        reply = await self.inner.request(method, target, headers=headers, body=body, timeout_s=timeout_s)
        return await self.mutation.answer(method, target, body, reply)

    async def close(self) -> None:
        await self.inner.close()


class ChangesBody(Mutation):
    """Changes the body of requests whose path ends so."""

    def __init__(self, ending: str, item: type[Item], change: Callable[[Any], Any]) -> None:
        self.ending, self.item, self.change = ending, item, change

    async def request(self, method: str, path: str, body: bytes) -> tuple[str, bytes] | HttpReply:
        if method == "POST" and path.endswith(self.ending):
            try:
                body = wire.encode(self.change(wire.decode(body, self.item)))
            except wire.WireError:
                return path, body
        return path, body


def path_fits(part: str, path: str) -> bool:
    """Whether a path holds the part; a part that begins with the version is the whole path."""
    return path.partition("?")[0] == part if part.startswith("/v1") else part in path


class ChangesAnswer(Mutation):
    """Changes the item in good answers of requests whose path holds this."""

    def __init__(
        self, part: str, item: type[Item], change: Callable[[Any], Any], *, method: str = ""
    ) -> None:
        self.part, self.item, self.change, self.method = part, item, change, method

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if path_fits(self.part, path) and reply.status == 200 and method == (self.method or method):
            item = self.change(wire.decode(reply.body, self.item, reply.media_type))
            return HttpReply(200, reply.media_type, wire.encode(item, reply.media_type))
        return reply


class Forgives(Mutation):
    """Answers refusals of a kind with success."""

    def __init__(self, code: str, ending: str, item: Item | None = None) -> None:
        self.code, self.ending, self.item = code, ending, item

    async def answer(self, method: str, path: str, body: bytes, reply: HttpReply) -> HttpReply:
        if reply.status < 400 or self.ending not in path or self.code.encode() not in reply.body:
            return reply
        return HttpReply(200, wire.MSGPACK, wire.encode(self.item)) if self.item else HttpReply(204, "", b"")


def replaced(**changes: object) -> Callable[[Any], Any]:
    """A change of fields."""
    return lambda item: msgspec.structs.replace(item, **changes)


# --- rollout --------------------------------------------------------------------------------------


class VersionedEngine(ScriptedEngine):
    """Says digits, one at a time; each token's logprob tells the version that it was sampled with."""

    async def generate(self, request: GenerateRequest) -> Generation:
        if request.version >= 0 and request.version not in self.slots.values():
            raise RolloutError(f"version {request.version} is not loaded")
        ids = (*ids_of("12345678"), STOP)
        versions: list[int] = []
        for _ in ids:
            await asyncio.sleep(0)
            versions.append(request.version if request.version >= 0 else self.slots["live"])
        logprobs = tuple(version_logprob(version) for version in versions)
        return Generation(token_ids=ids, logprobs=logprobs, versions=tuple(versions), finish_reason="stop")


def version_logprob(version: int) -> float:
    """What `VersionedEngine` says."""
    return -0.5 - 0.25 * version


def reference(policy: str, version: int, token_ids: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """The full forward of a model whose every logprob is that of its version."""
    return np.full(len(token_ids), version_logprob(version), np.float32)


class InlineScoring:
    """A scoring pool without processes."""

    def __init__(self) -> None:
        self.calls = OpenCalls()

    async def start(self) -> None: ...

    async def score(self, task: Task, text: str) -> float:
        return float(len(text) % 2)

    async def close(self) -> None: ...


class InProcessRollout:
    """Our rollout service as a candidate, in this process; `mutation` sits between it and the dataflow."""

    can_restart = True

    def __init__(
        self,
        app: ASGIApp,
        chunks: ASGIApp,
        folder: Path,
        mutation: Callable[[], Mutation],
        make_engine: Callable[[], ScriptedEngine] = VersionedEngine,
        token: str = "secret",
    ) -> None:
        self.app, self.chunks, self.folder, self.mutation = app, chunks, folder, mutation
        self.make_engine, self.token = make_engine, token
        self.task: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()

    async def start(self) -> None:
        self.stopping = asyncio.Event()
        self.task = asyncio.create_task(self.live())

    async def live(self) -> None:
        transport = Mutant(MemoryTransport(self.app), self.mutation())
        client = ServiceClient("http://memory", token=self.token, transport=transport, patience_s=60.0)
        reader = HttpReader(
            lambda url: ServiceClient(
                url, token=self.token, transport=MemoryTransport(self.chunks), patience_s=0.2
            )
        )
        receiver = Receiver(
            self.folder / "cache", readers={"http": ScriptedReader(reader)}, finders={"http": reader}
        )
        link = DataflowClient(client)
        try:
            info = await link.run()
            service = RolloutService(
                link,
                name="ours",
                policies=info.policies,
                workflow=single_turn,
                scoring=InlineScoring(),  # type: ignore[arg-type]
                weights=receiver,
                config=RolloutConfig(max_episodes=8),
                make_engine=self.engine_of,
                make_renderer=lambda *_: CharRenderer(),
            )
            await service.run(self.stopping)
        finally:
            await receiver.close()
            await client.close()

    def engine_of(self, snapshot: WeightSnapshot) -> ScriptedEngine:
        engine = self.make_engine()
        engine.slots["live"] = snapshot.version
        return engine

    async def stop(self) -> None:
        self.stopping.set()

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def ended(self) -> int:
        assert self.task is not None
        await asyncio.wait({self.task})
        return 0 if self.task.exception() is None else 1


@dataclass
class RolloutRig:
    """A kit around one in-process rollout service."""

    dataflow: FakeRolloutDataflow
    kit: RolloutKit
    candidate: InProcessRollout


@contextlib.asynccontextmanager
async def rollout_rig(
    folder: Path,
    mutation: Callable[[], Mutation] = Mutation,
    *,
    make_engine: Callable[[], ScriptedEngine] = VersionedEngine,
    patience_s: float = 30.0,
    token: str = "secret",
    make_candidate: type[InProcessRollout] = InProcessRollout,
) -> AsyncIterator[RolloutRig]:
    checks = Checks(ROLLOUT_RULES)
    info = RunInfo(
        name="conformance",
        run_id="conformance",
        state="running",
        policies=(PolicyInfo(name="actor", is_trained=True, sampling=Sampling(max_tokens=16), max_lag=1),),
        workflow="single_turn",
        fingerprints=Fingerprints(),
        recipe="{}",
    )
    dataflow = FakeRolloutDataflow(
        checks, info, token="secret", patience_s=patience_s, heartbeat_s=0.02, vocab_sizes={"actor": 256},
        reference=reference,
    )  # fmt: skip
    publisher = Publisher(folder / "weights", WeightsConfig(keep=64), "http://publisher")
    damage = DamagedChunks(publisher)
    client = ServiceClient("http://publisher", transport=MemoryTransport(damage))
    embeddings = HostTensor(
        "model.embed_tokens.weight", (256, 8), "float32", np.full(256 * 8, 0.5, "<f4").view(np.uint8)
    )
    versions = PublishedVersions(
        PublisherClient(client, publisher.store.incoming),
        damage,
        policy="actor",
        tensors=[embeddings],
        files={},
    )
    tasks = [Task(id=f"sums/{idx}", source="sums", prompt=f"{idx} + 1") for idx in range(8)]
    try:
        await dataflow.publish(await versions.publish(0))
        candidate = make_candidate(dataflow, damage, folder, mutation, make_engine, token)
        kit = RolloutKit(candidate, dataflow, versions, tasks=tasks, policy="actor")
        yield RolloutRig(dataflow, kit, candidate)
    finally:
        await client.close()
        publisher.store.close()


# --- trainer --------------------------------------------------------------------------------------


class MortalStore(CheckpointStore):
    """Checkpoints of one life of a trainer. A killed process takes its threads along; a cancelled task does
    not, and a thread that went on would move folders about under the trainer's next life."""

    def __init__(self, folder: Path, *, keep: int, sync: Callable[[Path], None]) -> None:
        super().__init__(folder, policy="actor", keep=keep, sync=sync)
        self._writes = threading.Lock()
        self._is_dead = False

    def stage(self, step: int, fill: Callable[[Path], Callable[[], None] | None]) -> Checkpoint:
        with self._alive():
            return super().stage(step, fill)

    def finish(self, staged: Checkpoint) -> Checkpoint:
        with self._alive():
            return super().finish(staged)

    def die(self) -> None:
        """Returns when the write that runs has ended; none begins from now on."""
        with self._writes:
            self._is_dead = True

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        with self._writes:
            if self._is_dead:
                raise OSError("the trainer was killed")
            yield


class InProcessTrainer:
    """Our trainer as a candidate, in this process, with a backend that counts."""

    can_restart = True
    keep_checkpoints = 2
    sync = staticmethod(sync_path)
    """Makes a file or folder of a checkpoint durable."""

    def __init__(
        self, rig: "TrainerParts", mutation: Callable[[], Mutation], backend: type[CountingLearner]
    ) -> None:
        self.rig, self.mutation, self.backend = rig, mutation, backend
        self.task: asyncio.Task[None] | None = None
        self.stopping = asyncio.Event()
        self.folder = rig.folder / "checkpoints"
        self.store = self.new_store()

    def new_store(self) -> MortalStore:
        """A store of checkpoints for one life of the trainer."""
        return MortalStore(self.folder, keep=self.keep_checkpoints, sync=self.sync)

    async def start(self) -> None:
        self.store = self.new_store()
        self.task = asyncio.create_task(self.live())

    async def live(self) -> None:
        config = self.rig.folder / "config.json"
        config.write_text("{}")
        transport = Mutant(MemoryTransport(self.rig.run), self.mutation())
        client = ServiceClient("http://memory", token=self.rig.token, transport=transport, patience_s=60.0)
        publishing = ServiceClient("http://publisher", transport=MemoryTransport(self.rig.publisher))
        plan = TrainerSettings(
            policy="actor", trainer_id="ours", checkpoint_every=2, files={"config.json": config}
        )
        trainer = Trainer(
            plan,
            learner=self.backend(),
            link=DataflowClient(client),
            publisher=PublisherClient(publishing, self.rig.publisher.store.incoming),
            checkpoints=self.store,
        )
        try:
            await trainer.run(self.stopping)
        finally:
            await client.close()
            await publishing.close()

    async def stop(self) -> None:
        self.stopping.set()

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await asyncio.to_thread(self.store.die)

    async def ended(self) -> int:
        assert self.task is not None
        await asyncio.wait({self.task})
        await asyncio.to_thread(self.store.die)
        return 0 if self.task.exception() is None else 1


@dataclass
class TrainerParts:
    """What a trainer meets."""

    run: FakeTrainerDataflow
    publisher: Publisher
    folder: Path
    token: str


async def judged_trainer(
    folder: Path,
    mutation: Callable[[], Mutation] = Mutation,
    *,
    backend: type[CountingLearner] = CountingLearner,
    make_candidate: type[InProcessTrainer] = InProcessTrainer,
    patience_s: float = 30.0,
    token: str = "secret",
    keep: int = 4,
) -> Report:
    """The kit's report on our trainer, changed in one way or not at all."""
    policy = PolicyInfo(name="actor", is_trained=True, sampling=Sampling(), max_lag=1)
    info = RunInfo(
        name="conformance", run_id="conformance", state="running", policies=(policy,),
        workflow="single_turn", fingerprints=Fingerprints(), recipe="{}",
    )  # fmt: skip
    publisher = Publisher(folder / "weights", WeightsConfig(keep=keep), "http://publisher")

    def receiver(cache: Path) -> Receiver:
        reader = HttpReader(
            lambda url: ServiceClient(url, transport=MemoryTransport(publisher), patience_s=0.2)
        )
        return Receiver(cache, readers={"http": ScriptedReader(reader)}, finders={"http": reader})

    run = FakeTrainerDataflow(
        Checks(TRAINER_RULES), info, policy="actor", token="secret", patience_s=patience_s,
        samples=make_samples(policy, vocab_size=24), num_steps=NUM_STEPS, receiver=receiver,
    )  # fmt: skip
    try:
        candidate = make_candidate(TrainerParts(run, publisher, folder, token), mutation, backend)
        return await TrainerKit(candidate, run).run("candidate")
    finally:
        publisher.store.close()

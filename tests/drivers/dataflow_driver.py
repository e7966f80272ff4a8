"""A real dataflow service for tests, with scripted rollout services and trainers that speak its protocol."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from astraflow.algorithms.curation import CuratorConfig
from astraflow.algorithms.samplers import ReplayConfig
from astraflow.algorithms.task_orders import ShuffleConfig
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.config import DataflowConfig, TableConfig
from astraflow.dataflow.core.plan import EvalPlan, EvalSetPlan, PolicyPlan, RunPlan, StopPlan
from astraflow.dataflow.journal.journal import Journal
from astraflow.dataflow.journal.segments import SEGMENT_BYTES
from astraflow.dataflow.service.service import DataflowService
from astraflow.errors import RefusedError
from astraflow.protocols import TaskSource
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.service.server import HttpServer
from astraflow.types import (
    BusySpan,
    Commit,
    Episode,
    EpisodeResult,
    EpisodeResults,
    Failure,
    Fingerprints,
    Heartbeat,
    Lease,
    LeaseRequest,
    Load,
    Manifest,
    Message,
    MetricItem,
    PolicyInfo,
    PolicyStatus,
    Publication,
    Receipts,
    RegisterWorker,
    Release,
    RunInfo,
    Sampling,
    ServedVersions,
    Session,
    SessionRequest,
    Task,
    TensorInfo,
    Trajectory,
    Turn,
    VersionSpan,
)
from astraflow.weights.addresses import PeerRules
from astraflow.wire import column

VOCAB = 32


class ListSource:
    """Tasks `source/0`, `source/1`, ..."""

    def __init__(self, name: str, size: int) -> None:
        self._name, self._size = name, size

    def __len__(self) -> int:
        return self._size

    def task(self, idx: int) -> Task:
        return Task(id=f"{self._name}/{idx}", source=self._name, prompt=f"{idx} + 1 =", answer=str(idx + 1))


def make_plan(
    *,
    policies: tuple[str, ...] = ("actor",),
    num_steps: int = 3,
    group_size: int = 2,
    groups_per_batch: int = 4,
    num_tasks: int = 50,
    eval_tasks: int = 0,
    max_attempts: int = 3,
    seed: int = 0,
    stop: StopPlan | None = None,
    curators: tuple[CuratorConfig, ...] = (ShuffleConfig(),),
    replay: ReplayConfig | None = None,
    **table_fields: object,
) -> RunPlan:
    table = TableConfig(
        group_size=group_size,
        groups_per_batch=groups_per_batch,
        replay=replay or ReplayConfig(),
        **table_fields,  # type: ignore[arg-type]
    )
    sets = {"heldout": EvalSetPlan(num_tasks=eval_tasks, samples=1)} if eval_tasks else {}
    return RunPlan(
        seed=seed,
        group_size=group_size,
        policies={name: PolicyPlan(table=table, num_steps=num_steps) for name in policies},
        sources={"sums": num_tasks},
        curators=curators,
        eval=EvalPlan(sets=sets, every=2, deadline_s=60.0),
        max_attempts=max_attempts,
        stop=stop or StopPlan(),
    )


def make_run_info(plan: RunPlan, *, frozen: tuple[str, ...] = (), recipe: str = "{}") -> RunInfo:
    names = [(name, True) for name in plan.policies] + [(name, False) for name in frozen]
    return RunInfo(
        name="test",
        run_id="",
        state="running",
        policies=tuple(
            PolicyInfo(name=name, is_trained=trained, sampling=Sampling(temperature=1.0), max_lag=1)
            for name, trained in names
        ),
        workflow="single_turn",
        fingerprints=Fingerprints(recipe="r1", models={name: f"model-{name}" for name, _ in names}),
        recipe=recipe,
    )


@dataclass
class Run:
    """A running service and a client of it."""

    service: DataflowService
    client: DataflowClient
    calls: ServiceClient
    folder: Path
    journal: Journal
    url: str = ""


def kept(policies: Sequence[PolicyStatus]) -> list[PolicyStatus]:
    """What a restart must keep of the status of policies: all but the trainer's last request."""
    return [msgspec.structs.replace(policy, trainer_request="", trainer_seen_s=0.0) for policy in policies]


@asynccontextmanager
async def running(
    folder: Path,
    plan: RunPlan | None = None,
    *,
    frozen: tuple[str, ...] = (),
    config: DataflowConfig | None = None,
    http: bool = False,
    snapshot_every: int = 20_000,
    segment_bytes: int = SEGMENT_BYTES,
    peer_rules: PeerRules | None = None,
    resumes_failed: bool = False,
    train: TaskSource | None = None,
    recipe: str = "{}",
) -> AsyncIterator[Run]:
    """A dataflow service over a journal in `folder`; in memory, or on a real port. `train`: its first source
    of tasks. `recipe`: JSON text."""
    plan = plan or make_plan()
    config = config or DataflowConfig()
    journal = Journal(
        folder,
        snapshot_every=snapshot_every,
        segment_bytes=segment_bytes,
        retained_steps=config.retained_steps,
    )
    sources: dict[str, TaskSource] = {name: ListSource(name, size) for name, size in plan.sources.items()}
    if train is not None:
        sources[next(iter(sources))] = train
    eval_sources = {"heldout": ListSource("heldout", 50)}
    try:
        service = DataflowService(
            *(
                plan,
                sources,
                eval_sources,
                make_run_info(plan, frozen=frozen, recipe=recipe),
                config,
                journal,
            ),
            peer_rules=peer_rules,
            resumes_failed=resumes_failed,
        )
    except BaseException:
        await journal.close()
        raise
    await service.start()
    server = HttpServer(service.app, host="127.0.0.1", port=0, name="dataflow") if http else None
    url = await server.start() if server else "http://memory"
    calls = ServiceClient(url, patience_s=1.0, transport=None if http else MemoryTransport(service.app))
    try:
        yield Run(service, DataflowClient(calls), calls, folder, journal, url)
    finally:
        await calls.close()
        if server:
            await server.stop()
        await service.stop()


def make_trajectory(
    *,
    policy: str = "actor",
    version: int = 0,
    reward: float = 1.0,
    num_prompt: int = 3,
    num_sampled: int = 4,
    seed: int = 0,
) -> Trajectory:
    rng = np.random.default_rng(seed)
    total = num_prompt + num_sampled
    mask = np.arange(total) >= num_prompt
    return Trajectory(
        policy=policy,
        role=policy,
        token_ids=column(rng.integers(0, VOCAB, total), "int32"),
        mask=column(mask, "uint8"),
        behavior_logprobs=column(np.where(mask, -rng.random(total), 0.0), "float32"),
        versions=(VersionSpan(num_prompt, num_sampled, version),),
        temperature=1.0,
        finish_reason="stop",
        turns=(Turn(start=num_prompt, end=total, reward=reward),),
        reward=reward,
    )


def make_episode(*trajectories: Trajectory, score: float = 1.0) -> Episode:
    speaker = trajectories[0].policy if trajectories else ""
    answer = Message(role="assistant", content="1", name=speaker)
    return Episode(
        trajectories=trajectories,
        score=score,
        metrics=(MetricItem("length", 4.0),),
        messages=(Message(role="user", content="0 + 1 ="), answer),
        duration_s=0.1,
    )


def make_tensor_manifest(policy: str, version: int, *, vocab: int = VOCAB) -> Manifest:
    tensor = TensorInfo(
        name="model.embed_tokens.weight", shape=(vocab, 8), dtype="float32", offset=0, num_bytes=vocab * 32
    )
    return Manifest(
        policy=policy, version=version, kind="full", tensors=(tensor,), chunks=(), digest="00", num_bytes=0
    )


_METRICS = (MetricItem("loss", 0.5),)


class ScriptedTrainer:
    """Attaches, publishes, takes, commits, releases."""

    def __init__(
        self, client: DataflowClient, policy: str = "actor", metrics: tuple[MetricItem, ...] = _METRICS
    ) -> None:
        self.client, self.policy, self.metrics = client, policy, metrics
        self.session = Session(epoch=0, step=0, next_version=0, num_steps=0)
        self.version = -1

    async def attach(self, durable_step: int = 0) -> Session:
        """Opens a session and publishes its first version."""
        request = SessionRequest(
            trainer_id="t0", durable_step=durable_step, fingerprints=Fingerprints(recipe="r1")
        )
        self.session = await self.client.attach(self.policy, request)
        await self.publish(self.session.next_version, self.session.step)
        return self.session

    async def publish(self, version: int, step: int) -> None:
        publication = Publication(
            epoch=self.session.epoch, step=step, manifest=make_tensor_manifest(self.policy, version)
        )
        await self.client.publish(self.policy, publication)
        self.version = version

    async def train_step(self, step: int) -> bool:
        """Takes and commits one step; False if the run ended first."""
        try:
            batch = await self.client.batch(self.policy, step, epoch=self.session.epoch)
        except RefusedError as err:
            if err.code != "finished":  # the run's stop came before this step
                raise
            return False
        if batch is None:
            return False
        await self.commit(step)
        return True

    async def commit(self, step: int) -> None:
        await self.publish(self.version + 1, step + 1)
        commit = Commit(
            epoch=self.session.epoch,
            step=step,
            version=self.version,
            metrics=self.metrics,
            spans=(BusySpan("train", 10.0 + step, 10.5 + step),),
        )
        await self.client.commit(self.policy, commit)

    async def release(self, step: int) -> None:
        release = Release(epoch=self.session.epoch, step=step, version=self.version)
        await self.client.release(self.policy, release)

    async def run(self) -> None:
        """The whole training."""
        await self.attach()
        for step in range(self.session.step, self.session.num_steps):
            if not await self.train_step(step):
                return


class ScriptedWorker:
    """Registers, leases, answers with scripted tokens; the newest versions count as served at once."""

    def __init__(self, client: DataflowClient, name: str = "w0", hosts: tuple[str, ...] = ("actor",)) -> None:
        self.client, self.name, self.hosts = client, name, hosts
        self.id = ""
        self.num_leased = 0
        self._has_leased = asyncio.Condition()

    async def register(self) -> None:
        request = RegisterWorker(
            name=self.name,
            hosts=self.hosts,
            engine="scripted",
            num_slots=8,
            fingerprints=Fingerprints(recipe="r1"),
        )
        self.id = (await self.client.register(request)).worker_id

    async def beat(self, *lease_ids: str) -> tuple[str, ...]:
        """A heartbeat; the revoked leases."""
        load = Load(num_running=len(lease_ids), spans=(BusySpan("generate", 10.0, 11.0),))
        return (await self.client.heartbeat(self.id, Heartbeat(lease_ids=lease_ids, load=load))).revoked

    async def served(self) -> tuple[ServedVersions, ...]:
        replies = [(policy, await self.client.versions(policy, after=-1, wait_s=0)) for policy in self.hosts]
        return tuple(
            ServedVersions(policy=p, versions=tuple(sorted({*r.pinned, r.newest}))) for p, r in replies
        )

    async def lease(self, num_free: int = 8, wait_s: float = 0.0) -> tuple[Lease, ...]:
        request = LeaseRequest(
            worker_id=self.id, num_free=num_free, served=await self.served(), wait_s=wait_s
        )
        leases = (await self.client.leases(request)).leases
        self.num_leased += len(leases)
        return leases

    async def answer(self, lease: Lease) -> EpisodeResult:
        """A scripted episode; rewards differ within a group."""
        served = {entry.policy: entry.versions[-1] for entry in await self.served()}
        served.update({entry.policy: entry.versions[0] for entry in lease.pinned})
        reward = float(lease.episode_idx % 2)
        trajectories = [
            make_trajectory(
                policy=policy,
                version=served[policy],
                reward=reward,
                num_sampled=2 + lease.group_id % 5,
                seed=lease.group_id * 100 + lease.episode_idx,
            )
            for policy in self.hosts
        ]
        return EpisodeResult(lease_id=lease.id, outcome=make_episode(*trajectories, score=reward))

    async def send(self, *results: EpisodeResult) -> Receipts:
        return await self.client.episodes(EpisodeResults(worker_id=self.id, results=results))

    async def fail_all(self) -> None:
        """Fails every lease as soon as it has it, until the run is over."""
        await self.register()
        failure = Failure(error_class="Broken", message="as ever", is_retryable=False)
        while True:
            request = LeaseRequest(worker_id=self.id, num_free=8, served=await self.served(), wait_s=5.0)
            reply = await self.client.leases(request)
            if reply.state != "running":
                return
            if reply.leases:
                await self.send(*[EpisodeResult(lease_id=i.id, outcome=failure) for i in reply.leases])
                async with self._has_leased:
                    self.num_leased += len(reply.leases)
                    self._has_leased.notify_all()

    async def leased(self, num: int) -> None:
        """Returns when `fail_all` has failed so many leases."""
        async with self._has_leased:
            await self._has_leased.wait_for(lambda: self.num_leased >= num)

    async def run(self) -> None:
        """Until the run is over."""
        await self.register()
        while True:
            request = LeaseRequest(worker_id=self.id, num_free=8, served=await self.served(), wait_s=0.1)
            reply = await self.client.leases(request)
            if reply.state != "running":
                return
            if reply.leases:
                await self.send(*[await self.answer(lease) for lease in reply.leases])


async def play_run(
    run: Run,
    *,
    policies: tuple[str, ...] = ("actor",),
    num_workers: int = 2,
    metrics: tuple[MetricItem, ...] = _METRICS,
) -> None:
    """A whole run: trainers and rollout services until the core says that it is over."""
    async with asyncio.TaskGroup() as tasks:
        for policy in policies:
            tasks.create_task(ScriptedTrainer(run.client, policy, metrics).run())
        for idx in range(num_workers):
            tasks.create_task(ScriptedWorker(run.client, f"w{idx}", policies).run())


async def refused(awaitable: object) -> RefusedError:
    """The refusal that a call must end in."""
    try:
        await awaitable  # type: ignore[misc]
    except RefusedError as err:
        return err
    raise AssertionError("the call was not refused")

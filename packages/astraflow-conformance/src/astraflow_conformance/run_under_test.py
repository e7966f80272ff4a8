"""The run of a dataflow under test, with the fake rollout services and trainers that scenarios control.

The run remembers all leases and results. Leases that a scenario leaves open, on purpose or because a rule is
broken, can thus be answered before the next scenario begins.
"""

import asyncio
from collections.abc import Sequence

import msgspec
import numpy as np

from astraflow.types import (
    Batch,
    BatchReply,
    Commit,
    Episode,
    EpisodeReceipt,
    EpisodeResult,
    EpisodeResults,
    Failure,
    Fingerprints,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Load,
    Manifest,
    PolicyInfo,
    Publication,
    PublicationReply,
    Receipts,
    RegisterWorker,
    Registration,
    Release,
    RunInfo,
    ServedVersions,
    Session,
    SessionRequest,
    TensorInfo,
    Trajectory,
    Turn,
    VersionSpan,
    VersionsReply,
)
from astraflow.wire import column
from astraflow_conformance.probe_client import ProbeClient, RefusalError
from astraflow_conformance.report import AbandonedError, BrokenError, Checks

__all__ = [
    "VOCAB_SIZE",
    "FakeTrainer",
    "FakeWorker",
    "RunUnderTest",
    "make_manifest",
    "make_trajectory",
    "same",
]

VOCAB_SIZE = 32
"""Number of rows of the embedding table in the kit's manifests."""
_NUM_PROMPT = 3
_NUM_SAMPLED = 4
_MAX_IDLE = 100
"""Number of requests for a lease or batch after which the kit gives up."""
_IDLE_S = 0.1


def make_manifest(policy: str, version: int) -> Manifest:
    """Makes the manifest of a full version with one small tensor.

    It has no chunks, because a dataflow only passes manifests on and fetches no weights.
    """
    num_bytes = VOCAB_SIZE * 8 * 4
    tensor = TensorInfo(
        name="model.embed_tokens.weight",
        shape=(VOCAB_SIZE, 8),
        dtype="float32",
        offset=0,
        num_bytes=num_bytes,
    )
    return Manifest(
        policy=policy, version=version, kind="full", tensors=(tensor,), chunks=(), digest="00", num_bytes=0
    )


def make_trajectory(info: PolicyInfo, version: int, *, seed: int, reward: float) -> Trajectory:
    """Makes a valid trajectory of seven tokens, of which the last four are sampled."""
    random = np.random.default_rng(seed)
    total = _NUM_PROMPT + _NUM_SAMPLED
    mask = np.arange(total) >= _NUM_PROMPT
    return Trajectory(
        policy=info.name,
        role=info.name,
        token_ids=column(random.integers(0, VOCAB_SIZE, total), "int32"),
        mask=column(mask, "uint8"),
        behavior_logprobs=column(np.where(mask, -0.01 - random.random(total), 0.0), "float32"),
        versions=(VersionSpan(_NUM_PROMPT, _NUM_SAMPLED, version),),
        temperature=info.sampling.temperature,
        finish_reason="stop",
        turns=(Turn(start=_NUM_PROMPT, end=total, reward=reward),),
        reward=reward,
    )


class FakeTrainer:
    """The trainer of one policy. It opens one session after another. Example: `await trainer.attach()`."""

    def __init__(self, client: ProbeClient, policy: str) -> None:
        self.client = client
        self.policy = policy
        self.session = Session(epoch=0, step=0, next_version=0, num_steps=0)
        self.newest = -1
        self.done = 0
        """Number of steps that the newest version has been trained for."""
        self.published: dict[int, Manifest] = {}

    def path(self, what: str) -> str:
        """Returns the path of one of the policy's routes."""
        return f"/v1/policies/{self.policy}/{what}"

    async def attach(self, durable_step: int = 0) -> Session:
        """Opens a session and publishes its first version."""
        await self.open(durable_step)
        await self.publish_next()
        return self.session

    async def open(self, durable_step: int = 0) -> Session:
        """Opens a session."""
        request = SessionRequest(
            trainer_id="conformance", durable_step=durable_step, fingerprints=Fingerprints()
        )
        self.session = await self.client.ask("POST", self.path("session"), Session, request)
        self.newest = self.session.next_version - 1
        self.done = self.session.step - 1
        return self.session

    async def publish_next(self) -> None:
        """Publishes the next version, which contains one step more than the previous one."""
        await self.client.ask("POST", self.path("versions"), PublicationReply, self.publication())
        self.newest = self.newest + 1
        self.done = self.done + 1
        self.published[self.newest] = make_manifest(self.policy, self.newest)

    def publication(self, *, ahead: int = 1, epoch: int | None = None) -> Publication:
        """Makes the publication of the version that is `ahead` of the newest; 0 repeats the newest one."""
        return Publication(
            epoch=self.session.epoch if epoch is None else epoch,
            step=self.done + ahead,
            manifest=make_manifest(self.policy, self.newest + ahead),
        )

    async def batch(self, step: int, *, rank: int = 0, world: int = 1, wait_s: float = 0.0) -> Batch | None:
        """Asks for the slice of one rank. Returns None if the batch isn't ready."""
        params = {
            "epoch": str(self.session.epoch),
            "rank": str(rank),
            "world": str(world),
            "wait_s": str(wait_s),
        }
        reply = await self.client.ask("GET", self.path(f"batches/{step}"), BatchReply, params=params)
        return reply.batch

    def commit(self, step: int, *, version: int | None = None, epoch: int | None = None) -> Commit:
        """Makes the commit of a step, by default with the newest version."""
        return Commit(
            epoch=self.session.epoch if epoch is None else epoch,
            step=step,
            version=self.newest if version is None else version,
        )

    def release(self, step: int, *, epoch: int | None = None) -> Release:
        """Makes the release of the first `step` steps."""
        epoch = self.session.epoch if epoch is None else epoch
        return Release(epoch=epoch, step=step, version=self.newest)


class FakeWorker:
    """A registered rollout service."""

    def __init__(self, run: "RunUnderTest", id_: str) -> None:
        self.run = run
        self.id = id_

    async def ask(
        self,
        num_free: int,
        *,
        served: Sequence[ServedVersions] | None = None,
        held: Sequence[str] | None = None,
        wait_s: float = 0.0,
    ) -> tuple[Lease, ...]:
        """Asks for leases, records them, and checks them. They may include evaluation leases."""
        request = LeaseRequest(
            worker_id=self.id,
            num_free=num_free,
            served=tuple(self.run.served() if served is None else served),
            wait_s=wait_s,
            held=None if held is None else tuple(held),
        )
        leases = (await self.run.client.ask("POST", "/v1/leases", LeaseReply, request)).leases
        self.run.note_leases(self, request, leases)
        return tuple({lease.id: lease for lease in leases}.values())

    async def take(self, num: int) -> list[Lease]:
        """Gets exactly `num` training leases, and answers evaluation leases.

        Raises: AbandonedError if there are not enough leases.
        """
        found: list[Lease] = []
        for _ in range(_MAX_IDLE):
            for lease in await self.ask(num - len(found), wait_s=_IDLE_S):
                if lease.kind == "train":
                    found.append(lease)
                else:
                    await self.send((lease,))
            if len(found) >= num:
                await self.send(found[num:])
                return found[:num]
            await self.run.make_room()
        raise AbandonedError(
            f"{len(found)} of {num} leases could be had; is the run fresh, and large enough?"
        )

    async def send(self, leases: Sequence[Lease]) -> tuple[EpisodeReceipt, ...]:
        """Sends valid results for these leases."""
        return await self.results([self.run.result(lease) for lease in leases])

    async def fail(self, lease: Lease) -> EpisodeReceipt:
        """Sends a failure after which the episode may be attempted again."""
        outcome = Failure(error_class="Conformance", message="made to fail by the conformance kit")
        return (await self.results([EpisodeResult(lease_id=lease.id, outcome=outcome)]))[0]

    async def results(self, results: Sequence[EpisodeResult]) -> tuple[EpisodeReceipt, ...]:
        """Sends results, and records those that were accepted."""
        body = EpisodeResults(worker_id=self.id, results=tuple(results))
        receipts = (await self.run.client.ask("POST", "/v1/episodes", Receipts, body)).receipts
        for result, receipt in zip(results, receipts, strict=False):
            self.run.note_receipt(result, receipt)
        return receipts

    async def beat(self, lease_ids: Sequence[str]) -> HeartbeatReply:
        """Sends a heartbeat that names these leases."""
        beat = Heartbeat(lease_ids=tuple(lease_ids), load=Load())
        return await self.run.client.ask("POST", f"/v1/workers/{self.id}/heartbeat", HeartbeatReply, beat)

    async def drain(self) -> None:
        """Announces that the service is leaving."""
        await self.run.client.ask("POST", f"/v1/workers/{self.id}/drain", None)


class RunUnderTest:
    """The run that a dataflow under test serves. Call `meet` first."""

    def __init__(self, client: ProbeClient, checks: Checks) -> None:
        self.client = client
        self.checks = checks
        self.info: RunInfo
        self.trainer: FakeTrainer
        self.others: list[FakeTrainer] = []
        self.lease_timeout_s = 0.0
        self.out: dict[str, tuple[FakeWorker, Lease]] = {}
        """Lease id -> service and lease, until its receipt arrives."""
        self.tasks: dict[tuple[int, int], tuple[str, int]] = {}
        """Episode -> task and seed of its first attempt."""
        self.sent: dict[tuple[int, int, str], Trajectory] = {}
        """(group, episode, policy) -> the accepted trajectory."""
        self._num_workers = 0

    async def meet(self) -> None:
        """Reads the description of the run. Raises: BrokenError if it cannot be read or trains no policy."""
        try:
            self.info = await self.client.ask("GET", "/v1/run", RunInfo)
        except (RefusalError, AbandonedError) as err:
            raise BrokenError("D1", str(err)) from err
        trained = [policy.name for policy in self.info.policies if policy.is_trained]
        if not trained:
            raise BrokenError("D1", "the run trains no policy")
        self.trainer, *self.others = (FakeTrainer(self.client, name) for name in trained)

    @property
    def trained(self) -> list[PolicyInfo]:
        """The trained policies. The policy of `trainer` comes first."""
        return [policy for policy in self.info.policies if policy.is_trained]

    @property
    def max_lag(self) -> int:
        """The engine lag that the first trained policy allows."""
        return self.trained[0].max_lag

    def served(self) -> list[ServedVersions]:
        """Returns the newest version of each policy."""
        trainers = (self.trainer, *self.others)
        return [ServedVersions(policy=t.policy, versions=(t.newest,)) for t in trainers]

    async def pinned(self) -> tuple[int, ...]:
        """Returns the versions that evaluation currently needs."""
        params = {"after": str(self.trainer.newest)}
        return (
            await self.client.ask("GET", self.trainer.path("versions"), VersionsReply, params=params)
        ).pinned

    async def worker(self) -> FakeWorker:
        """Registers another rollout service."""
        self._num_workers += 1
        request = RegisterWorker(
            name=f"conformance-{self._num_workers}",
            hosts=tuple(policy.name for policy in self.trained),
            engine="conformance",
            num_slots=8,
            fingerprints=Fingerprints(),
        )
        registration = await self.client.ask("POST", "/v1/workers", Registration, request)
        self.lease_timeout_s = registration.lease_timeout_s
        return FakeWorker(self, registration.worker_id)

    def result(self, lease: Lease) -> EpisodeResult:
        """Makes a valid result. Rewards differ within a group, so that filters keep the group."""
        reward = float(lease.episode_idx % 2)
        served = {entry.policy: entry.versions[-1] for entry in self.served()}
        trajectories = tuple(
            make_trajectory(
                info, served[info.name], seed=1000 * lease.group_id + lease.episode_idx, reward=reward
            )
            for info in self.trained
            if lease.kind == "train"
        )
        return EpisodeResult(lease_id=lease.id, outcome=Episode(trajectories=trajectories, score=reward))

    def note_leases(self, worker: FakeWorker, request: LeaseRequest, leases: Sequence[Lease]) -> None:
        """Checks what must hold for every answer with leases, and records the leases."""
        that = self.checks.that
        that("D10", len(leases) <= request.num_free, f"{len(leases)} leases for num_free {request.num_free}")
        served = {entry.policy: set(entry.versions) for entry in request.served}
        for lease in leases:
            known = [
                one.id
                for _, one in self.out.values()
                if (one.kind, one.group_id, one.episode_idx, one.attempt)
                == (lease.kind, lease.group_id, lease.episode_idx, lease.attempt)
            ]
            that("D10", not known, f"lease {lease.id} was granted while {known} is out")
            if lease.kind == "eval":
                fits = lease.pinned and all(
                    len(pin.versions) == 1 and pin.versions[0] in served.get(pin.policy, ())
                    for pin in lease.pinned
                )
                that("D19", fits, f"lease {lease.id} pins {lease.pinned}, the service serves {served}")
            key = (lease.group_id, lease.episode_idx)
            if lease.kind == "train":
                first = self.tasks.setdefault(key, (lease.task.id, lease.seed))
                detail = f"attempt {lease.attempt} of episode {key}: another task or seed than before"
                if lease.attempt:
                    that("D14", first == (lease.task.id, lease.seed), detail)
            self.out[lease.id] = (worker, lease)

    def note_receipt(self, result: EpisodeResult, receipt: EpisodeReceipt) -> None:
        """Forgets the lease, and records the trajectories that were accepted."""
        entry = self.out.pop(result.lease_id, None)
        if entry and receipt.status == "accepted" and isinstance(result.outcome, Episode):
            lease = entry[1]
            for trajectory in result.outcome.trajectories:
                key = (lease.group_id, lease.episode_idx, trajectory.policy)
                self.sent.setdefault(key, trajectory)

    async def settle(self) -> None:
        """Answers every lease without a receipt."""
        for worker, lease in tuple(self.out.values()):
            try:
                await worker.send((lease,))
            except RefusalError:
                self.out.pop(lease.id, None)

    async def make_room(self) -> None:
        """Trains the next step if its batch is ready, so that tickets become free."""
        trainer = self.trainer
        if trainer.session.epoch and await trainer.batch(trainer.done) is not None:
            step = trainer.done
            await trainer.publish_next()
            await self.client.ask("POST", trainer.path("commit"), None, trainer.commit(step))

    async def fill(self, step: int) -> Batch:
        """Sends episodes until the batch of a step is ready. Raises: AbandonedError."""
        worker = await self.worker()
        for _ in range(_MAX_IDLE):
            if (batch := await self.trainer.batch(step)) is not None:
                return batch
            leases = await worker.ask(64, wait_s=_IDLE_S)
            await worker.send(leases)
            await asyncio.sleep(0)
        raise AbandonedError(f"step {step} has no batch after {_MAX_IDLE} rounds of episodes")


def same(left: object, right: object) -> bool:
    """Returns whether two items have the same encoding."""
    return msgspec.msgpack.encode(left) == msgspec.msgpack.encode(right)

"""In-memory counterparts of a trainer: dataflow, publisher and backend."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from astraflow.errors import DataError, FencedError, RefusedError
from astraflow.protocols import Learner, StepResult
from astraflow.trainer.checkpoint import CheckpointStore
from astraflow.trainer.loop import Trainer, TrainerSettings
from astraflow.types import (
    Batch,
    Commit,
    Manifest,
    MetricItem,
    Publication,
    PublicationReply,
    Release,
    Session,
    SessionRequest,
    StepFailure,
)
from astraflow.types.host_tensors import HostTensor
from drivers.trainer_builders import make_batch, make_sample


class MemoryTrainerLink:
    """A `TrainerLink` that keeps the dataflow's rules for one policy. Batches up to `num_ready` exist."""

    def __init__(self, *, num_steps: int = 5, num_ready: int | None = None) -> None:
        self.num_steps = num_steps
        self.num_ready = num_steps if num_ready is None else num_ready
        self.epoch, self.newest, self.committed, self.released = 0, -1, 0, 0
        self.is_over = False
        self.changed = asyncio.Condition()
        self.sessions: list[SessionRequest] = []
        self.taken: list[int] = []
        self.publications: list[Publication] = []
        self.commits: list[Commit] = []
        self.releases: list[Release] = []
        self.failures: list[StepFailure] = []
        self.done = 0

    async def attach(self, policy: str, request: SessionRequest) -> Session:
        if self.is_over:
            raise RefusedError("the run is over: all steps are done", code="finished")
        if not self.released <= request.durable_step <= self.committed:
            is_ahead = request.durable_step > self.committed
            code = "checkpoint_ahead" if is_ahead else "batches_released"
            raise RefusedError(f"checkpoint of {request.durable_step} steps", code=code)
        self.sessions.append(request)
        self.epoch += 1
        self.done = request.durable_step
        return Session(
            epoch=self.epoch, step=self.done, next_version=self.newest + 1, num_steps=self.num_steps
        )

    async def batch(
        self, policy: str, step: int, *, epoch: int, rank: int = 0, world: int = 1
    ) -> Batch | None:
        self._check_epoch(epoch)
        assert step <= self.done + 1
        async with self.changed:
            await self.changed.wait_for(lambda: step < self.num_ready or self.is_over or epoch != self.epoch)
        self._check_epoch(epoch)
        if self.is_over:
            return None
        self.taken.append(step)
        return make_batch([make_sample([2, 3], [4 + step, 5])], step=step)

    async def publish(self, policy: str, publication: Publication) -> PublicationReply:
        self._check_epoch(publication.epoch)
        assert publication.manifest.version == self.newest + 1
        self.newest += 1
        self.publications.append(publication)
        return PublicationReply(needed=(self.newest,))

    async def commit(self, policy: str, commit: Commit) -> None:
        self._check_epoch(commit.epoch)
        if self.is_over:
            raise RefusedError("the run is over: stopped", code="finished")
        assert commit.step == self.done
        assert commit.version == self.newest
        self.done += 1
        self.committed = max(self.committed, self.done)
        self.commits.append(commit)

    async def release(self, policy: str, release: Release) -> None:
        self._check_epoch(release.epoch)
        assert release.step <= self.done
        self.released = release.step
        self.releases.append(release)

    async def step_failed(self, policy: str, failure: StepFailure) -> None:
        self._check_epoch(failure.epoch)
        self.failures.append(failure)

    async def change(
        self, *, num_ready: int | None = None, is_over: bool | None = None, fence: bool = False
    ) -> None:
        """Something happens elsewhere; waiting trainers hear of it."""
        async with self.changed:
            self.num_ready = self.num_ready if num_ready is None else num_ready
            self.is_over = self.is_over if is_over is None else is_over
            self.epoch += fence
            self.changed.notify_all()

    def _check_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            raise FencedError(
                f"policy 'actor': session {epoch} is over, session {self.epoch} holds the policy"
            )


class MemoryPublisher:
    """A `VersionPublisher` that keeps everything. `hold(version)` makes a version wait until `let_go`."""

    def __init__(self) -> None:
        self.versions: dict[int, bytes] = {}
        self.files: dict[int, dict[str, Path]] = {}
        self.forgotten: list[tuple[int, ...]] = []
        self.asked: asyncio.Queue[int] = asyncio.Queue()
        self.num_in_flight = 0
        self.most_in_flight = 0
        self._held: dict[int, asyncio.Event] = {}

    def hold(self, version: int) -> None:
        self._held[version] = asyncio.Event()

    def let_go(self, version: int) -> None:
        self._held[version].set()

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        self.asked.put_nowait(version)
        if version in self._held:
            await self._held[version].wait()
        self.versions[version] = b"".join(t.data.tobytes() for t in tensors)
        self.files[version] = dict(files)
        self.num_in_flight -= 1
        return Manifest(
            policy=policy, version=version, kind="full", tensors=(), chunks=(), digest="", num_bytes=0
        )

    async def forget(self, policy: str, needed: Sequence[int]) -> None:
        self.forgotten.append(tuple(needed))


class CountingLearner:
    """A `Learner` whose one weight depends on every token trained, in order."""

    def __init__(self) -> None:
        self.weight = 1
        self.trained: list[int] = []
        self.threads: set[str] = set()
        self.may_train = threading.Event()
        self.may_train.set()
        self.begun_steps = threading.Semaphore(0)
        self.ended_steps = threading.Semaphore(0)

    def train_step(self, batch: Batch) -> StepResult:
        self.begun_steps.release()
        assert self.may_train.wait(10.0)
        self.threads.add(threading.current_thread().name)
        self.weight = self.weight * 31 + sum(sum(s.trajectory.token_ids) for s in batch.samples)
        self.weight %= 2**31
        self.trained.append(batch.step)
        self.ended_steps.release()
        return StepResult(metrics=(MetricItem("loss", float(batch.step)),))

    def export(self) -> Sequence[HostTensor]:
        data = np.frombuffer(self.weight.to_bytes(4, "little"), dtype=np.uint8)
        return (HostTensor("w", (1,), "float32", data),)

    def save(self, folder: Path) -> None:
        (folder / "weight").write_text(str(self.weight))

    def load(self, folder: Path) -> None:
        if not (folder / "weight").is_file():
            raise DataError(f"{folder} holds no weight")
        self.weight = int((folder / "weight").read_text())


async def train_until(
    learner: Learner,
    folder: Path,
    dataflow: MemoryTrainerLink,
    *,
    files: Mapping[str, Path] | None = None,
    stop_at: int | None = None,
    limit_s: float = 15.0,
) -> MemoryPublisher:
    """A trainer from its latest checkpoint on; with `stop_at`, killed once that version is published."""
    publisher, stop = MemoryPublisher(), asyncio.Event()
    plan = TrainerSettings(policy="actor", trainer_id="me", checkpoint_every=2, files=files or {})
    store = CheckpointStore(folder, policy="actor", keep=2)
    trainer = Trainer(plan, learner=learner, link=dataflow, publisher=publisher, checkpoints=store)
    work = asyncio.create_task(trainer.run(stop))
    async with asyncio.timeout(limit_s):
        if stop_at is not None:
            while await publisher.asked.get() != stop_at:
                pass
            work.cancel()
            await asyncio.wait({work})
        else:
            await work
    return publisher

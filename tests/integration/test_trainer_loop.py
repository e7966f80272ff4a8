"""The trainer's loop against an in-memory dataflow and publisher."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from astraflow.errors import (
    ConfigError,
    DataError,
    FencedError,
    RefusedError,
    ServiceError,
    TrainingError,
    UnavailableError,
)
from astraflow.protocols import Learner, StepResult
from astraflow.trainer.checkpoint import CheckpointStore
from astraflow.trainer.loop import STOP_S, Trainer, TrainerSettings
from astraflow.types import Batch, Commit, Publication, PublicationReply, Release, StepFailure
from drivers.trainer_fakes import CountingLearner, MemoryPublisher, MemoryTrainerLink

DEADLINE_S = 10.0


class Bench:
    """One policy's counterparts, which outlive its trainers."""

    def __init__(self, folder: Path, dataflow: MemoryTrainerLink, *, checkpoint_every: int = 2) -> None:
        self.folder, self.dataflow, self.checkpoint_every = folder, dataflow, checkpoint_every
        self.publisher = MemoryPublisher()
        self.backend = CountingLearner()
        self.stop = asyncio.Event()
        (folder / "config.json").write_text("{}")

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.folder / "checkpoints", policy="actor", keep=2)

    def start(self, backend: Learner | None = None, *, stop_s: float = STOP_S) -> "asyncio.Task[None]":
        """A trainer process, so to speak."""
        self.stop = asyncio.Event()
        plan = TrainerSettings(
            policy="actor",
            trainer_id="me",
            checkpoint_every=self.checkpoint_every,
            files={"config.json": self.folder / "config.json"},
        )
        trainer = Trainer(
            plan,
            learner=backend or self.backend,
            link=self.dataflow,
            publisher=self.publisher,
            checkpoints=self.store,
        )
        return asyncio.create_task(trainer.run(self.stop, stop_s=stop_s))

    async def run(self, backend: Learner | None = None) -> None:
        async with asyncio.timeout(DEADLINE_S):
            await self.start(backend)

    async def until_asked(self, version: int) -> None:
        """Waits until the publisher is given a version."""
        async with asyncio.timeout(DEADLINE_S):
            while await self.publisher.asked.get() != version:
                pass


def numbers(items: Sequence[Commit] | Sequence[Publication]) -> list[int]:
    return [item.step for item in items]


async def test_a_whole_run_publishes_commits_and_releases_in_order(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=5))
    await bench.run()
    dataflow = bench.dataflow
    assert dataflow.taken == [0, 1, 2, 3, 4]
    assert [(p.manifest.version, p.step) for p in dataflow.publications] == [(v, v) for v in range(6)]
    assert [(c.step, c.version) for c in dataflow.commits] == [(s, s + 1) for s in range(5)]
    assert [(r.step, r.version) for r in dataflow.releases] == [(2, 2), (4, 4)]
    assert bench.publisher.forgotten == [(v,) for v in range(1, 6)]
    latest = bench.store.latest()
    assert latest is not None
    assert latest.step == 5
    assert (latest.path / "config.json").read_text() == "{}"


async def test_only_the_first_version_of_a_session_carries_the_models_files(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=2))
    await bench.run()
    assert [sorted(files) for files in bench.publisher.files.values()] == [["config.json"], [], []]


async def test_the_next_step_trains_while_the_last_is_published(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=4))
    bench.publisher.hold(1)
    work = bench.start()
    await bench.until_asked(1)
    for _ in range(2):
        assert await asyncio.to_thread(bench.backend.ended_steps.acquire, timeout=DEADLINE_S)
    assert bench.dataflow.commits == []
    assert bench.publisher.num_in_flight == 1
    bench.publisher.let_go(1)
    async with asyncio.timeout(DEADLINE_S):
        await work
    assert numbers(bench.dataflow.commits) == [0, 1, 2, 3]
    assert bench.publisher.most_in_flight == 1


async def test_the_loop_stays_live_while_a_step_trains(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=1))
    bench.backend.may_train.clear()
    work = bench.start()
    await bench.until_asked(0)
    bench.backend.may_train.set()  # from the loop: were it blocked, the step would never end
    async with asyncio.timeout(DEADLINE_S):
        await work
    assert {name.rstrip("_0") for name in bench.backend.threads} == {"train-actor"}


async def test_commits_carry_metrics_and_what_the_time_went_to(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=3))
    await bench.run()
    for commit in bench.dataflow.commits:
        named = {m.name: m.value for m in commit.metrics}
        assert named["loss"] == commit.step
        assert min(named["train_s"], named["export_s"], named["publish_s"]) >= 0
        kinds = [span.kind for span in commit.spans]
        assert kinds.count("train") == 1
        assert "wait:dataflow" in kinds
        assert all(span.start_s <= span.end_s for span in commit.spans)


async def test_a_killed_trainer_repeats_the_steps_after_its_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=6, num_ready=5))
    first = bench.start()
    await bench.until_asked(5)
    first.cancel()
    await asyncio.wait({first})
    assert bench.dataflow.released == 2, "the checkpoint of 2 steps is kept, were that of 4 damaged"
    committed = bench.dataflow.committed
    await bench.dataflow.change(num_ready=6)
    bench.dataflow.taken.clear()
    second = CountingLearner()
    await bench.run(second)
    assert bench.dataflow.taken == [4, 5]
    assert bench.dataflow.sessions[-1].durable_step == 4
    restored = bench.dataflow.publications[-3]
    assert restored.step == 4
    assert restored.manifest.version == bench.dataflow.newest - 2
    assert bench.publisher.files[restored.manifest.version]
    assert bench.publisher.versions[restored.manifest.version] == bench.publisher.versions[4]
    assert committed <= 5
    straight = Bench(tmp_path_of(tmp_path, "straight"), MemoryTrainerLink(num_steps=6))
    await straight.run()
    assert second.weight == straight.backend.weight


def tmp_path_of(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name


async def test_a_checkpoint_never_holds_more_steps_than_are_committed(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=4), checkpoint_every=1)
    bench.publisher.hold(2)
    work = bench.start()
    await bench.until_asked(2)
    work.cancel()
    await asyncio.wait({work})
    latest = bench.store.latest()
    assert latest is not None
    assert latest.step == bench.dataflow.committed == 1


async def test_a_torn_checkpoint_falls_back_to_the_one_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=4), checkpoint_every=2)
    await bench.run()
    flip_a_bit(bench.store)
    await bench.run(CountingLearner())
    assert bench.dataflow.sessions[-1].durable_step == 2


def flip_a_bit(store: CheckpointStore) -> Path:
    """Damages the newest checkpoint; its folder."""
    newest = store.latest()
    assert newest is not None
    data = bytearray((newest.path / "weight").read_bytes())
    data[len(data) // 2] ^= 1
    (newest.path / "weight").write_bytes(data)
    return newest.path


async def test_a_flipped_bit_in_the_newest_checkpoint_costs_the_steps_after_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=9, num_ready=7))
    first = bench.start()
    await bench.until_asked(7)
    first.cancel()
    await asyncio.wait({first})
    damaged = flip_a_bit(bench.store)
    await bench.dataflow.change(num_ready=9)
    second = CountingLearner()
    await bench.run(second)
    assert damaged.name == "step-00000006"
    assert (bench.folder / "checkpoints" / "damaged-step-00000006" / "weight").is_file(), "kept for a person"
    assert "is damaged and is set aside as damaged-step-00000006: weight differ" in caplog.text
    assert bench.dataflow.sessions[-1].durable_step == 4
    straight = Bench(tmp_path_of(tmp_path, "straight"), MemoryTrainerLink(num_steps=9))
    await straight.run()
    assert second.weight == straight.backend.weight


async def test_when_every_checkpoint_is_damaged_the_trainer_says_what_to_do(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=9, num_ready=7))
    first = bench.start()
    await bench.until_asked(7)
    first.cancel()
    await asyncio.wait({first})
    for path in bench.store.folder.glob("step-*"):
        (path / "weight").write_text("")
    with pytest.raises(DataError) as refused:
        await bench.run(CountingLearner())
    for part in ("actor: checkpoints are damaged", "damaged-step-00000006", "none is intact", "from a copy"):
        assert part in str(refused.value)


async def test_a_first_checkpoint_that_is_damaged_begins_the_run_anew(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=4, num_ready=3))
    first = bench.start()
    await bench.until_asked(3)
    first.cancel()
    await asyncio.wait({first})
    flip_a_bit(bench.store)
    await bench.dataflow.change(num_ready=4)
    await bench.run(CountingLearner())
    assert bench.dataflow.sessions[-1].durable_step == 0


class Watched(MemoryTrainerLink):
    """Notes what the publisher had been told to forget at each commit."""

    publisher: MemoryPublisher

    def __init__(self, **fields: int) -> None:
        super().__init__(**fields)
        self.forgotten: list[int] = []

    async def commit(self, policy: str, commit: Commit) -> None:
        self.forgotten.append(len(self.publisher.forgotten))
        await super().commit(policy, commit)


async def test_nothing_is_forgotten_before_the_commit_of_its_step(tmp_path: Path) -> None:
    dataflow = Watched(num_steps=3)
    bench = Bench(tmp_path, dataflow)
    dataflow.publisher = bench.publisher
    await bench.run()
    assert dataflow.forgotten == [0, 1, 2]
    assert len(bench.publisher.forgotten) == 3


async def test_a_fenced_trainer_ends_with_the_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=4, num_ready=2))
    work = bench.start()
    await bench.until_asked(2)
    await bench.dataflow.change(fence=True)
    with pytest.raises(FencedError, match="session 2 holds the policy"):
        async with asyncio.timeout(DEADLINE_S):
            await work


class LosesItsVoice(MemoryTrainerLink):
    """Stops answering publications after the first."""

    async def publish(self, policy: str, publication: Publication) -> PublicationReply:
        if publication.step > 0:
            raise UnavailableError("POST /v1/policies/actor/versions: failed after 9 tries")
        return await super().publish(policy, publication)


async def test_a_failed_publication_ends_the_wait_for_a_batch(tmp_path: Path) -> None:
    bench = Bench(tmp_path, LosesItsVoice(num_steps=4, num_ready=1))
    with pytest.raises(UnavailableError, match="9 tries"):
        await bench.run()


async def test_a_stop_while_waiting_saves_the_last_committed_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=9, num_ready=3), checkpoint_every=100)
    work = bench.start()
    await bench.until_asked(3)
    bench.stop.set()
    async with asyncio.timeout(DEADLINE_S):
        await work
    latest = bench.store.latest()
    assert latest is not None
    assert latest.step == bench.dataflow.committed == 3
    latest = bench.store.latest()
    assert latest is not None
    assert latest.step == 3


class FallsSilent(MemoryTrainerLink):
    """Hangs in its second commit, as a client does that retries while the service is gone."""

    async def commit(self, policy: str, commit: Commit) -> None:
        if commit.step == 1:
            await asyncio.Event().wait()
        await super().commit(policy, commit)


async def test_a_stop_does_not_wait_for_a_silent_dataflow(tmp_path: Path) -> None:
    bench = Bench(tmp_path, FallsSilent(num_steps=9, num_ready=2), checkpoint_every=1)
    work = bench.start(stop_s=0.2)
    await bench.until_asked(2)
    bench.stop.set()
    async with asyncio.timeout(DEADLINE_S):
        await work
    latest = bench.store.latest()
    assert latest is not None
    assert latest.step == 1


class GoneWhenStopped(MemoryTrainerLink):
    """The whole run is stopped at once: the dataflow is gone first."""

    async def release(self, policy: str, release: Release) -> None:
        raise UnavailableError("gone")


async def test_a_stop_is_no_failure_when_the_dataflow_is_gone_already(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GoneWhenStopped(num_steps=9, num_ready=1), checkpoint_every=100)
    work = bench.start()
    await bench.until_asked(1)
    bench.stop.set()
    async with asyncio.timeout(DEADLINE_S):
        await work
    latest = bench.store.latest()
    assert latest is not None
    assert latest.step == 1


async def test_the_runs_end_is_a_good_end_with_a_checkpoint(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=9, num_ready=1), checkpoint_every=100)
    work = bench.start()
    await bench.until_asked(1)
    await bench.dataflow.change(is_over=True)
    async with asyncio.timeout(DEADLINE_S):
        await work
    latest = bench.store.latest()
    assert bench.dataflow.committed == (latest.step if latest else 0)


async def test_a_run_that_is_over_needs_no_trainer(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink())
    await bench.dataflow.change(is_over=True)
    await bench.run()
    assert bench.dataflow.publications == []


async def test_a_refusal_for_another_reason_is_an_error(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=4))
    await bench.run()
    bench.dataflow.committed = 0  # another run's dataflow
    with pytest.raises(RefusedError, match="checkpoint of 4 steps"):
        await bench.run()


class Broken(CountingLearner):
    def train_step(self, batch: Batch) -> StepResult:
        if batch.step == 1:
            raise TrainingError("the loss of 3 tokens is not finite, in group 9/episode 1")
        return super().train_step(batch)


async def test_an_error_of_the_backend_ends_the_trainer(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=4))
    with pytest.raises(TrainingError, match="group 9/episode 1"):
        await bench.run(Broken())
    assert bench.dataflow.committed <= 1
    (failure,) = bench.dataflow.failures
    assert (failure.step, failure.epoch) == (1, 1)
    assert failure.reason == "TrainingError: the loss of 3 tokens is not finite, in group 9/episode 1"


@pytest.mark.parametrize("error", [ConfigError("train.lr"), ServiceError("rank 1 of 2 was killed")])
async def test_an_error_that_is_not_the_batchs_is_not_blamed_on_it(tmp_path: Path, error: Exception) -> None:
    class Unlucky(CountingLearner):
        def train_step(self, batch: Batch) -> StepResult:
            raise error

    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=4))
    with pytest.raises(type(error)):
        await bench.run(Unlucky())
    assert bench.dataflow.failures == []


class Deaf(MemoryTrainerLink):
    """A dataflow that does not know the request."""

    async def step_failed(self, policy: str, failure: StepFailure) -> None:
        raise RefusedError("no such route", code="not_found", status=404)


async def test_a_dataflow_that_cannot_be_told_of_a_failed_step_hides_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Deaf(num_steps=4))
    with pytest.raises(TrainingError, match="group 9/episode 1"):
        await bench.run(Broken())


async def test_a_stop_lets_a_long_step_end_and_saves_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, MemoryTrainerLink(num_steps=9, num_ready=9), checkpoint_every=100)
    bench.backend.may_train.clear()
    work = bench.start(stop_s=0.2)
    assert await asyncio.to_thread(bench.backend.begun_steps.acquire, timeout=DEADLINE_S)
    bench.stop.set()
    await asyncio.sleep(0.5)  # longer than a publication may take
    assert not work.done()
    bench.backend.may_train.set()
    async with asyncio.timeout(DEADLINE_S):
        await work
    latest = bench.store.latest()
    assert latest is not None
    assert (latest.step, bench.dataflow.committed) == (1, 1)

"""One rollout service among others sends results that cannot be trained: each is refused when it arrives."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from astraflow.dataflow.audit import audit
from astraflow.trainer.checkpoint import CheckpointStore
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.loop import Trainer, TrainerSettings
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import (
    EpisodeReceipt,
    EpisodeResult,
    Fingerprints,
    MediaRef,
    Stream,
    Trajectory,
    Turn,
    VersionSpan,
)
from astraflow.wire import column
from drivers.dataflow_driver import (
    VOCAB,
    Run,
    ScriptedWorker,
    make_episode,
    make_plan,
    make_trajectory,
    running,
)
from drivers.trainer_builders import save_model
from drivers.trainer_fakes import MemoryPublisher
from drivers.vision_models import picture

GOOD = make_trajectory()


def changed(**fields: object) -> Trajectory:
    return msgspec.structs.replace(GOOD, **fields)


def whole_sampled() -> Trajectory:
    num = len(GOOD.mask)
    return changed(
        mask=b"\1" * num,
        behavior_logprobs=column(np.full(num, -1.0), "float32"),
        versions=(VersionSpan(0, num, 0),),
        turns=(Turn(start=0, end=num, reward=1.0),),
    )


def one_token() -> Trajectory:
    return changed(
        token_ids=column([3], "int32"),
        mask=b"\1",
        behavior_logprobs=column([-1.0], "float32"),
        versions=(VersionSpan(0, 1, 0),),
        turns=(Turn(start=0, end=1, reward=1.0),),
    )


def with_stream(name: str, values: object, dtype: str = "float32") -> Trajectory:
    stream = Stream(name=name, dtype=dtype, data=column(values, dtype))  # type: ignore[arg-type]
    return changed(streams=(stream,))


def with_logprob(value: float) -> Trajectory:
    logprobs = np.frombuffer(GOOD.behavior_logprobs, "<f4").copy()
    logprobs[-1] = value
    return changed(behavior_logprobs=logprobs.tobytes())


POISONED: dict[str, tuple[Callable[[], Trajectory], str]] = {
    "a trained first token": (whole_sampled, "token 0 has mask 1, but nothing predicts the first token"),
    "a trajectory of one token": (one_token, "a trajectory of one token cannot be trained"),
    "a stream of another type": (
        lambda: with_stream("teacher_logprobs", np.zeros(len(GOOD.mask)), "int32"),
        "stream 'teacher_logprobs' has 1 int32 values per token; the policy's trainer reads 1 float32",
    ),
    "a stream out of bounds": (
        lambda: with_stream("teacher_logprobs", np.full(len(GOOD.mask), -3e38)),
        "stream 'teacher_logprobs' has -3e+38 at a trained token",
    ),
    "experts for a dense model": (
        lambda: with_stream("experts", np.zeros(len(GOOD.mask)), "uint8"),
        "stream 'experts' cannot be used by the policy's trainer: no router of its model is known",
    ),
    "an image for a text model": (
        lambda: changed(media=(MediaRef(kind="image", uri=picture(0), start=0),)),
        "media of kind 'image' at token 0, but the policy's model reads only text",
    ),
    "an absurd logprob": (lambda: with_logprob(-1e30), "logprob of token 6 is -1e+30; a sampled token has"),
    "an id beyond the vocabulary": (
        lambda: changed(token_ids=column([VOCAB, 1, 1, 1, 1, 1, 1], "int32")),
        f"token id {VOCAB} is outside the vocabulary",
    ),
}


async def train(run: Run, folder: Path, model_dir: Path) -> None:
    """A real trainer on a tiny model, from the start to the end of the run."""
    config = TrainConfig.model_validate_json('{"lr": 0.001, "steps": 3}')
    plan = TrainerSettings(
        policy="actor",
        trainer_id="me",
        checkpoint_every=1,
        files={"config.json": model_dir / "config.json"},
        fingerprints=Fingerprints(recipe="r1"),
    )
    trainer = Trainer(
        plan,
        learner=LossLearner(config, TorchBackend(config, model_dir=model_dir)),
        link=run.client,
        publisher=MemoryPublisher(),
        checkpoints=CheckpointStore(folder / "checkpoints", policy="actor", keep=2),
    )
    await trainer.run(asyncio.Event())


async def send_poison(worker: ScriptedWorker, make: Callable[[], Trajectory]) -> EpisodeReceipt:
    """One poisoned result next to a good one, as soon as there are two leases."""
    leases = [*await worker.lease(2, wait_s=5.0)]
    while len(leases) < 2:
        leases += await worker.lease(2 - len(leases), wait_s=5.0)
    poisoned = EpisodeResult(lease_id=leases[0].id, outcome=make_episode(make()))
    receipts = (await worker.send(poisoned, await worker.answer(leases[1]))).receipts
    return receipts[0]


async def attack(run: Run) -> dict[str, EpisodeReceipt]:
    """Sends one result of each kind; between them good ones, so that the service is not set aside."""
    worker = ScriptedWorker(run.client, "poisoner")
    await worker.register()
    return {name: await send_poison(worker, make) for name, (make, _) in POISONED.items()}


@pytest.mark.timeout(120)
async def test_each_poisoned_result_is_refused_with_its_reason_and_the_run_ends_well(tmp_path: Path) -> None:
    model_dir = save_model(tmp_path / "model", vocab_size=VOCAB)
    plan = make_plan(num_steps=3, groups_per_batch=8)
    async with running(tmp_path / "journal", plan, http=True) as run, asyncio.TaskGroup() as tasks:
        training = tasks.create_task(train(run, tmp_path, model_dir))
        receipts = await attack(run)
        tasks.create_task(ScriptedWorker(run.client, "honest").run())
        await training
        status = await run.client.status()
    for name, (_, reason) in POISONED.items():
        assert receipts[name].status == "invalid", name
        assert reason in receipts[name].reason, name
    assert status.policies[0].step == 3
    report = audit(tmp_path / "journal")
    assert report.problems == ()
    assert report.policies[0].steps == 3


@pytest.mark.timeout(120)
async def test_a_stream_that_nobody_reads_is_accepted_from_one_service_and_left_out(tmp_path: Path) -> None:
    model_dir = save_model(tmp_path / "model", vocab_size=VOCAB)
    async with running(tmp_path / "journal", make_plan(num_steps=2), http=True) as run:
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(train(run, tmp_path, model_dir))
            worker = ScriptedWorker(run.client, "odd")
            await worker.register()
            receipt = await send_poison(worker, lambda: with_stream("own", np.ones(len(GOOD.mask))))
            assert receipt.status == "accepted"
            tasks.create_task(ScriptedWorker(run.client, "honest").run())
            await training
        steps = await run.client.steps("actor", wait_s=0)
    first = {metric.name: metric.value for metric in steps[0].metrics}
    assert first["streams_left_out"] == 1.0
    assert audit(tmp_path / "journal").problems == ()

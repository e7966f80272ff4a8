"""A batch that is larger than the body of one answer: it travels in pages, and trains."""

from pathlib import Path

import numpy as np
import pytest

from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import EpisodeResult, Lease, Stream, Trajectory, Turn, VersionSpan
from astraflow.wire import MAX_BODY_BYTES, column
from drivers.dataflow_driver import VOCAB, ScriptedTrainer, ScriptedWorker, make_episode, make_plan, running
from drivers.trainer_builders import save_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

GROUP_SIZE = 8
NUM_GROUPS = 32
NUM_TOKENS = 5_000
NUM_SAMPLED = 4
NUM_STREAMS = 60
BATCH_BYTES = GROUP_SIZE * NUM_GROUPS * NUM_TOKENS * (9 + 4 * NUM_STREAMS)


def make_wide_trajectory(lease: Lease, reward: float) -> Trajectory:
    """Many columns, so that few tokens have many bytes."""
    rng = np.random.default_rng(lease.group_id)
    mask = np.arange(NUM_TOKENS) >= NUM_TOKENS - NUM_SAMPLED
    entries = column(rng.random(NUM_TOKENS), "float32")
    return Trajectory(
        policy="actor",
        role="actor",
        token_ids=column(rng.integers(0, VOCAB, NUM_TOKENS), "int32"),
        mask=column(mask, "uint8"),
        behavior_logprobs=column(np.where(mask, -3.0, 0.0), "float32"),
        versions=(VersionSpan(NUM_TOKENS - NUM_SAMPLED, NUM_SAMPLED, 0),),
        temperature=1.0,
        finish_reason="stop",
        turns=(Turn(start=NUM_TOKENS - NUM_SAMPLED, end=NUM_TOKENS, reward=reward),),
        reward=reward,
        streams=tuple(Stream(name=f"s{n}", dtype="float32", data=entries) for n in range(NUM_STREAMS)),
    )


async def test_a_batch_of_300_mb_trains(tmp_path: Path) -> None:
    assert BATCH_BYTES > 300e6 > MAX_BODY_BYTES
    plan = make_plan(group_size=GROUP_SIZE, groups_per_batch=NUM_GROUPS, num_tasks=4 * NUM_GROUPS)
    async with running(tmp_path / "run", plan, http=True) as run:
        trainer, worker = ScriptedTrainer(run.client), ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        num_left = GROUP_SIZE * NUM_GROUPS
        while num_left:
            leases = await worker.lease(num_free=min(8, num_left))
            num_left -= len(leases)
            for lease in leases:
                # One group alone has advantages, so that the others are not computed.
                reward = float(lease.group_id == 0 and lease.episode_idx % 2)
                episode = make_episode(make_wide_trajectory(lease, reward), score=reward)
                await worker.send(EpisodeResult(lease_id=lease.id, outcome=episode))
        batch = await run.client.batch("actor", 0, epoch=trainer.session.epoch)
    assert batch is not None
    assert len(batch.samples) == batch.totals.num_samples == GROUP_SIZE * NUM_GROUPS
    config = TrainConfig(lr=1e-3, steps=1)
    model_dir = save_model(tmp_path / "model", vocab_size=VOCAB, max_position_embeddings=NUM_TOKENS)
    result = LossLearner(config, TorchBackend(config, model_dir=model_dir)).train_step(batch)
    metrics = {item.name: item.value for item in result.metrics}
    assert metrics["num_tokens"] == GROUP_SIZE * NUM_GROUPS * NUM_TOKENS
    assert metrics["num_gradient_tokens"] == GROUP_SIZE * NUM_SAMPLED
    assert metrics["grad_norm"] > 0

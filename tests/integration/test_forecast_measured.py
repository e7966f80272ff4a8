"""Lengths and speeds from a journal that a dataflow wrote."""

import random
from pathlib import Path

import msgspec
import pytest

from astraflow.errors import DataError
from astraflow.types import EpisodeResult, MetricItem
from astraflow_paced.forecast.forecast_inputs import measure_run
from drivers.dataflow_driver import (
    ScriptedTrainer,
    ScriptedWorker,
    make_episode,
    make_plan,
    make_trajectory,
    running,
)

TOKEN_S = 1e-6
TURN_S = 1e-4
"""So short that each episode ends before the next result is sent: none runs beside another."""
METRICS = (
    MetricItem("train_s", 2.0),
    MetricItem("export_s", 0.5),
    MetricItem("publish_s", 0.25),
)


async def play(folder: Path, num_steps: int) -> None:
    """Steps of 8 episodes whose durations follow from their tokens."""
    rng = random.Random(0)
    async with running(folder, make_plan(num_steps=num_steps + 1)) as run:
        trainer = ScriptedTrainer(run.client, metrics=METRICS)
        worker = ScriptedWorker(run.client)
        await trainer.attach()
        await worker.register()
        for step in range(num_steps):
            for lease in await worker.lease(8):
                num_tokens = rng.randint(4, 200)
                trajectory = make_trajectory(
                    version=step, reward=rng.random(), num_sampled=num_tokens, seed=step
                )
                duration_s = TURN_S + num_tokens * TOKEN_S
                episode = msgspec.structs.replace(make_episode(trajectory), duration_s=duration_s)
                await worker.send(EpisodeResult(lease_id=lease.id, outcome=episode))
            await trainer.train_step(step)


async def test_what_a_run_did_is_found_in_its_journal(tmp_path: Path) -> None:
    await play(tmp_path, 6)
    inputs, shapes = measure_run(tmp_path, ["actor"], 8)
    assert len(shapes) == 48
    assert all(len(shape) == 1 and 4 <= shape[0].num_tokens <= 200 for shape in shapes)
    service = inputs.service
    row_s = 1 / service.max_tokens_per_s if service.max_tokens_per_s else 0.0
    assert 1 / service.tokens_per_s + row_s == pytest.approx(TOKEN_S, rel=0.05)
    assert service.turn_s == pytest.approx(TURN_S, rel=0.05)
    assert service.idle_s > 0
    trainer = inputs.trainers["actor"]
    assert trainer.step_s + trainer.million_tokens_s * 800 / 1e6 == pytest.approx(2.5, rel=0.1)
    assert (trainer.publish_s, trainer.filtered_frac) == (pytest.approx(0.25, abs=0.2), 0.0)


async def test_a_run_that_was_too_short_is_refused(tmp_path: Path) -> None:
    await play(tmp_path, 3)
    with pytest.raises(DataError, match="committed 3 steps in the measured run"):
        measure_run(tmp_path, ["actor"], 8)
    await play(tmp_path / "shorter", 1)
    with pytest.raises(DataError, match="8 whole episodes"):
        measure_run(tmp_path / "shorter", ["actor"], 8)

"""`exact: true`: the logprobs that the trainer computes are those that the engine recorded, bit for bit."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from astraflow.addons.doctor.drift import measure_drift
from astraflow.models.loading import load_causal_lm
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.recorder import EpisodeRecorder, Speaker
from astraflow.trainer.backend_factory import make_learner
from astraflow.trainer.config import TrainConfig
from astraflow.types import AdvantageSpan, GenerateRequest, Generation, Sample, Sampling
from drivers.engine_models import snapshot_of
from drivers.recipe_builders import make_digit_model, make_digit_recipe
from drivers.trainer_builders import first_moments, make_batch, make_tiny_model, save_model

TEMPERATURE = 0.7
PROMPTS = tuple(tuple(range(2, 3 + idx % 7)) for idx in range(40))
"""Some are equal, and share their beginning in the engine's cache."""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), eos_token_id=None)


async def generate(model_dir: Path, *, exact: bool) -> list[Generation]:
    """Completions of uneven lengths, some longer than a tile; a few continue under a second version,
    which has other weights."""
    engine = TorchEngine(
        TorchEngineConfig(num_slots=24, max_context=160),
        snapshot_of(make_tiny_model(seed=1), model_dir),
        exact=exact,
    )

    def ask(idx: int) -> GenerateRequest:
        num = 100 if idx % 10 == 0 else 5 + idx
        sampling = Sampling(max_tokens=num, temperature=TEMPERATURE, seed=idx)
        return GenerateRequest(token_ids=PROMPTS[idx], sampling=sampling)

    try:
        running = [asyncio.create_task(engine.generate(ask(idx))) for idx in range(len(PROMPTS))]
        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await engine.load(snapshot_of(load_causal_lm(model_dir), model_dir, 1), slot="live")
        return list(await asyncio.gather(*running))
    finally:
        await engine.close()


def samples_of(generations: list[Generation]) -> list[Sample]:
    samples: list[Sample] = []
    for idx, (prompt, generation) in enumerate(zip(PROMPTS, generations, strict=True)):
        recorder = EpisodeRecorder()
        recorder.record(Speaker("actor", "actor", TEMPERATURE), 0, prompt, generation)
        (trajectory,) = recorder.trajectories({}, {})
        span = AdvantageSpan(len(prompt), len(trajectory.mask), (-1.0) ** idx)
        samples.append(
            Sample(group_id=idx // 4, episode_idx=idx, task_id="t", trajectory=trajectory, advantages=(span,))
        )
    return samples


def train(
    model_dir: Path, samples: list[Sample], *, exact: bool, checkpoint: Path | None = None
) -> dict[str, float]:
    fields = {"lr": 1e-3, "token_budget": 700, "optimizer": {"max_grad_norm": 1e9}}
    config = TrainConfig.model_validate_json(json.dumps(fields))
    learner = make_learner(config, model_dir=model_dir, exact=exact)
    result = learner.train_step(make_batch(samples, trainer_version=1))
    if checkpoint is not None:
        write = learner.save(checkpoint)
        assert write is not None
        write()
    return {item.name: item.value for item in result.metrics}


@pytest.fixture(scope="module")
def samples(model_dir: Path) -> list[Sample]:
    """Samples, some of which continue under version 1. On a busy machine, the version may arrive too late, so
    this retries."""
    for _ in range(5):
        made = samples_of(asyncio.run(generate(model_dir, exact=True)))
        if {0, 1} in [{span.version for span in sample.trajectory.versions} for sample in made]:
            return made
    pytest.fail("no completion continued under the new version in five attempts")


def test_engine_and_trainer_agree_to_the_last_bit(model_dir: Path, samples: list[Sample]) -> None:
    found = train(model_dir, samples, exact=True)
    assert found["fresh_frac"] > 0.0, "no trained token came from the newest version"
    assert found["logprob_mismatch_max"] == 0.0
    assert found["behavior_gap_max"] > 0.0, "tokens of the version before have a real gap"


@pytest.mark.parametrize(("is_engine_exact", "is_trainer_exact"), [(True, False), (False, True)])
def test_logprobs_differ_by_rounding_unless_both_sides_are_exact(
    model_dir: Path, samples: list[Sample], is_engine_exact: bool, is_trainer_exact: bool
) -> None:
    given = samples if is_engine_exact else samples_of(asyncio.run(generate(model_dir, exact=False)))
    assert 0.0 < train(model_dir, given, exact=is_trainer_exact)["logprob_mismatch_max"] < 1e-4


def test_the_gradient_is_the_usual_one(model_dir: Path, samples: list[Sample], tmp_path: Path) -> None:
    moments: list[torch.Tensor] = []
    for exact in (True, False):
        folder = tmp_path / str(exact)
        folder.mkdir()
        train(model_dir, samples, exact=exact, checkpoint=folder)
        moments.append(first_moments(folder))
    assert float((moments[0] - moments[1]).norm() / moments[1].norm()) < 1e-5


@pytest.mark.timeout(120)
async def test_a_run_with_exact_has_no_gap(tmp_path: Path) -> None:
    model = make_digit_model(tmp_path / "digits")
    recipe = make_digit_recipe(tmp_path, model, "exact=true")
    (drift,) = await measure_drift(recipe, steps=1, deadline_s=100)
    assert (drift.gap_max, drift.limit) == (0.0, 0.0)
    assert drift.num_tokens > 50
    assert drift.is_ok


def test_scores_of_the_engine_are_its_own_logprobs(model_dir: Path) -> None:
    async def scored() -> tuple[Generation, np.ndarray]:
        config = TorchEngineConfig(num_slots=2, max_context=64)
        engine = TorchEngine(config, snapshot_of(make_tiny_model(), model_dir), exact=True)
        try:
            made = await engine.generate(
                GenerateRequest(token_ids=PROMPTS[5], sampling=Sampling(max_tokens=30, temperature=1.0))
            )
            return made, await engine.score((*PROMPTS[5], *made.token_ids))
        finally:
            await engine.close()

    made, scores = asyncio.run(scored())
    assert np.array_equal(scores[len(PROMPTS[5]) - 1 :], np.array(made.logprobs, np.float32))

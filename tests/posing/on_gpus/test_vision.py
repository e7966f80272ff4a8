"""A model that reads images, on a GPU: engine and trainer agree, and the trainer's step is that of a CPU."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from astraflow.models.loading import load_causal_lm, torch_tensor
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.rollout.recorder import EpisodeRecorder, Speaker
from astraflow.rollout.renderer import load_renderer
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import AdvantageSpan, GenerateRequest, Sample, Sampling, Trajectory
from drivers.engine_models import snapshot_of
from drivers.trainer_builders import make_batch
from drivers.vision_models import make_question, picture, save_seeing_model

GPU = "cuda:4"


async def look(folder: Path) -> list[Trajectory]:
    """What an engine on a GPU says about pictures, and without one."""
    renderer = load_renderer(folder)
    config = TorchEngineConfig(num_slots=4, max_context=64, device=GPU)
    engine = TorchEngine(config, snapshot_of(load_causal_lm(folder), folder))
    recorder = EpisodeRecorder()
    for idx, uri in enumerate((picture(0), picture(1, width=40), "")):
        messages = [make_question("how many?", *filter(None, [uri]))]
        ids = renderer.render(messages)
        media = renderer.media_of(messages, ids)
        request = GenerateRequest(token_ids=ids, sampling=Sampling(max_tokens=12, seed=idx), media=media)
        speaker = Speaker("actor", f"role{idx}", 1.0)
        recorder.record(speaker, idx, ids, await engine.generate(request), media=media)
    await engine.close()
    return list(recorder.trajectories({}, {}))


def step_on(device: str, folder: Path, samples: list[Sample]) -> tuple[dict[str, float], list[Any]]:
    fields = {"lr": 1e-3, "steps": 10, "backend": {"name": "torch", "device": device}}
    config = TrainConfig.model_validate_json(msgspec.json.encode(fields))
    learner = LossLearner(config, TorchBackend(config, model_dir=folder))
    metrics = learner.train_step(make_batch(samples)).metrics
    return {item.name: item.value for item in metrics}, [torch_tensor(t) for t in learner.export()]


@pytest.mark.timeout(120)
def test_images_are_read_on_a_gpu_as_on_a_cpu(tmp_path: Path) -> None:
    folder = save_seeing_model(tmp_path / "model")
    samples = [
        Sample(
            group_id=0,
            episode_idx=idx,
            task_id="t",
            trajectory=trajectory,
            advantages=(AdvantageSpan(0, len(trajectory.mask), float(idx - 1)),),
        )
        for idx, trajectory in enumerate(asyncio.run(look(folder)))
    ]
    (on_cpu, expected), (on_gpu, found) = (step_on(device, folder, samples) for device in ("cpu", GPU))
    assert on_gpu["behavior_gap_max"] < 1e-4
    assert on_gpu["grad_norm"] == pytest.approx(on_cpu["grad_norm"], rel=1e-3)
    assert all(np.allclose(mine, theirs, atol=2e-3) for mine, theirs in zip(found, expected, strict=True))
    assert not any(torch.isnan(tensor).any() for tensor in found)

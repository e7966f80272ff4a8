"""Tenants of a shared device give up their memory between turns, and go on as if nothing had happened.

On a CPU, everything is freed.
"""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.addons.lending.tenants import make_engine_tenant, make_trainer_tenant
from astraflow.addons.lending.torch_tenants import engine_tensors, trainer_tensors
from astraflow.errors import ConfigError
from astraflow.models.loading import torch_tensor
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import GenerateRequest, Sampling
from drivers.engine_models import make_engine_on, make_model_folder, make_random_model, snapshot_of
from drivers.rank_runs import CASES
from drivers.trainer_builders import make_batch, make_samples, save_model


def num_bytes(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.mark.parametrize("kind", ["qwen3", "gptneox"])
async def test_an_engine_frees_its_cache_and_weights_and_generates_the_same_afterwards(
    tmp_path: Path, kind: str
) -> None:
    folder = make_model_folder(tmp_path, kind)
    versions = [snapshot_of(make_random_model(kind, seed=seed), folder, seed) for seed in (0, 1)]
    engine = make_engine_on(versions[0])
    await engine.load(versions[1], slot="pinned")
    requests = [
        GenerateRequest(token_ids=(5, 9, 3), sampling=Sampling(max_tokens=8, seed=seed), version=version)
        for seed, version in enumerate((0, 0, 1))
    ]
    before = await asyncio.gather(*map(engine.generate, requests))
    tenant = make_engine_tenant(engine, keep_frac=0.0)
    for _ in range(2):
        await tenant.leave()
        cache, weights = engine_tensors(engine)
        assert num_bytes(cache) == num_bytes(weights) == 0
        await tenant.enter()
        assert await asyncio.gather(*map(engine.generate, requests)) == before
    await engine.load(versions[1], slot="live")
    await engine.close()


async def test_an_engine_whose_requests_still_run_keeps_its_memory(tmp_path: Path) -> None:
    engine = make_engine_on(snapshot_of(make_random_model(), make_model_folder(tmp_path)), max_context=4096)
    request = GenerateRequest(token_ids=(5, 9), sampling=Sampling(max_tokens=400, top_k=1))
    running = asyncio.create_task(engine.generate(request))
    while not engine.capacity().num_running:  # noqa: ASYNC110 - the engine steps in a thread of its own
        await asyncio.sleep(0.001)
    tenant = make_engine_tenant(engine, keep_frac=0.0)
    await tenant.leave()
    cache, _ = engine_tensors(engine)
    assert num_bytes(cache) > 0
    await tenant.enter()
    assert len((await running).token_ids) == 400
    await engine.close()


@pytest.mark.parametrize("case", ["grpo", "lora", "critic and split groups"])
async def test_a_trainer_frees_its_weights_and_averages_and_trains_the_same_afterwards(
    tmp_path: Path, case: str
) -> None:
    folder = save_model(tmp_path)
    config = TrainConfig.model_validate({"lr": 1e-3, "steps": 10, **CASES[case]})
    alone, lending = (
        LossLearner(config, TorchBackend(config, model_dir=folder, seed=3), seed=3) for _ in range(2)
    )
    tenant = make_trainer_tenant(lending, keep_frac=0.0)
    found: list[Any] = []
    for step in range(3):
        batch = make_batch(make_samples(seed=step), step=step)
        alone.train_step(batch)
        await tenant.enter()
        lending.train_step(batch)
        found = list(lending.export())
        await tenant.leave()
        assert isinstance(lending.backend, TorchBackend)
        averages, weights = trainer_tensors(lending.backend)
        assert num_bytes(averages) == 0
        assert all(not num_bytes([weight]) for weight in weights if weight.untyped_storage().resizable())
    for mine, theirs in zip(found, alone.export(), strict=True):
        assert np.array_equal(torch_tensor(mine).float().numpy(), torch_tensor(theirs).float().numpy())


def test_a_learner_or_an_engine_that_cannot_free_its_memory_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the trainer \(object\) can't free its device"):
        make_trainer_tenant(object(), keep_frac=0.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the engine object can't free its device"):
        make_engine_tenant(object(), keep_frac=0.0)  # type: ignore[arg-type]

"""A trainer and the torch engine take turns on one GPU."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.addons.lending.tenants import make_engine_tenant, make_trainer_tenant
from astraflow.addons.lending.torch_tenants import engine_tensors
from astraflow.addons.lending.uses import find_problems, read_uses
from astraflow.models.loading import torch_tensor
from astraflow.trainer.config import TrainConfig
from astraflow.trainer.learner import LossLearner
from astraflow.trainer.torch.torch_backend import TorchBackend
from astraflow.types import GenerateRequest, Sampling
from drivers.engine_models import make_engine_on, make_model_folder, make_random_model, snapshot_of
from drivers.rank_runs import CASES
from drivers.system_driver import astraflow
from drivers.trainer_builders import make_batch, make_samples, save_model
from posing import gpus

pytestmark = pytest.mark.timeout(400)
GPU = "cuda:3"
TOTAL = 80 << 30


def test_an_engine_gives_up_its_cache_and_then_its_weights_and_generates_the_same(tmp_path: Path) -> None:
    folder = make_model_folder(tmp_path)
    requests = [
        GenerateRequest(token_ids=(5, 9, 3), sampling=Sampling(max_tokens=8, seed=seed)) for seed in range(3)
    ]

    async def play() -> None:
        engine = make_engine_on(snapshot_of(make_random_model(), folder), device=GPU)
        before = await asyncio.gather(*map(engine.generate, requests))
        cache, weights = (
            sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in group}.values())
            for group in engine_tensors(engine)
        )
        for keep_bytes, num_freed in ((weights, cache), (0, cache + weights)):
            used = gpus.used_bytes(3)
            tenant = make_engine_tenant(engine, keep_frac=keep_bytes / TOTAL)
            await tenant.leave()
            assert used - gpus.used_bytes(3) == num_freed
            await tenant.enter()
            assert await asyncio.gather(*map(engine.generate, requests)) == before
        await engine.close()

    asyncio.run(play())


@pytest.mark.parametrize("case", ["grpo", "lora", "lean optimizer, layers again", "critic and split groups"])
def test_a_trainer_gives_up_its_averages_and_then_its_weights_and_trains_the_same(
    tmp_path: Path, case: str
) -> None:
    folder = save_model(tmp_path)

    def learner() -> LossLearner:
        backend = {"name": "torch", **CASES[case].get("backend", {}), "device": GPU}
        fields = {"lr": 1e-3, "steps": 10, **CASES[case], "backend": backend}
        config = TrainConfig.model_validate_json(json.dumps(fields))
        return LossLearner(config, TorchBackend(config, model_dir=folder, seed=3), seed=3)

    async def play(keep_frac: float) -> list[Any]:
        lending = learner()
        tenant = make_trainer_tenant(lending, keep_frac=keep_frac)
        found: list[Any] = []
        for step in range(3):
            await tenant.enter()
            lending.train_step(make_batch(make_samples(seed=step), step=step))
            found = [torch_tensor(tensor).float().numpy() for tensor in lending.export()]
            used = gpus.used_bytes(3)
            await tenant.leave()
            assert (used > gpus.used_bytes(3)) is (keep_frac == 0)
        return found

    alone, lending = (asyncio.run(play(keep_frac)) for keep_frac in (1.0, 0.0))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(lending, alone, strict=True))


@pytest.mark.system
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_quickstart_trains_and_generates_in_turns_on_one_gpu(
    models: Path, tmp_path: Path, share: float
) -> None:
    """With all memory for the trainer, what the engine has is freed; with half of it, it only pauses."""
    run_dir = tmp_path / "run"
    settings = (
        *("sampling.max_tokens=8", "table.groups_per_batch=8", "table.group_size=2", "eval.sets={}"),
        *("rollout.max_episodes=16", "rollout.engine.num_slots=16", "train.steps=2"),
        f"cluster.lending.train_share={share}",
    )
    command = ("run", "recipes/quickstart-one-gpu.yaml", "--run-dir", str(run_dir))
    done = astraflow(*command, f"model={models / 'actor'}", *settings)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    audit = astraflow("audit", str(run_dir))
    assert audit.returncode == 0, audit.stdout
    assert "device of actor: " in audit.stdout
    logs = {path.stem: path.read_text() for path in (run_dir / "logs").glob("*.log")}
    assert "Traceback" not in "".join(logs.values())
    uses = read_uses(run_dir / "lending.jsonl")
    assert find_problems(uses) == []
    assert [use.use for use in uses].count("train") == 2
    assert {use.use for use in uses} >= {"train", "generate", "switch"}

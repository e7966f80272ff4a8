"""The torch engine on a GPU generates what it generates on a CPU, before and after it gets new weights."""

import asyncio
from pathlib import Path

import pytest

from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import GenerateRequest, Generation, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from drivers.engine_models import configs, make_engine_on, make_model_folder, make_random_model, snapshot_of
from drivers.rank_runs import make_experts
from posing import gpus

GPU = "cuda:3"
PROMPTS = ((5, 9, 3), (5, 9, 3), (7, 2, 8, 4, 6, 11), (4,))


async def generate_all(engine: TorchEngine, version: int = -1) -> list[Generation]:
    requests = [
        GenerateRequest(
            token_ids=prompt, sampling=Sampling(max_tokens=12, seed=seed, temperature=0.7), version=version
        )
        for seed, prompt in enumerate(PROMPTS)
    ]
    return list(await asyncio.gather(*map(engine.generate, requests)))


async def play(device: str, versions: list[WeightSnapshot]) -> list[Generation]:
    engine = make_engine_on(versions[0], device=device)
    found = await generate_all(engine)
    await engine.load(versions[1], slot="live")
    found += await generate_all(engine)
    await engine.load(versions[0], slot="pinned")
    found += await generate_all(engine, version=versions[0].version)
    found += [await engine.score((3, 4, 5, 6))]  # type: ignore[list-item]
    await engine.close()
    return found


def check_same(versions: list[WeightSnapshot]) -> None:
    on_cpu, on_gpu = (asyncio.run(play(device, versions)) for device in ("cpu", GPU))
    for mine, theirs in zip(on_gpu[:-1], on_cpu[:-1], strict=True):
        assert mine.token_ids == theirs.token_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert on_gpu[-1] == pytest.approx(on_cpu[-1], abs=1e-4)


@pytest.mark.parametrize("kind", configs())
def test_an_engine_on_a_gpu_generates_what_one_on_a_cpu_does(tmp_path: Path, kind: str) -> None:
    folder = make_model_folder(tmp_path, kind)
    check_same([snapshot_of(make_random_model(kind, seed=seed), folder, seed) for seed in (0, 1)])


def test_experts_too(tmp_path: Path) -> None:
    make_experts().save_pretrained(tmp_path)
    check_same(
        [snapshot_of(make_experts(initializer_range=size), tmp_path, v) for v, size in enumerate((0.3, 0.2))]
    )


def test_an_engine_waits_once_for_the_tokens_of_a_step_and_once_for_their_logprobs(tmp_path: Path) -> None:
    async def waits(num_tokens: int) -> int:
        engine = make_engine_on(snapshot_of(make_random_model(), folder), device=GPU)
        sampling = Sampling(max_tokens=num_tokens, seed=1)
        gpus.reset_counters()
        done = await engine.generate(GenerateRequest(token_ids=(5, 9, 3), sampling=sampling))
        await engine.close()
        found = gpus.counters()
        return found["wait:copy_to_host"] - 2 * len(done.token_ids)

    folder = make_model_folder(tmp_path)
    assert asyncio.run(waits(10)) == 0

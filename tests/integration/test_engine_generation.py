"""The torch engine end to end: what it generates, and under which version."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.errors import RolloutError, WeightsError
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import GenerateRequest, Generation, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from drivers.engine_models import (
    CHARACTERS,
    make_engine_on,
    make_model_folder,
    make_random_model,
    snapshot_of,
)

PROMPT = (5, 9, 3, 30, 12)
LONG = {"max_context": 1024, "num_slots": 8}
"""Room for completions that are still running when something else happens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without an end token, so that every completion has the length that was asked for."""
    folder = make_model_folder(tmp_path_factory.mktemp("model"))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        text = text.replace('"eos_token_id": 1', '"eos_token_id": null')
        (folder / name).write_text(text.replace('"eos_token": "<eos>",', ""))
    return folder


def snapshot(folder: Path, version: int = 0) -> WeightSnapshot:
    """Version n has the weights of seed n."""
    return snapshot_of(make_random_model(seed=version), folder, version)


def ask(prompt: tuple[int, ...] = PROMPT, *, version: int = -1, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=prompt, sampling=Sampling(**sampling), version=version)


async def pass_steps(engine: TorchEngine, count: int) -> None:
    """Returns when requests that run have advanced by at least `count` tokens: an answer of the engine's
    thread comes after a step."""
    for _ in range(count + 1):
        await engine.resume()


def worst_error(generation: Generation, prompt: tuple[int, ...], temperature: float = 1.0) -> float:
    """Largest difference to the logprobs of full forwards under the versions recorded."""
    tokens = torch.tensor([[*prompt, *generation.token_ids]])
    by_version: dict[int, torch.Tensor] = {}
    for version in set(generation.versions):
        with torch.no_grad():
            logits = make_random_model(seed=version)(tokens).logits[0, len(prompt) - 1 : -1]
        by_version[version] = torch.log_softmax(logits / temperature, -1)
    expected = [
        float(by_version[version][i, token])
        for i, (version, token) in enumerate(zip(generation.versions, generation.token_ids, strict=True))
    ]
    return float(np.abs(np.array(expected) - np.array(generation.logprobs)).max())


# --- exactness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral_window"])
async def test_greedy_output_is_that_of_generate_token_for_token(kind: str, tmp_path: Path) -> None:
    model = make_random_model(kind)
    engine = make_engine_on(snapshot_of(model, make_model_folder(tmp_path, kind)))
    rng = np.random.default_rng(0)
    prompts = [
        tuple(rng.integers(2, len(CHARACTERS), n).tolist()) for n in (1, 40, 3, 17, 17, 2, 55, 8, 30, 12, 5)
    ]
    generations = await asyncio.gather(
        *(engine.generate(ask(p, temperature=0.0, max_tokens=25)) for p in prompts)
    )
    await engine.close()
    reasons: set[str] = set()
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False)[
            0, len(prompt) :
        ]
        assert list(generation.token_ids) == expected.tolist()
        assert generation.finish_reason == ("stop" if generation.token_ids[-1] == 1 else "length")
        reasons.add(generation.finish_reason)
    assert "length" in reasons


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
async def test_logprobs_are_those_of_a_full_forward_at_the_temperature(
    folder: Path, temperature: float
) -> None:
    engine = make_engine_on(snapshot(folder))
    prompts = [PROMPT, (7,), tuple(range(2, 42))]
    requests = [
        ask(p, temperature=temperature, max_tokens=40, seed=i, top_k=9) for i, p in enumerate(prompts)
    ]
    generations = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    for prompt, generation in zip(prompts, generations, strict=True):
        assert worst_error(generation, prompt, temperature) < 1e-4
        assert generation.versions == (0,) * 40


async def test_a_first_token_follows_the_models_distribution(folder: Path) -> None:
    engine = make_engine_on(snapshot(folder), num_slots=256)
    count = 4000
    generations = await asyncio.gather(*(engine.generate(ask(max_tokens=1, seed=i)) for i in range(count)))
    await engine.close()
    with torch.no_grad():
        probs = torch.softmax(make_random_model()(torch.tensor([PROMPT])).logits[0, -1], -1)
    observed = torch.bincount(torch.tensor([g.token_ids[0] for g in generations]), minlength=len(probs))
    frequent = probs * count >= 5
    expected = torch.cat((probs[frequent], probs[~frequent].sum()[None])) * count
    found = torch.cat((observed[frequent], observed[~frequent].sum()[None]))
    degrees = len(expected) - 1
    assert float(((found - expected) ** 2 / expected).sum()) < degrees + 4.5 * (2 * degrees) ** 0.5


async def test_the_seed_decides_whatever_else_runs(folder: Path) -> None:
    engine = make_engine_on(snapshot(folder))
    alone = await engine.generate(ask(max_tokens=30, seed=7))
    others = [ask((4, i + 2), max_tokens=5 * i + 1, seed=i, temperature=0.5, top_p=0.9) for i in range(15)]
    crowd = asyncio.gather(*map(engine.generate, others))
    again = await engine.generate(ask(max_tokens=30, seed=7))
    other_seed = await engine.generate(ask(max_tokens=30, seed=8))
    await crowd
    await engine.close()
    assert again.token_ids == alone.token_ids
    assert other_seed.token_ids != alone.token_ids


async def test_a_stop_text_ends_a_completion_and_stays_in_it(folder: Path) -> None:
    engine = make_engine_on(snapshot(folder))
    free = await engine.generate(ask(max_tokens=40, seed=2))
    text = "".join(CHARACTERS[i] for i in free.token_ids)
    stop = text[10:13]
    stopped = await engine.generate(ask(max_tokens=40, seed=2, stop=("<none>", stop)))
    await engine.close()
    assert stopped.finish_reason == "stop"
    assert "".join(CHARACTERS[i] for i in stopped.token_ids) == text[: text.index(stop) + len(stop)]


# --- versions -------------------------------------------------------------------------------------


async def test_running_requests_go_on_with_a_new_version_and_lose_nothing(folder: Path) -> None:
    engine = make_engine_on(snapshot(folder), **LONG)
    prompts = [PROMPT, PROMPT, (4,), tuple(range(2, 40))]
    running = [
        asyncio.create_task(engine.generate(ask(p, max_tokens=400, seed=i))) for i, p in enumerate(prompts)
    ]
    await pass_steps(engine, 5)
    await engine.load(snapshot(folder, 3), slot="live")
    await pass_steps(engine, 5)
    await engine.load(snapshot(folder, 4), slot="live")
    generations = await asyncio.gather(*running)
    after = await engine.generate(ask(max_tokens=3))
    await engine.close()
    assert after.versions == (4, 4, 4)
    for prompt, generation in zip(prompts, generations, strict=True):
        assert set(generation.versions) == {0, 3, 4}
        assert sorted(generation.versions) == list(generation.versions)
        assert len(generation.token_ids) == len(generation.logprobs) == len(generation.versions) == 400
        assert worst_error(generation, prompt) < 1e-4


async def test_a_pinned_version_serves_evaluation_while_live_moves_on(folder: Path) -> None:
    engine = make_engine_on(snapshot(folder), **LONG)
    await engine.load(snapshot(folder, 1), slot="pinned")
    evaluation = asyncio.create_task(engine.generate(ask(max_tokens=300, version=1, seed=1)))
    training = asyncio.create_task(engine.generate(ask(max_tokens=300, seed=1)))
    await pass_steps(engine, 3)
    await engine.load(snapshot(folder, 2), slot="live")
    pinned, live = await evaluation, await training
    await engine.close()
    assert set(pinned.versions) == {1}
    assert set(live.versions) == {0, 2}
    assert worst_error(pinned, PROMPT) < 1e-4


@pytest.mark.parametrize("slot", ["live", "pinned"])
async def test_a_slot_waits_for_requests_of_exactly_its_version(folder: Path, slot: str) -> None:
    engine = make_engine_on(snapshot(folder), **LONG)
    if slot == "pinned":
        await engine.load(snapshot(folder, 1), slot="pinned")
    version = 1 if slot == "pinned" else 0
    held = asyncio.create_task(engine.generate(ask(max_tokens=500, version=version)))
    await pass_steps(engine, 2)
    change = asyncio.create_task(engine.load(snapshot(folder, 5), slot=slot))
    follower = asyncio.create_task(engine.generate(ask(max_tokens=300)))
    await held
    await change
    await follower
    assert set(held.result().versions) == {version}
    assert (await engine.generate(ask(max_tokens=2, version=5))).versions == (5, 5)
    await engine.close()


async def test_a_version_in_no_slot_is_refused_and_may_be_retried(folder: Path) -> None:
    engine = make_engine_on(snapshot(folder))
    with pytest.raises(RolloutError, match=r"version 9 of 'actor' .* version 0") as caught:
        await engine.generate(ask(version=9))
    assert caught.value.is_retryable
    await engine.close()


async def test_a_bad_update_is_refused_and_the_old_version_keeps_serving(folder: Path) -> None:
    engine = make_engine_on(snapshot(folder), **LONG)
    before = await engine.generate(ask(max_tokens=20, seed=3))
    running = asyncio.create_task(engine.generate(ask(max_tokens=300, seed=4)))
    bad = make_random_model(seed=1)
    with torch.no_grad():
        bad.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(WeightsError, match=r"layers\.1\.mlp\.down_proj\.weight .*1 .*not finite"):
        await engine.load(snapshot_of(bad, folder, 1), slot="live")
    with pytest.raises(WeightsError, match="do not fit the model"):
        await engine.load(snapshot_of(make_random_model("llama"), folder, 1), slot="pinned")
    torn = snapshot(folder, 1)
    with pytest.raises(WeightsError, match="missing"):
        await engine.load(WeightSnapshot("actor", 1, torn.tensors[:-1], folder), slot="live")
    with pytest.raises(WeightsError, match="was given to the engine of 'actor'"):
        await engine.load(WeightSnapshot("critic", 1, torn.tensors, folder), slot="live")
    with pytest.raises(WeightsError, match="slot 'shadow' does not exist"):
        await engine.load(torn, slot="shadow")
    assert set((await running).versions) == {0}
    assert await engine.generate(ask(max_tokens=20, seed=3)) == before
    await engine.close()


async def test_scores_follow_the_newest_version(folder: Path) -> None:
    engine = make_engine_on(snapshot(folder))
    tokens = tuple(range(2, 40))
    for version in (0, 6):
        await engine.load(snapshot(folder, version), slot="live")
        scores = await engine.score(tokens)
        with torch.no_grad():
            logprobs = torch.log_softmax(
                make_random_model(seed=version)(torch.tensor([tokens])).logits[0], -1
            )
        expected = logprobs[:-1].gather(1, torch.tensor(tokens)[1:, None])[:, 0]
        assert np.abs(scores - expected.numpy()).max() < 1e-5
        top = await engine.score_top(tokens, 4)
        assert top.top_ids.tolist() == logprobs[:-1].topk(4).indices.tolist()
        assert np.abs(top.top_logprobs - logprobs[:-1].topk(4).values.numpy()).max() < 1e-5
    with pytest.raises(RolloutError, match=r"the 1000 most likely of \d+ tokens"):
        await engine.score_top(tokens, 1000)
    await engine.close()

"""One engine for several adapters: each request is computed as by its own policy's merged model."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.addons.lora.engine import AdapterEngine, AdapterView
from astraflow.errors import RolloutError, WeightsError
from astraflow.models.adapters import is_adapter, merge_adapters, peft_names
from astraflow.models.loading import empty_causal_lm, export_tensors, install_tensors
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines import pages
from astraflow.types import GenerateRequest, Generation, Sampling
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from drivers.engine_models import make_model_folder, make_random_model

PROMPT = tuple(range(2, 30))
TOLERANCE = 1e-5
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GENERIC = {"gptneox": ("query_key_value", "dense_4h_to_h")}


@pytest.fixture(autouse=True)
def kept_however_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the short sequences of these tests be kept."""
    monkeypatch.setattr(pages, "LEAST_KEPT", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("model"))


def make_factors(
    base: Sequence[HostTensor], *, seed: int, rank: int = 4, targets: Sequence[str] = ALL
) -> tuple[HostTensor, ...]:
    """An adapter that changes logprobs by far more than the tolerance."""
    random = np.random.default_rng(seed)
    factors: list[HostTensor] = []
    for weight in base:
        if weight.name.endswith(".weight") and weight.name.split(".")[-2] in targets:
            height, width = weight.shape
            for name, shape in zip(peft_names(weight.name), ((rank, width), (height, rank)), strict=True):
                values = 0.1 * random.normal(size=shape).astype("<f4")
                factors.append(HostTensor(name, shape, "float32", values.reshape(-1).view(np.uint8)))
    return tuple(factors)


class Bench:
    """An engine, its views, and the plain models that they stand for."""

    def __init__(self, folder: Path, kind: str = "qwen3", **settings: Any) -> None:
        self.folder = folder
        self.base = export_tensors(make_random_model(kind))
        config = TorchEngineConfig(**{"num_slots": 8, "max_context": 96, **settings})
        self.engine = AdapterEngine(config, self.snapshot("base", 0, ()))
        self.engine.lanes.live.lane._is_stop[:] = False  # all requests run as long as they may
        self.views: dict[str, AdapterView] = {}

    def snapshot(self, policy: str, version: int, factors: Sequence[HostTensor]) -> WeightSnapshot:
        tensors = (*self.base, *factors)
        return WeightSnapshot(policy, version, tensors, self.folder, base="base-1")

    async def load(self, policy: str, version: int, *, slot: str = "live", **factors: Any) -> WeightSnapshot:
        snapshot = self.snapshot(policy, version, make_factors(self.base, **factors))
        if policy not in self.views:
            self.views[policy] = AdapterView(self.engine, policy)
        await self.views[policy].load(snapshot, slot=slot)
        return snapshot

    async def generate(self, policy: str, prompt: tuple[int, ...] = PROMPT, **settings: Any) -> Generation:
        version = settings.pop("version", -1)
        sampling = Sampling(**{"max_tokens": 12, "seed": 7, **settings})
        request = GenerateRequest(token_ids=prompt, sampling=sampling, version=version)
        return await self.views[policy].generate(request)

    async def begin(self, *policies: str, **settings: Any) -> list[asyncio.Task[Generation]]:
        """Starts a request of each policy, and pauses the engine after a few steps."""
        await self.engine.pause()
        tasks = [asyncio.create_task(self.generate(policy, **settings)) for policy in policies]
        await asyncio.sleep(0)
        await self.engine.resume()
        await self.engine.pause()
        return tasks

    def error(
        self,
        generation: Generation,
        snapshots: Mapping[int, WeightSnapshot],
        prompt: tuple[int, ...] = PROMPT,
    ) -> float:
        """Largest difference from a full forward of the merged model of each token's own version."""
        tokens = (*prompt, *generation.token_ids)
        own = {version: logprobs(snapshot, tokens) for version, snapshot in snapshots.items()}
        start = len(prompt) - 1
        pairs = zip(generation.versions, generation.logprobs, strict=True)
        return max(abs(own[version][start + at] - found) for at, (version, found) in enumerate(pairs))


@torch.inference_mode()
def logprobs(snapshot: WeightSnapshot, tokens: Sequence[int]) -> Sequence[float]:
    """Logprobs of tokens 1..T-1 by transformers' own code, with the adapters merged into the weights."""
    model = empty_causal_lm(snapshot.model_dir)
    install_tensors(model, merge_adapters(snapshot.tensors))
    ids = torch.tensor(tokens)[None]
    every = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)
    return every[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()


@pytest.fixture
async def bench(folder: Path) -> AsyncIterator[Bench]:
    bench = Bench(folder)
    yield bench
    for view in bench.views.values():
        await view.close()


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama", "mistral_window", "gptneox"])
async def test_a_mixed_batch_has_the_logprobs_of_each_policys_merged_model(tmp_path: Path, kind: str) -> None:
    """Lean and generic, with tied and untied embeddings, biases, other targets and other ranks."""
    bench = Bench(make_model_folder(tmp_path / "model", kind), kind)
    targets = GENERIC.get(kind, ALL)
    adapters = {"a": (4, targets), "b": (7, targets[:1]), "c": (2, targets[1:])}
    own = {
        policy: await bench.load(policy, 3, seed=seed, rank=rank, targets=some)
        for seed, (policy, (rank, some)) in enumerate(adapters.items())
    }
    prompts = {"a": PROMPT, "b": PROMPT, "c": PROMPT[:9]}
    found = await asyncio.gather(*(bench.generate(p, prompts[p], seed=s) for p in own for s in range(2)))
    for policy, generation in zip((p for p in own for _ in range(2)), found, strict=True):
        assert set(generation.versions) == {3}
        assert bench.error(generation, {3: own[policy]}, prompts[policy]) < TOLERANCE
    tokens = (*PROMPT, *found[0].token_ids)
    assert abs(np.subtract(logprobs(own["a"], tokens), logprobs(own["b"], tokens))).max() > 1000 * TOLERANCE
    for policy, snapshot in own.items():
        scored = await bench.views[policy].score(PROMPT)
        assert np.allclose(scored, logprobs(snapshot, PROMPT), atol=TOLERANCE)
        given, _, likely = await bench.views[policy].score_top(PROMPT, 2)
        assert np.allclose(given, scored, atol=TOLERANCE)
        assert (likely[:, 0] >= scored - TOLERANCE).all()
    for view in bench.views.values():
        await view.close()


async def test_bfloat16_stays_as_close_to_the_merged_model_as_its_rounding(tmp_path: Path) -> None:
    bench = Bench(make_model_folder(tmp_path / "model"), dtype="bfloat16")
    own = {policy: await bench.load(policy, 1, seed=seed) for seed, policy in enumerate("ab")}
    for policy, found in zip(own, await asyncio.gather(*map(bench.generate, own)), strict=True):
        assert bench.error(found, {1: own[policy]}) < 0.15
    for view in bench.views.values():
        await view.close()


async def test_a_view_without_a_version_generates_nothing(bench: Bench) -> None:
    await bench.load("a", 1, seed=1)
    bench.views["b"] = AdapterView(bench.engine, "b")
    with pytest.raises(RolloutError, match="of 'b' is in no slot"):
        await bench.generate("b")


async def test_an_update_of_one_adapter_changes_nothing_for_the_others(bench: Bench) -> None:
    old = await bench.load("a", 1, seed=1)
    other = await bench.load("b", 5, seed=2)
    running = await bench.begin("a", "b", max_tokens=60)
    new = await bench.load("a", 2, seed=3, rank=6)
    await bench.engine.resume()
    updated, kept = await asyncio.gather(*running)
    assert set(updated.versions) == {1, 2}
    assert set(kept.versions) == {5}
    assert bench.error(updated, {1: old, 2: new}) < TOLERANCE
    assert bench.error(kept, {5: other}) < TOLERANCE
    again = await bench.generate("b", max_tokens=60)
    assert again.token_ids == kept.token_ids


async def test_a_prefix_is_found_only_within_its_adapter_and_version(bench: Bench) -> None:
    snapshots = {"a": await bench.load("a", 1, seed=1), "b": await bench.load("b", 1, seed=2)}
    lane = bench.engine.lanes.live.lane
    longer = (*PROMPT, *PROMPT[:10])

    async def found(policy: str) -> int:
        """Number of a prompt's tokens whose keys and values are known."""
        number = bench.engine.adapters._numbers[f"{bench.views[policy].name}/live"]
        return await bench.engine.call(lambda: lane._pages.find(longer, number)[1])

    await bench.generate("a")
    assert await found("a") >= len(PROMPT) - 1
    assert await found("b") == 0
    assert bench.error(await bench.generate("b", longer), {1: snapshots["b"]}, longer) < TOLERANCE
    assert bench.error(await bench.generate("a", longer), {1: snapshots["a"]}, longer) < TOLERANCE
    newer = await bench.load("a", 2, seed=3)
    assert await found("a") == 0
    assert await found("b") >= len(PROMPT) - 1
    assert bench.error(await bench.generate("a", longer), {2: newer}, longer) < TOLERANCE


async def test_a_pinned_version_is_one_more_adapter(bench: Bench) -> None:
    pinned = await bench.load("a", 1, seed=1)
    await bench.load("b", 9, seed=2)
    await bench.load("a", 1, slot="pinned", seed=1)
    live = await bench.load("a", 2, seed=3)
    one, two = await asyncio.gather(bench.generate("a", version=1), bench.generate("a"))
    assert (set(one.versions), set(two.versions)) == ({1}, {2})
    assert bench.error(one, {1: pinned}) < TOLERANCE
    assert bench.error(two, {2: live}) < TOLERANCE
    with pytest.raises(RolloutError, match=r"version 9 of 'a' is in no slot: live is version 2, pinned is"):
        await bench.generate("a", version=9)
    (held,) = await bench.begin("a", version=1, max_tokens=40)
    loading = asyncio.create_task(bench.load("a", 3, slot="pinned", seed=4))
    await bench.engine.resume()
    await loading  # waits for the request that needs version 1
    assert held.done()
    assert set((await held).versions) == {1}


async def test_adapters_that_do_not_fit_are_refused_and_the_old_version_goes_on(bench: Bench) -> None:
    own = await bench.load("a", 1, seed=1)
    view = bench.views["a"]
    factors = make_factors(bench.base, seed=2)
    fits = bench.snapshot("a", 2, factors)
    renamed = [replace(t, name=t.name.replace("q_proj", "qq_proj")) for t in factors]
    first = factors[0]
    flipped = replace(first, shape=first.shape[::-1])
    broken = replace(first, data=np.full(first.data.nbytes // 4, np.nan, "<f4").view(np.uint8))
    for bad, said in (
        (replace(fits, base="base-2"), "an adapter of base-2, but the engine has base-1"),
        (replace(fits, base=""), "an adapter of no known base"),
        (bench.snapshot("a", 2, renamed), "no linear layer of the base"),
        (bench.snapshot("a", 2, factors[1:]), r"expected \[r, 32\] and"),
        (bench.snapshot("a", 2, (flipped, *factors[1:])), r"expected \[r, 32\] and"),
        (bench.snapshot("a", 2, (broken, *factors[1:])), "not finite"),
        (bench.snapshot("b", 2, factors), "was given to the engine of 'a'"),
    ):
        with pytest.raises(WeightsError, match=said):
            await view.load(bad, slot="live")
    assert bench.error(await bench.generate("a"), {1: own}) < TOLERANCE


async def test_one_view_closes_alone_and_the_last_one_ends_the_engine(bench: Bench) -> None:
    await bench.load("a", 1, seed=1)
    other = await bench.load("b", 1, seed=2)
    running = await bench.begin("a", "b", max_tokens=60)
    waiting = asyncio.create_task(bench.generate("a"))
    await asyncio.sleep(0)
    await bench.views.pop("a").close()
    for ended in (running[0], waiting):
        with pytest.raises(RolloutError, match="the engine of 'a' was closed"):
            await ended
    assert bench.error(await running[1], {1: other}) < TOLERANCE
    third = await bench.load("c", 4, seed=5)  # gets the free adapter
    assert bench.engine.adapters.adapters.num == 2
    assert bench.error(await bench.generate("b"), {1: other}) < TOLERANCE
    assert bench.error(await bench.generate("c"), {4: third}) < TOLERANCE
    for policy in ("b", "c"):
        await bench.views.pop(policy).close()
    with pytest.raises(RolloutError, match="was closed"):
        await bench.engine.call(lambda: None)


async def test_a_pause_stops_all_until_no_view_is_paused_and_loads_count_once(bench: Bench) -> None:
    for seed, policy in enumerate("ab"):
        await bench.load(policy, 1, seed=seed)
        await bench.views[policy].pause()
    task = asyncio.create_task(bench.generate("a"))
    await bench.views["a"].resume()
    await asyncio.sleep(0.05)
    assert not task.done()
    assert [view.capacity().num_running + view.capacity().num_waiting for view in bench.views.values()] == [
        1,
        0,
    ]
    await bench.views["b"].resume()
    num = len((await task).token_ids)
    assert [view.capacity().generated_tokens for view in bench.views.values()] == [num, 0]
    assert {view.capacity().num_slots for view in bench.views.values()} == {8}


def test_the_base_alone_is_built_from_a_snapshot(folder: Path) -> None:
    base = export_tensors(make_random_model())
    snapshot = WeightSnapshot("a", 0, (*base, *make_factors(base, seed=1)), folder, base="base-1")
    assert any(is_adapter(tensor.name) for tensor in snapshot.tensors)
    engine = AdapterEngine(TorchEngineConfig(num_slots=2, max_context=96), snapshot)
    found = export_tensors(engine.lanes.live.model)
    expected = {tensor.name: tensor.data.tobytes() for tensor in base}
    assert {tensor.name: tensor.data.tobytes() for tensor in found} == expected
    asyncio.run(engine.close())

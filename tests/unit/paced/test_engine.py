"""The engine without a model: what it says is random, what it promises is kept."""

import asyncio
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from astraflow.errors import DataError, RolloutError, ServiceError, WeightsError
from astraflow.protocols import Engine
from astraflow.rollout.engines.factory import engine_maker
from astraflow.types import GenerateRequest, Generation, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from astraflow_paced.config import PacedEngineConfig
from astraflow_paced.emulated_device import PacedJob
from astraflow_paced.engine import PacedClock, PacedEngine
from drivers.virtual_loop import run_virtual

STOP, ADDED = 3, 5
FOREVER_S = 1e9
"""Emulated seconds that no test outlasts."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 20, "eos_token_id": STOP}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": ADDED, "content": "<x>"}]}))
    return tmp_path


@pytest.fixture
def snapshot(folder: Path) -> WeightSnapshot:
    return WeightSnapshot("actor", 0, (), folder)


def version(snapshot: WeightSnapshot, number: int, policy: str = "actor") -> WeightSnapshot:
    return WeightSnapshot(policy, number, (), snapshot.model_dir)


def config(**changes: float) -> PacedEngineConfig:
    fields = {"num_slots": 4, "tokens_per_s": 1e5, "mean_tokens": 40.0, "sigma": 1.0, "max_context": 4096}
    return PacedEngineConfig(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def slow(**changes: float) -> PacedEngineConfig:
    """No request ends by itself."""
    return config(tokens_per_s=1 / FOREVER_S, **changes)


def request(seed: int = 1, *, max_tokens: int = 4000, version: int = -1) -> GenerateRequest:
    return GenerateRequest(
        token_ids=(1, 2), sampling=Sampling(max_tokens=max_tokens, seed=seed), version=version
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - a few turns of the event loop
        await asyncio.sleep(0)


async def test_a_seed_decides_the_tokens_and_their_number(snapshot: WeightSnapshot) -> None:
    engine = engine_maker(config())(snapshot)
    first, other = await asyncio.gather(engine.generate(request(1)), engine.generate(request(2)))
    assert await engine.generate(request(1)) == first
    assert first.token_ids != other.token_ids
    assert first.finish_reason == "stop"
    assert first.token_ids[-1] == STOP
    assert not {STOP, ADDED} & set(first.token_ids[:-1])
    assert len(first.logprobs) == len(first.versions) == len(first.token_ids)
    assert max(first.logprobs) < 0


async def test_lengths_are_log_normal_with_the_mean_of_the_recipe(snapshot: WeightSnapshot) -> None:
    engine = engine_maker(config(num_slots=4000, tokens_per_s=1e7, mean_tokens=200.0, sigma=0.8))(snapshot)
    found = await asyncio.gather(*(engine.generate(request(seed)) for seed in range(4000)))
    lengths = np.array([len(generation.token_ids) for generation in found])
    assert lengths.mean() == pytest.approx(200, rel=0.06)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.06)


async def test_a_longer_completion_is_cut_and_says_so(snapshot: WeightSnapshot) -> None:
    engine = engine_maker(config(sigma=0.0, mean_tokens=40.0))(snapshot)
    cut = await engine.generate(request(max_tokens=39))
    assert (len(cut.token_ids), cut.finish_reason) == (39, "length")
    assert STOP not in cut.token_ids
    whole = await engine.generate(request(max_tokens=40))
    assert (len(whole.token_ids), whole.finish_reason) == (40, "stop")


def test_tokens_carry_the_version_that_was_live_when_they_came(snapshot: WeightSnapshot) -> None:
    async def main() -> tuple[int, ...]:
        engine = engine_maker(config(tokens_per_s=10.0, time_scale=2.0, sigma=0.0, mean_tokens=100.0))(
            snapshot
        )
        running = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(1.0)
        await engine.load(version(snapshot, 1), slot="live")
        await asyncio.sleep(1.525)
        await engine.load(version(snapshot, 3), slot="live")
        return (await running).versions

    versions = run_virtual(main())
    assert [versions.count(number) for number in (0, 1, 3)] == [20, 30, 50]
    assert list(versions) == sorted(versions)


def test_an_update_takes_its_time_and_loses_no_token(snapshot: WeightSnapshot) -> None:
    async def main() -> float:
        fields = {
            "tokens_per_s": 10.0,
            "time_scale": 2.0,
            "sigma": 0.0,
            "mean_tokens": 100.0,
            "update_s": 3.0,
        }
        engine = engine_maker(config(**fields))(snapshot)
        running = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(1.0)
        await engine.load(version(snapshot, 1), slot="live")
        assert len((await running).token_ids) == 100
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(5.0 + 1.5, abs=0.01)


async def test_an_exact_version_is_served_from_the_slot_that_has_it(snapshot: WeightSnapshot) -> None:
    engine = engine_maker(config())(snapshot)
    await engine.load(version(snapshot, 7), slot="pinned")
    await engine.load(version(snapshot, 9), slot="live")
    assert set((await engine.generate(request(version=7))).versions) == {7}
    with pytest.raises(RolloutError, match="version 8 of 'actor' is in no slot"):
        await engine.generate(request(version=8))


async def test_a_paused_engine_stands_still_until_it_is_resumed(snapshot: WeightSnapshot) -> None:
    engine = engine_maker(config())(snapshot)
    await engine.pause()
    await engine.pause()
    running = asyncio.create_task(engine.generate(request()))
    await until(lambda: engine.capacity().num_running == 1)
    await engine.load(version(snapshot, 1), slot="live")
    for _ in range(100):
        await asyncio.sleep(0)
    assert not running.done()
    assert engine.take_spans() == ()
    await engine.resume()
    assert set((await running).versions) == {1}
    assert engine.take_spans() != ()
    assert engine.capacity().generated_tokens == len((await running).token_ids)


async def test_policies_of_a_service_share_its_slots(snapshot: WeightSnapshot) -> None:
    make = engine_maker(slow(num_slots=3))
    engines: list[Engine] = [make(snapshot), make(version(snapshot, 0, "judge"))]
    tasks = [asyncio.create_task(engine.generate(request(seed))) for seed in range(2) for engine in engines]
    await until(lambda: sum(engine.capacity().num_waiting for engine in engines) == 1)
    assert sum(engine.capacity().num_running for engine in engines) == 3
    for engine in engines:
        await engine.close()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, RolloutError)
        assert outcome.is_retryable


async def test_a_given_up_request_frees_its_slot(snapshot: WeightSnapshot) -> None:
    engine = engine_maker(slow(num_slots=1))(snapshot)
    first, second = (asyncio.create_task(engine.generate(request(seed))) for seed in (1, 2))
    await until(lambda: engine.capacity().num_waiting == 1)
    first.cancel()
    await until(lambda: engine.capacity().num_waiting == 0)
    assert engine.capacity().num_running == 1
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert engine.capacity().num_running == 0


async def test_what_it_cannot_do_is_refused(snapshot: WeightSnapshot, tmp_path: Path) -> None:
    engine = engine_maker(config(max_context=2))(snapshot)
    with pytest.raises(RolloutError, match=r"fewer than rollout.engine.max_context = 2"):
        await engine.generate(request())
    with pytest.raises(RolloutError, match="does not support stop texts"):
        await engine.generate(GenerateRequest(token_ids=(1,), sampling=Sampling(stop=("x",))))
    with pytest.raises(WeightsError, match="given to the engine of 'actor'"):
        await engine.load(version(snapshot, 1, "judge"), slot="live")
    with pytest.raises(WeightsError, match="does not exist"):
        await engine.load(version(snapshot, 1), slot="third")
    with pytest.raises(DataError, match=r"nothing.config.json cannot be read"):
        engine_maker(config())(WeightSnapshot("actor", 0, (), tmp_path / "nothing"))
    assert math.isfinite((await engine.score((1, 2, 3))).sum())
    assert (await engine.score((1,))).size == 0


async def test_it_warns_that_it_is_no_model(
    snapshot: WeightSnapshot, caplog: pytest.LogCaptureFixture
) -> None:
    engine_maker(config(time_scale=20.0))(snapshot)
    assert "EMULATED: policy actor has no model here" in caplog.text
    assert "20 times faster" in caplog.text


async def test_a_device_whose_timer_fails_fails_all_requests_and_says_why(snapshot: WeightSnapshot) -> None:
    def bug() -> None:
        raise ZeroDivisionError("a bug")

    clock = PacedClock(config(tokens_per_s=100.0, time_scale=1000.0, sigma=0.0, mean_tokens=4000.0))
    engine = PacedEngine(snapshot, clock)
    running = asyncio.create_task(engine.generate(request()))
    await until(lambda: engine.capacity().num_running == 1)
    clock.device.submit(PacedJob("actor", 1, 0.0, ended=bug))
    clock.settle()
    with pytest.raises(RolloutError, match="device failed: ZeroDivisionError: a bug"):
        await running
    with pytest.raises(RolloutError, match="the paced device failed"):
        await engine.generate(request())
    with pytest.raises(ServiceError, match=r"the paced device failed.*started again"):
        engine.capacity()
    await engine.close()


# --- completions in parts -------------------------------------------------------------------------


async def cut(engine: Engine, asked: GenerateRequest, *, when: Callable[[], bool]) -> Generation:
    """The beginning of a completion whose caller is cancelled."""
    task = asyncio.create_task(engine.generate(asked))
    await until(when)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    (begun,) = caught.value.args
    assert isinstance(begun, Generation)
    return begun


async def test_a_cancelled_request_tells_what_it_has_sampled(snapshot: WeightSnapshot) -> None:
    clock = PacedClock(config(tokens_per_s=2000.0, mean_tokens=1000.0, sigma=0.0))
    engine = PacedEngine(snapshot, clock)
    begun_s = asyncio.get_running_loop().time()
    begun = await cut(engine, request(), when=lambda: asyncio.get_running_loop().time() > begun_s + 0.05)
    num = len(begun.token_ids)
    assert 90 <= num < 1000
    assert (begun.finish_reason, len(begun.logprobs), set(begun.versions)) == ("abort", num, {0})
    assert engine.capacity().generated_tokens == num
    rest = GenerateRequest(
        token_ids=(1, 2, *begun.token_ids), sampling=Sampling(max_tokens=4000 - num, seed=2), num_begun=num
    )
    assert num + len((await engine.generate(rest)).token_ids) == 1000


async def test_a_request_that_is_cancelled_before_its_first_token_tells_nothing(
    snapshot: WeightSnapshot,
) -> None:
    engine = PacedEngine(snapshot, PacedClock(slow()))
    task = asyncio.create_task(engine.generate(request()))
    await until(lambda: engine.capacity().num_running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert not any(isinstance(each, Generation) for each in caught.value.args)


async def test_completions_in_two_parts_are_as_long_as_whole_ones(snapshot: WeightSnapshot) -> None:
    engine = engine_maker(config(num_slots=4000, tokens_per_s=1e7, mean_tokens=200.0, sigma=0.8))(snapshot)

    async def length(seed: int) -> int:
        """Of a completion that is cut at 150 tokens, if it gets that far."""
        num = len((await engine.generate(request(seed))).token_ids)
        if num <= 150:
            return num
        rest = GenerateRequest(
            token_ids=(1,) * 152, sampling=Sampling(max_tokens=3850, seed=seed + 10_000), num_begun=150
        )
        return 150 + len((await engine.generate(rest)).token_ids)

    lengths = np.array(await asyncio.gather(*(length(seed) for seed in range(4000))))
    assert lengths.mean() == pytest.approx(200, rel=0.06)
    assert np.log(lengths).std() == pytest.approx(0.8, rel=0.06)

"""The torch engine's bounds, pauses, failures and end."""

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.errors import RolloutError, ServiceError
from astraflow.rollout.engine_config import TorchEngineConfig
from astraflow.rollout.engines.torch_engine import TorchEngine
from astraflow.types import GenerateRequest, Sampling
from astraflow.types.host_tensors import WeightSnapshot
from drivers.engine_models import (
    CHARACTERS,
    make_engine_on,
    make_model_folder,
    make_random_model,
    snapshot_of,
)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> WeightSnapshot:
    return snapshot_of(make_random_model(), make_model_folder(tmp_path_factory.mktemp("model")))


def ask(prompt: tuple[int, ...] = (5, 9, 3), **sampling: Any) -> GenerateRequest:
    return GenerateRequest(token_ids=prompt, sampling=Sampling(**sampling))


def long_ask(seed: int = 0) -> GenerateRequest:
    """Runs for hundreds of steps: with one token to choose from, the end token never comes."""
    return ask((5, 9, 3), max_tokens=4000, top_k=1, seed=seed)


class Breaking(int):
    """A seed that raises in the thread, as a bug in a step would."""

    error: BaseException

    def __and__(self, other: int) -> int:
        raise self.error


def breaking(error: BaseException) -> Breaking:
    seed = Breaking(1)
    seed.error = error
    return seed


async def all_running(engine: TorchEngine, count: int) -> None:
    """Returns once this many requests run."""
    async with asyncio.timeout(10.0):
        while engine.capacity().num_running < count:  # noqa: ASYNC110 - the engine steps in a thread of its own
            await asyncio.sleep(0.001)


async def test_a_prompt_that_leaves_no_room_is_refused_with_numbers(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, max_context=16)
    with pytest.raises(RolloutError, match=r"16 tokens .*max_context = 16") as caught:
        await engine.generate(ask(tuple(range(2, 18))))
    assert not caught.value.is_retryable
    with pytest.raises(RolloutError, match="17 tokens leave no room"):
        await engine.score(tuple(range(2, 19)))
    await engine.close()


async def test_a_completion_is_capped_at_the_context(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, max_context=16)
    for length in (1, 15):
        generation = await engine.generate(ask((4,) * length, max_tokens=100, top_k=1))
        assert generation.finish_reason == "length"
        assert len(generation.token_ids) == 16 - length
    await engine.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(()), "has no tokens"),
        (ask((3, 43)), "token id 43 is outside the vocabulary of 43"),
        (ask((3, -1)), "token id -1 is outside"),
        (ask(temperature=-1.0), "temperature = -1.0"),
    ],
)
async def test_a_request_at_fault_is_refused_for_good(
    snapshot: WeightSnapshot, request_: GenerateRequest, message: str
) -> None:
    engine = make_engine_on(snapshot)
    with pytest.raises(RolloutError, match=message) as caught:
        await engine.generate(request_)
    assert not caught.value.is_retryable
    assert len((await engine.generate(ask(max_tokens=2))).token_ids) > 0
    await engine.close()


async def test_stop_texts_without_a_tokenizer_are_refused(snapshot: WeightSnapshot, tmp_path: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((snapshot.model_dir / name).read_bytes())
    engine = make_engine_on(WeightSnapshot("actor", 0, snapshot.tensors, tmp_path))
    with pytest.raises(RolloutError, match="stop texts need a tokenizer"):
        await engine.generate(ask(stop=("x",)))
    await engine.close()


async def test_a_pause_stops_stepping_and_keeps_requests(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, max_context=512)
    running = asyncio.create_task(engine.generate(long_ask()))
    await all_running(engine, 1)
    await engine.pause()
    first = engine.capacity()
    await engine.pause()
    second = engine.capacity()
    assert first.generated_tokens == second.generated_tokens
    assert (second.num_running, second.num_waiting) == (1, 0)
    await engine.resume()
    assert len((await running).token_ids) == 509
    await engine.close()


async def test_capacity_counts_what_runs_and_what_waits(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, num_slots=2, max_context=512)
    tasks = [asyncio.create_task(engine.generate(long_ask(i))) for i in range(5)]
    await all_running(engine, 2)
    await engine.pause()
    capacity = engine.capacity()
    assert (capacity.num_slots, capacity.num_running, capacity.num_waiting) == (2, 2, 3)
    assert capacity.max_context == 512
    await engine.resume()
    done = await asyncio.gather(*tasks)
    capacity = engine.capacity()
    assert (capacity.num_running, capacity.num_waiting) == (0, 0)
    assert capacity.generated_tokens == sum(len(g.token_ids) for g in done)
    await engine.close()


async def test_a_cancelled_request_frees_its_slot(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, num_slots=1, max_context=4096)
    running = asyncio.create_task(engine.generate(long_ask()))
    await all_running(engine, 1)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await engine.generate(ask(max_tokens=2))
    assert engine.capacity().generated_tokens < 4000
    await engine.close()


async def test_a_cancelled_request_has_its_tokens_so_far(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, num_slots=2, max_context=4096)
    request = long_ask()
    running = [asyncio.create_task(engine.generate(request)) for _ in range(3)]
    await all_running(engine, 2)
    await engine.pause()
    for task in running:
        task.cancel()
    errors: list[asyncio.CancelledError] = []
    for task in running:
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        errors.append(caught.value)
    *begun, waiting = errors
    assert not waiting.args, "it had no slot"
    await engine.resume()
    for error in begun:
        beginning = error.args[0]
        assert beginning.finish_reason == "abort"
        num = len(beginning.token_ids)
        whole = await engine.generate(ask(request.token_ids, max_tokens=num, top_k=1))
        assert whole.token_ids == beginning.token_ids
        assert whole.logprobs == pytest.approx(beginning.logprobs, abs=1e-4)
    await engine.close()


async def test_the_rest_of_a_completion_stops_at_a_text_that_began_in_its_beginning(
    snapshot: WeightSnapshot,
) -> None:
    engine = make_engine_on(snapshot)
    whole = (await engine.generate(ask(max_tokens=12, top_k=1))).token_ids
    text = "".join(CHARACTERS[token] for token in whole)
    end = text.index(text[4:7]) + 3
    for num in (end - 2, end - 1):
        sampling = Sampling(max_tokens=20, stop=(text[4:7],), top_k=1)
        rest = await engine.generate(
            GenerateRequest(token_ids=(5, 9, 3, *whole[:num]), sampling=sampling, num_begun=num)
        )
        assert (*whole[:num], *rest.token_ids) == whole[:end]
    await engine.close()


async def test_closing_fails_what_runs_and_refuses_what_comes(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, num_slots=1, max_context=4096)
    tasks = [asyncio.create_task(engine.generate(long_ask(i))) for i in range(3)]
    await engine.resume()
    await engine.close()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, RolloutError)
        assert outcome.is_retryable
    with pytest.raises(RolloutError, match="the engine of 'actor' was closed"):
        await engine.generate(ask())
    with pytest.raises(RolloutError, match="was closed"):
        await engine.pause()
    await engine.close()


async def test_a_crash_of_the_thread_reaches_everyone_who_waits(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, num_slots=4, max_context=4096)
    running = asyncio.create_task(engine.generate(long_ask()))
    await all_running(engine, 1)
    broken = asyncio.create_task(engine.generate(ask(seed="seven")))  # a type that no decoder lets through
    for outcome in await asyncio.gather(running, broken, return_exceptions=True):
        assert isinstance(outcome, RolloutError)
        assert "the engine of 'actor' failed: TypeError" in str(outcome)
    with pytest.raises(RolloutError, match="failed: TypeError"):
        await engine.generate(ask())
    await engine.close()


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), SystemExit(0)], ids=lambda e: type(e).__name__)
async def test_an_engine_whose_thread_has_ended_offers_no_slots(
    snapshot: WeightSnapshot, error: BaseException
) -> None:
    engine = make_engine_on(snapshot, num_slots=4, max_context=4096)
    running = asyncio.create_task(engine.generate(long_ask()))
    await all_running(engine, 1)
    broken = asyncio.create_task(engine.generate(ask(seed=breaking(error))))
    for outcome in await asyncio.gather(running, broken, return_exceptions=True):
        assert isinstance(outcome, RolloutError)
        assert f"failed: {type(error).__name__}" in str(outcome)
    with pytest.raises(ServiceError, match=f"the engine of 'actor' failed: {type(error).__name__}.*started"):
        engine.capacity()
    await engine.close()


class Blocking(int):
    """A seed that blocks the thread in a step until it is told to go on, as a deadlock would."""

    goes_on: threading.Event

    def __and__(self, other: int) -> int:
        self.goes_on.wait(30.0)
        return int(self)


async def test_a_step_that_hangs_ends_the_engine_with_the_cause(snapshot: WeightSnapshot) -> None:
    engine = TorchEngine(TorchEngineConfig(num_slots=4, max_context=4096), snapshot, hang_s=1.0)
    running = asyncio.create_task(engine.generate(long_ask()))
    await all_running(engine, 1)
    seed = Blocking(1)
    seed.goes_on = threading.Event()
    blocked = asyncio.create_task(engine.generate(ask(seed=seed)))
    cause = "the engine of 'actor' hangs: no progress for 1 s: File .*, in wait"
    with pytest.raises(ServiceError, match=f"{cause}.*has to be restarted"):
        await all_running(engine, 3)
    for outcome in await asyncio.gather(running, blocked, return_exceptions=True):
        assert isinstance(outcome, RolloutError)
        assert "hangs" in str(outcome)
    with pytest.raises(RolloutError, match="hangs"):
        await engine.generate(ask())
    await engine.close()  # doesn't wait for the thread
    seed.goes_on.set()
    engine._thread.join(10.0)
    with pytest.raises(ServiceError, match="hangs"):
        engine.capacity()


async def test_an_engine_that_works_or_has_nothing_to_do_does_not_hang(snapshot: WeightSnapshot) -> None:
    engine = TorchEngine(TorchEngineConfig(num_slots=4, max_context=4096), snapshot, hang_s=0.6)
    deadline = time.monotonic() + 1.5
    running = asyncio.create_task(engine.generate(long_ask()))
    while time.monotonic() < deadline:  # it is as busy at first and idle or paused afterwards
        engine.capacity()
        await asyncio.sleep(0.01)
    await engine.pause()
    await asyncio.sleep(0.8)
    engine.capacity()
    await engine.resume()
    await running
    await engine.close()
    await asyncio.sleep(0.8)
    assert engine.capacity().num_running == 0


async def test_busy_spans_cover_the_generation_and_end_with_it(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, max_context=512)
    assert engine.take_spans() == ()
    start = time.time()
    await engine.generate(long_ask())
    await engine.resume()  # answered when the thread has been idle
    end = time.time()
    spans = engine.take_spans()
    assert {span.kind for span in spans} == {"generate"}
    assert all(start <= span.start_s < span.end_s <= end for span in spans)
    assert sum(span.end_s - span.start_s for span in spans) > 0.2 * (end - start)
    assert engine.take_spans() == ()
    await engine.close()


async def test_a_bfloat16_engine_serves_float32_weights_rounded(snapshot: WeightSnapshot) -> None:
    engine = make_engine_on(snapshot, dtype="bfloat16")
    model = make_random_model().to(torch.bfloat16)
    generation = await engine.generate(ask(max_tokens=20, top_k=1))
    tokens = torch.tensor([[5, 9, 3, *generation.token_ids]])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens).logits[0].float(), -1)
    expected = [float(logprobs[2 + i, token]) for i, token in enumerate(generation.token_ids)]
    errors = np.abs(np.array(generation.logprobs) - np.array(expected))
    assert errors.mean() < 0.1
    await engine.close()

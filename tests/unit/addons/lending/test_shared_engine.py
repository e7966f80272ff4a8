"""Requests and new weights of a shared engine wait for a turn."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from astraflow.addons.lending.shared_engine import SharedEngine
from astraflow.types import GenerateRequest, Generation, Sampling

REQUEST = GenerateRequest(token_ids=(5, 6), sampling=Sampling())
BEGINNING = Generation(token_ids=(7,), logprobs=(-1.0,), versions=(0,), finish_reason="abort")


class Sleeper:
    """An engine that answers no request before it is cut off."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._is_cut = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Generation:
        self.calls.append("generate")
        await self._is_cut.wait()
        return BEGINNING

    async def score(self, token_ids: Any) -> Any:
        return np.zeros(len(token_ids) - 1)

    async def load(self, snapshot: Any, *, slot: str) -> None:
        self.calls.append(f"load {slot}")

    async def cut(self) -> None:
        self.calls.append("cut")
        self._is_cut.set()

    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


class Stage:
    def __init__(self) -> None:
        self.sleeper = Sleeper()
        self.has_turn = asyncio.Event()
        self.is_asked_back = asyncio.Event()
        self.engine = SharedEngine(
            self.sleeper,  # type: ignore[arg-type]
            has_turn=self.has_turn,
            in_turn=self.in_turn,
            is_ending=self.is_asked_back.is_set,
        )

    @asynccontextmanager
    async def in_turn(self) -> AsyncIterator[None]:
        await self.has_turn.wait()
        yield


async def cancelled(task: "asyncio.Task[Any]") -> asyncio.CancelledError:
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    return caught.value


async def test_requests_and_weights_wait_for_a_turn() -> None:
    stage = Stage()
    calls = [
        asyncio.ensure_future(stage.engine.load(None, slot="live")),  # type: ignore[arg-type]
        asyncio.ensure_future(stage.engine.score((1, 2, 3))),
    ]
    await asyncio.sleep(0.01)
    assert not stage.sleeper.calls
    stage.has_turn.set()
    assert len((await asyncio.gather(*calls))[1]) == 2
    assert stage.sleeper.calls == ["load live"]


async def test_requests_that_are_cancelled_at_the_end_of_a_turn_are_cut_off_once() -> None:
    stage = Stage()
    stage.has_turn.set()
    tasks = [asyncio.create_task(stage.engine.generate(REQUEST)) for _ in range(3)]
    await asyncio.sleep(0.01)
    stage.is_asked_back.set()
    errors = await asyncio.gather(*map(cancelled, tasks))
    assert [error.args for error in errors] == [(BEGINNING,)] * 3
    assert stage.sleeper.calls.count("cut") == 1


async def test_a_request_that_is_cancelled_during_a_turn_leaves_the_others_alone() -> None:
    stage = Stage()
    stage.has_turn.set()
    task = asyncio.create_task(stage.engine.generate(REQUEST))
    await asyncio.sleep(0.01)
    assert not (await cancelled(task)).args
    assert "cut" not in stage.sleeper.calls

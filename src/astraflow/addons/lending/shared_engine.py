"""An engine that uses its device only during the turns of its service."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np
from numpy.typing import NDArray

from astraflow.addons.lending.tenants import SleepingEngine
from astraflow.errors import RolloutError
from astraflow.protocols import Capacity, Engine, TokenScores, TopScorer
from astraflow.types import BusySpan, GenerateRequest, Generation
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["SharedEngine"]

_CUT_S = 3.0
"""Longest wait for an engine that cuts off its requests."""
_ANSWER_S = 0.5
"""Longest wait for a beginning after that. A request that had not reached the engine gets none."""


class SharedEngine:
    """Implements `Engine` by another engine. Requests and new weights wait for a turn.

    Example: `SharedEngine(engine, has_turn=event, in_turn=turns.in_turn, is_ending=event.is_set)`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        has_turn: asyncio.Event,
        in_turn: Callable[[], AbstractAsyncContextManager[None]],
        is_ending: Callable[[], bool],
    ) -> None:
        """`has_turn`: set during turns. `in_turn`: waits for a turn, and keeps it from ending meanwhile.
        `is_ending`: whether the turn must end soon."""
        self._engine = engine
        self._has_turn = has_turn
        self._in_turn = in_turn
        self._is_ending = is_ending
        self._cutting: asyncio.Task[None] | None = None

    async def generate(self, request: GenerateRequest) -> Generation:
        """Generates in the next turn, or in this one."""
        await self._has_turn.wait()
        if not isinstance(self._engine, SleepingEngine):
            return await self._engine.generate(request)
        running = asyncio.ensure_future(self._engine.generate(request))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError as err:
            try:
                if self._is_ending():
                    await self._cut(self._engine, running)
            finally:
                running.cancel()
            done = (await asyncio.gather(running, return_exceptions=True))[0]
            # A server would not find a stop text that begins in the beginning.
            can_continue = isinstance(done, Generation) and done.token_ids and not done.streams
            err.args = (done,) if can_continue and not request.sampling.stop else ()
            raise

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Scores in the next turn, or in this one."""
        await self._has_turn.wait()
        return await self._engine.score(token_ids)

    async def score_top(self, token_ids: Sequence[int], num: int, *, temperature: float = 1.0) -> TokenScores:
        """Scores in the next turn, or in this one. Raises: RolloutError if the engine can't do that."""
        if not isinstance(self._engine, TopScorer):
            raise RolloutError("the shared engine does not tell the most likely tokens", is_retryable=False)
        await self._has_turn.wait()
        return await self._engine.score_top(token_ids, num, temperature=temperature)

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version in the next turn, or in this one."""
        async with self._in_turn():
            await self._engine.load(snapshot, slot=slot)

    async def pause(self) -> None:
        """See `Engine`."""
        await self._engine.pause()

    async def resume(self) -> None:
        """See `Engine`."""
        await self._engine.resume()

    def capacity(self) -> Capacity:
        """See `Engine`."""
        return self._engine.capacity()

    def take_spans(self) -> tuple[BusySpan, ...]:
        """See `Engine`."""
        return self._engine.take_spans()

    async def close(self) -> None:
        """See `Engine`."""
        await self._engine.close()

    async def _cut(self, engine: SleepingEngine, running: "asyncio.Future[Generation]") -> None:
        """Ends all requests once, however many callers are cancelled, and waits for the end of one."""
        if self._cutting is None or self._cutting.done():
            self._cutting = asyncio.ensure_future(engine.cut())
        await asyncio.wait({self._cutting}, timeout=_CUT_S)
        await asyncio.wait({running}, timeout=_ANSWER_S)

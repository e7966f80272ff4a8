"""Scores completions in processes of their own, each call under a hard deadline.

    ScoringPool (event loop) -> worker of the pool (`scoring_process`) -> reward

The reward is built by name in its process, so only the task and the text travel, and no torch is imported. A
call over its deadline is ended with its process; a process that dies is replaced; either fails one episode
and nothing else. Rewards that only compare strings run in this process, since they cannot hang. One with a
`format` can: a pattern may take exponential time on the text of a model.

Calls of an `async` reward go to a process many at a time, because such a reward waits for others most of the
time. A call over its deadline is cancelled there; the others go on. If it does not let itself be cancelled,
the process ends with all of its calls, and each of them is made again alone.
"""

import asyncio
import logging
import multiprocessing
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import TypeAlias

from pebble import ProcessExpired, ProcessPool

from astraflow.errors import ConfigError, DeadlineError, LateScoreError, RolloutError, ScorerError
from astraflow.protocols import Score
from astraflow.rollout.open_calls import OpenCalls
from astraflow.rollout.scoring_process import (
    BUILD_S,
    RENEWED,
    Outcome,
    Problem,
    built_reward,
    call_reward,
    late,
    score_calls,
    start_worker,
)
from astraflow.tasks.config import ExactReward, TasksConfig
from astraflow.tasks.rewards import RecipeReward, make_reward
from astraflow.tasks.variants import RewardVariant
from astraflow.types import Task

__all__ = ["ScoringPool"]

_log = logging.getLogger(__name__)

_CALLS_PER_PROCESS = 100_000
"""A worker is renewed after this many calls: rewards leak, and a new one costs a second."""
_START_S = BUILD_S + 60.0
"""Time for the first worker to start and to build the reward."""
_CANCELLING_S = 1.0
"""Time for an `async` reward to end once it is cancelled at its deadline, before its process is ended."""
_Call: TypeAlias = tuple[Task, str]


class ScoringPool:
    """The reward of a recipe, ready to be called many times at once.

    Example::

        pool = ScoringPool(recipe.tasks)
        await pool.start()
        score = await pool.score(task, "5")
        await pool.close()
    """

    def __init__(self, tasks: TasksConfig, *, num_workers: int = 1) -> None:
        self._deadline_s = tasks.score_timeout_s
        self._num_workers = num_workers
        self._calls_at_once = tasks.async_calls
        self._is_async = False
        self._waiting: deque[tuple[_Call, asyncio.Future[Score]]] = deque()
        """Calls of an `async` reward for which no process is free."""
        self._batches: set[asyncio.Task[None]] = set()
        """One per process that has calls of an `async` reward."""
        self._is_closed = False
        self._calls = OpenCalls()
        self._local: RecipeReward | None = None
        """The reward, if it runs in this process."""
        self._pool: ProcessPool | None = None
        self._made_pool = partial(
            ProcessPool,
            max_workers=num_workers,
            max_tasks=_CALLS_PER_PROCESS,
            initializer=start_worker,
            initargs=[tasks.model_dump_json(), tuple(sys.path)],
            context=multiprocessing.get_context("spawn"),
        )
        if _is_harmless(tasks):
            self._local = make_reward(tasks)
            self._is_async = self._local.is_async
        else:
            self._pool = self._made_pool()

    async def start(self) -> None:
        """Waits until a worker has built the reward.

        Raises: ConfigError if the reward cannot be built; DeadlineError if that takes too long.
        """
        if self._local is not None:
            await self._local.open()
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(_START_S):
                built = await asyncio.wrap_future(self._pool.schedule(built_reward))
        except (TimeoutError, ProcessExpired, BrokenProcessPool) as err:
            raise DeadlineError(f"the scoring process did not come up within {_START_S} s: {err}") from err
        if built.problem:
            raise ConfigError(f"tasks.reward cannot be built: {built.problem}")
        self._is_async = built.is_async

    async def score(self, task: Task, text: str) -> Score:
        """The reward of `text`, with its parts.

        Raises: LateScoreError if the reward ran over its deadline; RolloutError, not retryable if the reward
        raised or returned no finite number.
        """
        with self._calls.one():
            return await self._score(task, text)

    @property
    def num_calls(self) -> int:
        """Calls that run or wait."""
        return self._calls.num

    @property
    def oldest_call_s(self) -> float:
        """For how long the oldest of them has run or waited; 0 if there is none."""
        return self._calls.oldest_s

    @property
    def queue(self) -> str:
        """What calls wait for, in words."""
        if self._local is not None and self._local.queue:
            return self._local.queue
        return f"the reward: {self._calls.num} calls run or wait in {self._num_workers} processes"

    async def _score(self, task: Task, text: str) -> Score:
        if self._local is not None and self._is_async:
            return await self._score_here(self._local, task, text)
        if self._local is not None:
            return call_reward(self._local, task, text)
        if not self._is_async:
            return _score_of(await self._alone((task, text)))
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append(((task, text), future))
        asyncio.get_running_loop().call_soon(self._start_batches)
        return await future

    async def close(self) -> None:
        """Ends the workers; calls that still wait are cancelled."""
        self._is_closed = True
        for _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        for batch in self._batches:
            batch.cancel()
        await asyncio.gather(*self._batches, return_exceptions=True)
        if self._local is not None:
            await self._local.close()
        if self._pool is not None:
            self._pool.stop()
            await asyncio.to_thread(self._pool.join)

    async def _score_here(self, reward: RecipeReward, task: Task, text: str) -> Score:
        """Scores in this process what cannot hang."""
        started = reward.start(task, text)
        return reward.total(task, text, await reward.waited(task, started))

    # --- one call -----------------------------------------------------------------------------------

    async def _alone(self, call: _Call) -> Outcome:
        """The outcome of one call, whose process ends if it takes too long."""
        task, text = call
        try:
            (outcome,) = await self._scored([call])
        except TimeoutError:
            return late(task, text, self._deadline_s)
        except ProcessExpired as err:
            return Problem(
                f"task {task.id}: the scoring process died (exit code {err.exitcode}) on a completion of "
                f"{len(text)} characters",
                is_retryable=True,
            )
        except BrokenProcessPool:
            return Problem(f"task {task.id}: the scoring processes died", is_retryable=True)
        return outcome

    async def _scored(self, calls: Sequence[_Call]) -> list[Outcome]:
        """The outcomes of some calls. Raises: TimeoutError or ProcessExpired if their process had to end."""
        for num_renewed in range(self._num_workers + 1):
            try:
                return await self._scored_once(calls)
            except ProcessExpired as err:
                # At worst, the call meets all workers that were used up before it meets a new one.
                if err.exitcode != RENEWED or num_renewed == self._num_workers:
                    raise
        raise AssertionError("unreachable")

    async def _scored_once(self, calls: Sequence[_Call]) -> list[Outcome]:
        deadline_s = self._deadline_s + (_CANCELLING_S if self._is_async else 0.0)
        future = self._working_pool().schedule(score_calls, args=[list(calls)], timeout=deadline_s)
        # shielded: a cancelled episode would end the worker that scores it
        return await asyncio.shield(asyncio.wrap_future(future))

    def _working_pool(self) -> ProcessPool:
        """The pool; a new one if it broke. It breaks as a whole if a worker dies while none has a call."""
        assert self._pool is not None
        if not (self._pool.active or self._is_closed):
            _log.warning("the scoring processes died, perhaps for lack of memory; they are started again")
            broken = self._pool
            self._pool = self._made_pool()
            broken.stop()
            threading.Thread(target=broken.join, daemon=True).start()
        return self._pool

    # --- many calls ---------------------------------------------------------------------------------

    def _start_batches(self) -> None:
        """Gives waiting calls to processes that have none."""
        while self._waiting and len(self._batches) < self._num_workers:
            num_calls = min(len(self._waiting), self._calls_at_once)
            batch = [self._waiting.popleft() for _ in range(num_calls)]
            task = asyncio.create_task(self._score_batch(batch))
            self._batches.add(task)
            task.add_done_callback(self._end_batch)

    def _end_batch(self, task: "asyncio.Task[None]") -> None:
        self._batches.discard(task)
        if not task.cancelled():
            self._start_batches()

    async def _score_batch(self, batch: "Sequence[tuple[_Call, asyncio.Future[Score]]]") -> None:
        """Scores the calls whose episodes still wait."""
        wanted = [(call, future) for call, future in batch if not future.done()]
        try:
            outcomes = await self._outcomes([call for call, _ in wanted])
        except asyncio.CancelledError:
            for _, future in wanted:
                future.cancel()
            raise
        except Exception as err:  # noqa: BLE001 - such as a pool that is closed; whoever waits is told
            outcomes = [Problem(f"the scoring process cannot be called: {err}")] * len(wanted)
        for (_, future), outcome in zip(wanted, outcomes, strict=True):
            if not future.done():
                _settle(future, outcome)

    async def _outcomes(self, calls: Sequence[_Call]) -> Sequence[Outcome]:
        if len(calls) > 1:
            try:
                return await self._scored(calls)
            except (TimeoutError, ProcessExpired, BrokenProcessPool):
                pass  # one of them ended the process; alone, the others succeed
        return await asyncio.gather(*[self._alone(call) for call in calls])


def _is_harmless(tasks: TasksConfig) -> bool:
    """Whether scoring can run in the rollout service. A pattern may take forever on the text of a model."""
    reward = tasks.reward
    is_harmless = reward.is_harmless if isinstance(reward, RewardVariant) else False
    return (is_harmless or isinstance(reward, ExactReward)) and not tasks.format


def _score_of(outcome: Outcome) -> Score:
    if not isinstance(outcome, Problem):
        return outcome
    if outcome.is_late:
        raise LateScoreError(outcome.text)
    if outcome.is_final:
        raise ScorerError(outcome.text)
    raise RolloutError(outcome.text, is_retryable=outcome.is_retryable)


def _settle(future: "asyncio.Future[Score]", outcome: Outcome) -> None:
    try:
        future.set_result(_score_of(outcome))
    except RolloutError as err:
        future.set_exception(err)

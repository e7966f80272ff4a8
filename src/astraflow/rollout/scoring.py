"""Scores completions in separate processes, each call with a hard deadline.

    ScoringPool (event loop) -> worker of the pool (`scoring_process`) -> reward

The process builds the reward from its config, so only the task and the text are sent, and torch is not
imported. A call that exceeds its deadline is ended together with its process, and a process that dies is
replaced. Either fails only one episode. Rewards that only compare strings run in this process, because they
can't hang. A reward with a `format` can hang: a pattern may take exponential time on the text of a model.

A process gets many calls of an `async` reward at a time, because such a reward mostly waits. A call that
exceeds its deadline is cancelled there, and the others continue. If the call ignores the cancellation, the
process is ended with all its calls, and each of them is repeated separately.
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
    build_reward,
    call_reward,
    late_problem,
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
"""A worker is replaced after this many calls: rewards may leak memory, and a new worker takes a second."""
_START_S = BUILD_S + 60.0
"""Time limit for the first worker to start and to build the reward."""
_CANCELLING_S = 1.0
"""How long an `async` reward may take to end after it is cancelled; after that, its process is ended."""
_Call: TypeAlias = tuple[Task, str]


class ScoringPool:
    """The reward of a recipe. Many calls may run at once.

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
        """Calls of an `async` reward that wait for a free process."""
        self._batches: set[asyncio.Task[None]] = set()
        """One task per process that runs calls of an `async` reward."""
        self._is_closed = False
        self.calls = OpenCalls()
        """Calls that run or wait."""
        self._local: RecipeReward | None = None
        """The reward, if it runs in this process."""
        self._pool: ProcessPool | None = None
        self._make_pool = partial(
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
            self._pool = self._make_pool()

    async def start(self) -> None:
        """Waits until a worker has built the reward.

        Raises: ConfigError if the reward cannot be built; DeadlineError if building it takes too long.
        """
        if self._local is not None:
            await self._local.open()
        if self._pool is None:
            return
        try:
            async with asyncio.timeout(_START_S):
                built = await asyncio.wrap_future(self._pool.schedule(build_reward))
        except (TimeoutError, ProcessExpired, BrokenProcessPool) as err:
            raise DeadlineError(f"the scoring process did not start within {_START_S} s: {err}") from err
        if built.problem:
            raise ConfigError(f"tasks.reward cannot be built: {built.problem}")
        self._is_async = built.is_async

    async def score(self, task: Task, text: str) -> Score:
        """Scores `text` with the reward. The score includes the reward's parts.

        Raises: LateScoreError if the reward exceeds its deadline; ScorerError if a built-in scorer fails;
        RolloutError otherwise, which is not retryable if the reward raised an exception or returned something
        other than a finite number.
        """
        if self._local is not None and not self._is_async:
            return call_reward(self._local, task, text)  # at once, so there is no call to count
        with self.calls.one():
            return await self._score(task, text)

    @property
    def queue(self) -> str:
        """A description of what the calls wait for."""
        if self._local is not None and self._local.queue:
            return self._local.queue
        return f"the reward: {self.calls.num} calls run or wait in {self._num_workers} processes"

    async def _score(self, task: Task, text: str) -> Score:
        if self._local is not None:
            return await self._score_here(self._local, task, text)
        if not self._is_async:
            return _unwrap(await self._score_alone((task, text)))
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        self._waiting.append(((task, text), future))
        asyncio.get_running_loop().call_soon(self._start_batches)
        return await future

    async def close(self) -> None:
        """Ends the workers, and cancels the calls that still wait."""
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
        """Scores in this process, with an `async` reward that can't block the event loop."""
        started = reward.start(task, text)
        return reward.total(task, text, await reward.waited(task, started))

    async def _score_alone(self, call: _Call) -> Outcome:
        """Makes one call. If it takes too long, its process is ended."""
        task, text = call
        try:
            (outcome,) = await self._score_calls([call])
        except TimeoutError:
            return late_problem(task, text, self._deadline_s)
        except ProcessExpired as err:
            return Problem(
                f"task {task.id}: the scoring process died (exit code {err.exitcode}) on a completion of "
                f"{len(text)} characters",
                is_retryable=True,
            )
        except BrokenProcessPool:
            return Problem(f"task {task.id}: the scoring processes died", is_retryable=True)
        return outcome

    async def _score_calls(self, calls: Sequence[_Call]) -> list[Outcome]:
        """Makes calls in one process. Raises: TimeoutError or ProcessExpired if the process had to end."""
        for num_renewed in range(self._num_workers + 1):
            try:
                return await self._score_calls_once(calls)
            except ProcessExpired as err:
                # At worst, every worker refuses the call once because it has to be replaced.
                if err.exitcode != RENEWED or num_renewed == self._num_workers:
                    raise
        raise AssertionError("unreachable")

    async def _score_calls_once(self, calls: Sequence[_Call]) -> list[Outcome]:
        deadline_s = self._deadline_s + (_CANCELLING_S if self._is_async else 0.0)
        future = self._get_pool().schedule(score_calls, args=[list(calls)], timeout=deadline_s)
        call = asyncio.wrap_future(future)
        call.add_done_callback(_read_error)
        # Shielded, because cancelling the future of a cancelled episode would end its worker.
        return await asyncio.shield(call)

    def _get_pool(self) -> ProcessPool:
        """Returns the pool, or a new one if it is broken. A pool breaks if a worker dies while it is idle."""
        assert self._pool is not None
        if not (self._pool.active or self._is_closed):
            _log.warning("the scoring processes died, possibly because memory ran out; restarting them")
            broken = self._pool
            self._pool = self._make_pool()
            broken.stop()
            threading.Thread(target=broken.join, daemon=True).start()
        return self._pool

    def _start_batches(self) -> None:
        """Assigns waiting calls to idle processes."""
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
        """Scores those calls of a batch whose episodes still wait."""
        wanted = [(call, future) for call, future in batch if not future.done()]
        try:
            outcomes = await self._score_together([call for call, _ in wanted])
        except asyncio.CancelledError:
            for _, future in wanted:
                future.cancel()
            raise
        except Exception as err:  # noqa: BLE001 - for example a closed pool; every waiting call must end
            outcomes = [Problem(f"the scoring process cannot be called: {err}")] * len(wanted)
        for (_, future), outcome in zip(wanted, outcomes, strict=True):
            if not future.done():
                _settle(future, outcome)

    async def _score_together(self, calls: Sequence[_Call]) -> Sequence[Outcome]:
        """Makes calls in one process, and repeats each separately if the process dies or has to be ended."""
        if len(calls) > 1:
            try:
                return await self._score_calls(calls)
            except (TimeoutError, ProcessExpired, BrokenProcessPool):
                pass  # one call is to blame; made alone, the others succeed
        return await asyncio.gather(*[self._score_alone(call) for call in calls])


def _read_error(call: "asyncio.Future[list[Outcome]]") -> None:
    """Reads the error of a call, which asyncio would otherwise log if its episode was cancelled."""
    if not call.cancelled():
        call.exception()


def _is_harmless(tasks: TasksConfig) -> bool:
    """Whether scoring can run in the rollout service, because it can't hang. A `format` pattern can."""
    reward = tasks.reward
    is_harmless = reward.is_harmless if isinstance(reward, RewardVariant) else False
    return (is_harmless or isinstance(reward, ExactReward)) and not tasks.format


def _unwrap(outcome: Outcome) -> Score:
    """Returns a score. Raises: the error of a problem."""
    if not isinstance(outcome, Problem):
        return outcome
    if outcome.is_late:
        raise LateScoreError(outcome.text)
    if outcome.is_final:
        raise ScorerError(outcome.text)
    raise RolloutError(outcome.text, is_retryable=outcome.is_retryable)


def _settle(future: "asyncio.Future[Score]", outcome: Outcome) -> None:
    try:
        future.set_result(_unwrap(outcome))
    except RolloutError as err:
        future.set_exception(err)

"""Scores completions in separate processes, each call with a hard deadline.

    ScoringPool (event loop) -> worker (`scoring_process`), under a keeper -> reward

The process builds the reward from its config, so only the task and the text are sent, and torch is not
imported. A call that exceeds its deadline is ended together with its process and all that this has started,
and a process that dies is replaced. Either fails only one episode. A process that may have a corrupt state,
because a comparison was interrupted or a built-in scorer failed, is replaced after its answer. Rewards that
only compare strings run in this process, because they can't hang. A reward with a `format` can hang: a
pattern may take exponential time on the text of a model.

A process gets many calls of an `async` reward at a time, because such a reward mostly waits. A call that
exceeds its deadline is cancelled there, and the others continue. If the call ignores the cancellation, the
process is ended with all its calls, and each of them is repeated separately.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, TypeAlias

from astraflow.errors import ConfigError, LateScoreError, RolloutError, ScorerError
from astraflow.protocols import Score
from astraflow.rollout.open_calls import OpenCalls
from astraflow.rollout.scoring_process import (
    BuiltReward,
    Outcome,
    Problem,
    ScoringProcess,
    call_reward,
    late_problem,
    scoring_environment,
)
from astraflow.service.worker import Worker, WorkerLostError
from astraflow.tasks.config import ExactReward, TasksConfig
from astraflow.tasks.rewards import RecipeReward, make_reward
from astraflow.tasks.variants import RewardVariant
from astraflow.types import Task

__all__ = ["ScoringPool"]

_CALLS_PER_PROCESS = 100_000
"""A worker is replaced after this many calls: rewards may leak memory, and a new worker takes a second."""
_BUILD_S = 600.0
"""Time limit for importing the libraries of a reward and building it. It usually takes seconds, but much
longer with a slow disk or a busy machine."""
_TARGET = f"{ScoringProcess.__module__}:{ScoringProcess.__name__}"
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
        self._tasks = tasks
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
        self._ready: asyncio.Queue[tuple[Worker | None, BuiltReward]] = asyncio.Queue()
        """Free processes."""
        self._work: set[asyncio.Task[Any]] = set()
        """Calls, and starts of processes."""
        if _is_harmless(tasks):
            self._local = make_reward(tasks)
            self._is_async = self._local.is_async

    async def start(self) -> None:
        """Waits until a process has built the reward. Raises: ConfigError if it cannot be built in time."""
        if self._local is not None:
            await self._local.open()
            return
        for _ in range(self._num_workers):
            self._spawn(self._start_worker())
        worker, built = await self._ready.get()
        self._ready.put_nowait((worker, built))
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
        for work in self._work:
            work.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)
        while not self._ready.empty():
            worker, _ = self._ready.get_nowait()
            if worker is not None:
                await worker.end()

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
        except WorkerLostError as err:
            what = f"the scoring process died on a completion of {len(text)} characters: it {err}"
            return Problem(f"task {task.id}: {what}", is_retryable=True)
        return outcome

    async def _score_calls(self, calls: Sequence[_Call]) -> list[Outcome]:
        """Makes calls in one process. Raises: TimeoutError or WorkerLostError if the process had to end."""
        # Shielded, because the call of a cancelled episode would end its process.
        return await asyncio.shield(self._spawn(self._score_in_worker(calls)))

    async def _score_in_worker(self, calls: Sequence[_Call]) -> list[Outcome]:
        worker, built = await self._ready.get()
        is_reusable = False
        try:
            if worker is None:
                # The first process could build the reward, so the fault lies with this one.
                what = f"the reward could not be built again: {built.problem}"
                return [Problem(f"task {task.id}: {what}", is_retryable=True) for task, _ in calls]
            async with asyncio.timeout(self._deadline_s + (_CANCELLING_S if self._is_async else 0.0)):
                outcomes: list[Outcome] = await worker.call("score", list(calls))
            is_final = any(isinstance(outcome, Problem) and outcome.is_final for outcome in outcomes)
            is_reusable = not is_final and worker.num_calls < _CALLS_PER_PROCESS
            return outcomes
        finally:
            if is_reusable:
                self._ready.put_nowait((worker, built))
            elif not self._is_closed:
                self._spawn(self._start_worker())
            if worker is not None and not is_reusable:
                await worker.end()

    async def _start_worker(self) -> None:
        """Starts a process, which builds the reward now, so that no call's deadline includes that time."""
        worker = None
        try:
            async with asyncio.timeout(_BUILD_S):
                worker = await Worker.start(
                    _TARGET, self._tasks.model_dump_json(), env=scoring_environment(self._tasks)
                )
                built: BuiltReward = await worker.call("build")
        except asyncio.CancelledError:
            if worker is not None:
                await worker.end()
            raise
        except Exception as err:  # noqa: BLE001 - for example no more processes; the next call must be told
            built = BuiltReward(f"its process {err}" if isinstance(err, WorkerLostError) else str(err))
            if isinstance(err, TimeoutError):
                built = BuiltReward(f"it was not built within {_BUILD_S:g} s")
        if worker is not None and built.problem:
            await worker.end()
            worker = None
        self._ready.put_nowait((worker, built))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._forget)
        return task

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._work.discard(task)
        if not task.cancelled():
            task.exception()  # read here, because asyncio would log it if its episode was cancelled

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
            except (TimeoutError, WorkerLostError):
                pass  # one call is to blame; made alone, the others succeed
        return await asyncio.gather(*[self._score_alone(call) for call in calls])


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

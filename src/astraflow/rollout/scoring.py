"""Scores completions in separate processes, each call with a hard deadline.

    ScoringPool (event loop) -> process (`scoring_process`), under a keeper -> reward

The process builds the reward from its config, so only the task and the text are sent, and torch is not
imported. A call that exceeds its deadline is ended together with its process and all that this has started,
and a process that dies is replaced. Either fails only one episode. A process that may have a corrupt state,
because a comparison was interrupted or a built-in scorer failed, is replaced after its answer. Rewards that
only compare strings run in this process, because they can't hang. A reward with a `format` can hang: a
pattern may take exponential time on the text of a model.

A process gets many calls of an `async` reward at a time, because such a reward mostly waits. A call that
exceeds its deadline is cancelled there, and the others continue. If the call ignores the cancellation, the
process is ended with all its calls, and each of them is repeated separately.

A judge is a model that rates answers: a policy of the run, or a model at an endpoint. It generates text, so
it is asked from here. Its completions don't belong to an episode: they are neither recorded nor trained on.
If a judge is unavailable, the episode fails. A completion without a clear verdict gets the value that the
judge sets, and counts in `judge_unclear`.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from astraflow.errors import ConfigError, LateScoreError, RolloutError, ScorerError
from astraflow.protocols import HostedModel, Score
from astraflow.rollout.scoring_process import (
    BuiltReward,
    Outcome,
    Problem,
    ScoringProcess,
    call_reward,
    late_problem,
    scoring_environment,
)
from astraflow.service.kept_object import KeptObject, ObjectLostError
from astraflow.tasks.answers import extract_answer
from astraflow.tasks.config import ExactReward, TasksConfig, WeightedReward, judges_of
from astraflow.tasks.rewards import RecipeReward, make_reward
from astraflow.tasks.variants import RewardVariant
from astraflow.types import Task

__all__ = ["OpenCalls", "ScoringPool"]

_CALLS_PER_PROCESS = 100_000
"""A process is replaced after this many calls: rewards may leak memory, and a new one takes a second."""
_BUILD_S = 600.0
"""Time limit for importing the libraries of a reward and building it. It usually takes seconds, but much
longer with a slow disk or a busy machine."""
_TARGET = f"{ScoringProcess.__module__}:{ScoringProcess.__name__}"
_CANCELLING_S = 1.0
"""How long an `async` reward may take to end after it is cancelled; after that, its process is ended."""


class OpenCalls:
    """Calls that run or wait. Example: `with calls.one(): await score()`; inside, `calls.num` is 1."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: dict[int, float] = {}
        """Start time by call number, oldest call first."""
        self._numbers = itertools.count()

    @contextmanager
    def one(self) -> Generator[None]:
        """Counts a call while the block runs."""
        number = next(self._numbers)
        self._began_s[number] = self._clock()
        try:
            yield
        finally:
            del self._began_s[number]

    @property
    def num(self) -> int:
        """Number of calls that run or wait."""
        return len(self._began_s)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest call in seconds; 0 if there is none."""
        began_s = next(iter(self._began_s.values()), None)
        return 0.0 if began_s is None else self._clock() - began_s


@dataclass(eq=False, slots=True)
class _Call:
    task: Task
    text: str
    score: "asyncio.Future[Score]"
    is_alone: bool = False
    """Whether it is repeated alone, because the process of its batch had to end."""


class ScoringPool:
    """The reward of a recipe, with its judges. Many calls may run at once.

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
        self._waiting: asyncio.Queue[_Call] = asyncio.Queue()
        """Calls that wait for a free process."""
        self._running: list[asyncio.Task[None]] = []
        """One task per process."""
        self.calls = OpenCalls()
        """Calls that run or wait."""
        self._local: RecipeReward | None = None
        """The reward, if it runs in this process."""
        if _is_harmless(tasks):
            self._local = make_reward(tasks)
            self._is_async = self._local.is_async
        self._judges = {name: config.make_judge() for name, config in judges_of(tasks).items()}
        self._num_judged = 0
        """Calls that wait for a judge."""
        self.policies: Mapping[str, HostedModel] = {}
        """The policies that may serve as judges. The mapping may be filled later."""

    async def start(self) -> None:
        """Waits until a process has built the reward, and judges can be asked.

        Raises: ConfigError if the reward cannot be built in time; UnavailableError if an endpoint is down.
        """
        if self._local is not None:
            await self._local.open()
        else:
            first: asyncio.Future[BuiltReward] = asyncio.get_running_loop().create_future()
            self._running = [asyncio.create_task(self._work(first)) for _ in range(self._num_workers)]
            built = await first
            if built.problem:
                raise ConfigError(f"tasks.reward cannot be built: {built.problem}")
            self._is_async = built.is_async
        for judge in self._judges.values():
            await judge.start()

    async def score(self, task: Task, text: str) -> Score:
        """Scores `text` with the reward. The score includes the reward's parts.

        Raises: LateScoreError if the reward exceeds its deadline; ScorerError if a built-in scorer fails;
        RolloutError otherwise, which is not retryable if the reward raised an exception or returned something
        other than a finite number.
        """
        if self._local is not None and not self._is_async and not self._judges:
            return call_reward(self._local, task, text)  # at once, so there is no call to count
        with self.calls.one():
            score = await self._score(task, text)
            if not self._judges:
                return score
            self._num_judged += 1
            try:
                return await self._judge(task, text, score)
            finally:
                self._num_judged -= 1

    @property
    def queue(self) -> str:
        """A description of what most calls wait for."""
        if self._judges and 2 * self._num_judged >= self.calls.num:
            return f"the judge: {self._num_judged} calls wait for its replies"
        if self._local is not None and self._local.queue:
            return self._local.queue
        num = self.calls.num - self._num_judged
        return f"the reward: {num} calls run or wait in {self._num_workers} processes"

    async def _score(self, task: Task, text: str) -> Score:
        if self._local is not None and not self._is_async:
            return call_reward(self._local, task, text)
        if self._local is not None:
            started = self._local.start(task, text)
            return self._local.total(task, text, await self._local.waited(task, started))
        if not self._running:
            raise RolloutError("the scoring processes have ended")
        call = _Call(task, text, asyncio.get_running_loop().create_future())
        self._waiting.put_nowait(call)
        return await call.score

    async def _judge(self, task: Task, text: str, score: Score) -> Score:
        """Adds the values of the judges. Raises: RolloutError if one is unavailable."""
        reward = self._tasks.reward
        answer = extract_answer(text, mode=self._tasks.extract)
        total = 0.0
        parts = dict(score.parts)
        for name, judge in self._judges.items():
            value = judge.unclear
            if answer is not None:
                value, is_clear = await judge.value(task, answer, self.policies)
                parts["judge_unclear"] = max(parts.get("judge_unclear", 0.0), float(not is_clear))
            parts[f"reward/{name}" if name else "reward/judge"] = value
            total += reward.weight(name) * value if isinstance(reward, WeightedReward) else value
        # Judges are multiplied by all factors, and by the share without `format`.
        factors = reward.factors if isinstance(reward, WeightedReward) else ()
        scale = math.prod(parts.get(f"reward/{name}", 1.0) for name in factors)
        scale *= 1 - self._tasks.format_weight if self._tasks.format else 1.0
        return Score(float(score) + total * scale, parts)

    async def close(self) -> None:
        """Ends the processes, cancels the calls that still wait, and closes connections to endpoints."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running = []
        while not self._waiting.empty():
            self._waiting.get_nowait().score.cancel()
        if self._local is not None:
            await self._local.close()
        for judge in self._judges.values():
            await judge.close()

    async def _work(self, first: "asyncio.Future[BuiltReward]") -> None:
        """Keeps one process: it builds the reward, makes calls, and is replaced when it has to end."""
        while True:
            process, built = await self._start_process()
            if not first.done():
                first.set_result(built)
            try:
                while await self._make_calls(process, built):
                    pass
            finally:
                if process is not None:
                    await process.end()

    async def _start_process(self) -> tuple[KeptObject | None, BuiltReward]:
        """Starts a process, which builds the reward now, so that no call's deadline includes that time.

        Returns: None, and the problem, if the reward couldn't be built.
        """
        process = None
        try:
            async with asyncio.timeout(_BUILD_S):
                process = await KeptObject.start(
                    _TARGET, self._tasks.model_dump_json(), env=scoring_environment(self._tasks)
                )
                built: BuiltReward = await process.call("build")
        except asyncio.CancelledError:
            if process is not None:
                await process.end()
            raise
        except Exception as err:  # noqa: BLE001 - for example too many processes; the next call is told
            text = f"its process {err}" if isinstance(err, ObjectLostError) else str(err)
            built = BuiltReward(text or f"it was not built within {_BUILD_S:g} s")
        if process is not None and built.problem:
            await process.end()
            process = None
        return process, built

    async def _make_calls(self, process: KeptObject | None, built: BuiltReward) -> bool:
        """Makes the next calls. Returns whether the process can make more."""
        calls = await self._next_calls()
        outcomes: Sequence[Outcome | None]
        is_reusable = False
        try:
            if process is None:
                # The first process could build the reward, so the fault lies with this one.
                what = f"the reward could not be built again: {built.problem}"
                outcomes = [Problem(f"task {call.task.id}: {what}", is_retryable=True) for call in calls]
            else:
                async with asyncio.timeout(self._deadline_s + (_CANCELLING_S if self._is_async else 0.0)):
                    outcomes = await process.call("score", [(call.task, call.text) for call in calls])
                is_final = any(isinstance(outcome, Problem) and outcome.is_final for outcome in outcomes)
                is_reusable = not is_final and process.num_calls < _CALLS_PER_PROCESS
        except asyncio.CancelledError:
            for call in calls:
                call.score.cancel()
            raise
        except Exception as err:  # noqa: BLE001 - the process had to end, and every waiting call must end
            # One of several calls is to blame; made alone, the others succeed.
            outcomes = [None] * len(calls) if len(calls) > 1 else [self._failure(calls[0], err)]
        for call, outcome in zip(calls, outcomes, strict=True):
            if outcome is None:
                call.is_alone = True
                self._waiting.put_nowait(call)
            elif not call.score.done():  # its episode still waits
                try:
                    call.score.set_result(_unwrap(outcome))
                except RolloutError as err:
                    call.score.set_exception(err)
        return is_reusable

    def _failure(self, call: _Call, err: Exception) -> Problem:
        """Says why the process of a call had to end."""
        if isinstance(err, TimeoutError):
            return late_problem(call.task, call.text, self._deadline_s)
        if isinstance(err, ObjectLostError):
            what = f"the scoring process died on a completion of {len(call.text)} characters: it {err}"
            return Problem(f"task {call.task.id}: {what}", is_retryable=True)
        return Problem(f"task {call.task.id}: the scoring process cannot be called: {err}")

    async def _next_calls(self) -> list[_Call]:
        """Waits for a call. Returns it with those that can run at the same time."""
        calls: list[_Call] = []
        while not calls or not self._waiting.empty():
            call = await self._waiting.get()
            if call.score.done():
                continue  # its episode was cancelled
            if calls and call.is_alone:
                self._waiting.put_nowait(call)
                break
            calls.append(call)
            if call.is_alone or not self._is_async or len(calls) == self._calls_at_once:
                break
        return calls


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

"""Scores completions in a pool of processes, each call under a hard deadline.

The reward is built by name inside each worker process, so nothing but the task and the text travels. A call
over its deadline is ended with its process; a process that dies is replaced; either fails one episode and
nothing else. The pool imports no torch. Rewards that only compare strings run in this process: they cannot
hang. One with a `format` can: a pattern may take exponential time on the text of a model.
"""

import asyncio
import multiprocessing
import sys

from pebble import ProcessExpired, ProcessPool

from astraflow.envs.config import ExactReward, TasksConfig
from astraflow.envs.rewards import make_reward
from astraflow.errors import ConfigError, DeadlineError, RolloutError
from astraflow.protocols import Reward
from astraflow.rollout.scorer_process import Keeper, call_reward
from astraflow.types import Task

__all__ = ["ScoringPool"]

_CALLS_A_PROCESS = 100_000
"""A worker is renewed after this many calls: rewards leak, and a new one costs a second."""

_START_S = 120.0
"""Importing a library of environments on a busy machine takes seconds, not minutes."""


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
        self._local: Reward | None = None
        self._pool: ProcessPool | None = None
        if isinstance(tasks.reward, ExactReward) and not tasks.format:
            self._local = make_reward(tasks)
        else:
            self._pool = ProcessPool(
                max_workers=num_workers,
                max_tasks=_CALLS_A_PROCESS,
                initializer=_start_worker,
                initargs=[tasks.model_dump_json(), tuple(sys.path)],
                context=multiprocessing.get_context("spawn"),
            )

    async def start(self) -> None:
        """Waits until a worker has built the reward.

        Raises: ConfigError if the reward cannot be built; DeadlineError if that takes too long.
        """
        if self._pool is None:
            return
        try:
            problem = await asyncio.wrap_future(self._pool.schedule(_problem, timeout=_START_S))
        except (TimeoutError, ProcessExpired) as err:
            raise DeadlineError(f"the scoring process did not come up within {_START_S} s: {err}") from err
        if problem:
            raise ConfigError(f"tasks.reward cannot be built: {problem}")

    async def score(self, task: Task, text: str) -> float:
        """The reward of `text`.

        Raises: RolloutError; not retryable if the reward ran over its deadline, raised, or returned no
        finite number.
        """
        if self._local is not None:
            return call_reward(self._local, task, text)
        assert self._pool is not None
        # shielded: a cancelled episode would end the worker that scores it
        future = self._pool.schedule(_score, args=[task, text], timeout=self._deadline_s)
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except TimeoutError as err:
            raise RolloutError(
                f"task {task.id}: the reward took longer than tasks.score_timeout_s = {self._deadline_s} for "
                f"a completion of {len(text)} characters",
                is_retryable=False,
            ) from err
        except ProcessExpired as err:
            raise RolloutError(
                f"task {task.id}: the scoring process died (exit code {err.exitcode}) on a completion of "
                f"{len(text)} characters"
            ) from err

    async def close(self) -> None:
        """Ends the workers; calls that still wait are cancelled."""
        if self._pool is not None:
            self._pool.stop()
            await asyncio.to_thread(self._pool.join)


# --- inside a worker process ----------------------------------------------------------------------

_keeper: list[Keeper] = []
"""The worker's keeper: one per process, made by the pool's initializer."""


def _start_worker(tasks_json: str, path: tuple[str, ...]) -> None:
    _keeper[:] = [Keeper(tasks_json, path)]
    _problem()  # builds the reward now, off the clock of the first call


def _problem() -> str:
    return _keeper[0].problem()


def _score(task: Task, text: str) -> float:
    return _keeper[0].score(task, text)

"""Scores completions in processes of their own, each call under a hard deadline.

    ScoringPool (event loop) -> keeper (the pool's worker) -> reward (its child) -> whatever it starts

The reward is built by name in its process, so only the task and the text travel, and no torch is imported. A
call over its deadline is ended with its process; a process that dies is replaced; either fails one episode
and nothing else. Rewards that only compare strings run in this process, since they cannot hang. One with a
`format` can: a pattern may take exponential time on the text of a model.

The keeper runs none of the user's code. It is the subreaper of everything below it: a process that left its
parent or its session becomes the keeper's child, so none can escape. The keeper kills all of them when the
reward's process dies, when the pool ends the keeper (a call over its deadline, the end of the service), and
when the service itself is killed. Only a keeper that is itself killed by SIGKILL leaves some behind.
"""

import asyncio
import contextlib
import ctypes
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Collection
from multiprocessing import connection
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessPool

from astraflow.config import Use
from astraflow.envs.config import ExactReward, TasksConfig
from astraflow.envs.rewards import make_reward
from astraflow.errors import ConfigError, DeadlineError, Error, RolloutError
from astraflow.own_code import described
from astraflow.protocols import Reward
from astraflow.types import Task

__all__ = [
    "ScoringPool",
    "call_reward",
]

_CALLS_PER_PROCESS = 100_000
"""A worker is renewed after this many calls: rewards leak, and a new one costs a second."""

_START_S = 120.0
"""Importing a library of environments on a busy machine takes seconds, not minutes."""
_PR_SET_PDEATHSIG = 1
"""`prctl` option of Linux: the signal that a process gets when its parent dies."""
_PR_SET_CHILD_SUBREAPER = 36
"""`prctl` option of Linux: orphans below a process become its children."""
_KILLING_S = 2.0
"""The pool waits 3 s after SIGTERM before it kills the keeper."""
_SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIALS")


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
                max_tasks=_CALLS_PER_PROCESS,
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


def call_reward(reward: Reward, task: Task, text: str) -> float:
    """The reward of a text. Raises: RolloutError, not retryable, if it raises or returns no finite number.

    An `exit()` of the reward, or any other exception that is no Exception, is a failure like the others.
    """
    try:
        value: object = reward(task, text)
    except BaseException as error:
        # the user's exception may not survive the way back, so ours goes instead
        raise RolloutError(
            f"task {task.id}: the reward raised {described(error)}", is_retryable=False
        ) from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RolloutError(
            f"task {task.id}: the reward returned {value!r}; expected a finite number", is_retryable=False
        )
    return float(value)


# --- in a worker of the pool: the keeper ------------------------------------------------------------


class _Keeper:
    """Scores by a process of its own, and ends all that the process started.

    Example: `keeper = _Keeper(tasks_json, path)`; `keeper.problem()`; `keeper.score(task, "5")`. One per
    process, in its main thread.
    """

    def __init__(self, tasks_json: str, path: tuple[str, ...]) -> None:
        self._tasks_json = tasks_json
        self._path = path
        self._pid = 0
        self._pipe: Connection | None = None
        self._problem = ""
        if sys.platform == "linux":
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._end)

    def problem(self) -> str:
        """Why the reward cannot be built; empty if it can."""
        self._pipe_to_reward()
        return self._problem

    def score(self, task: Task, text: str) -> float:
        """The reward of a text. Raises: RolloutError.

        If the process of the reward dies, so does this one, with its code: the pool starts another, off the
        clock of any call.
        """
        pipe = self._pipe_to_reward()
        if self._problem:
            raise RolloutError(f"task {task.id}: {self._problem}", is_retryable=False)
        try:
            pipe.send((task, text))
            value, problem = self._reply(pipe)
        except (EOFError, OSError):
            code = self._clean_up()
            os._exit(code if code >= 0 else 128 - code)
        if problem:
            raise RolloutError(problem, is_retryable=False)
        return float(value)

    def _pipe_to_reward(self) -> Connection:
        if self._pipe is not None:
            return self._pipe
        ours, theirs = multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _run_reward(theirs, self._tasks_json, self._path)
        theirs.close()
        self._pid = pid
        self._pipe = ours
        try:
            self._problem = self._reply(ours)
        except (EOFError, OSError):
            code = self._clean_up()
            self._problem = f"its process ended with {code} while the reward was built"
            self._pipe = ours
        return ours

    def _reply(self, pipe: Connection) -> Any:
        """What the process of the reward says. Raises: EOFError if it died.

        The end of the pipe alone would not tell: what the reward started may hold it open.
        """
        if not hasattr(os, "pidfd_open"):
            return pipe.recv()
        ended = os.pidfd_open(self._pid)
        try:
            if pipe not in connection.wait([pipe, ended]):
                raise EOFError
            return pipe.recv()
        finally:
            os.close(ended)

    def _clean_up(self) -> int:
        """Ends what is left of a reward's process; returns its exit code, negative for a signal."""
        _, status = os.waitpid(self._pid, 0)
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None
        _kill_descendants()
        return os.waitstatus_to_exitcode(status)

    def _end(self, *_: object) -> None:
        _kill_descendants()
        os._exit(1)


_keeper: list[_Keeper] = []
"""The worker's only keeper, made by the pool's initializer."""


def _start_worker(tasks_json: str, path: tuple[str, ...]) -> None:
    _keeper[:] = [_Keeper(tasks_json, path)]
    _problem()  # builds the reward now, off the clock of the first call


def _problem() -> str:
    return _keeper[0].problem()


def _score(task: Task, text: str) -> float:
    return _keeper[0].score(task, text)


# --- the process of the reward --------------------------------------------------------------------


def _run_reward(pipe: Connection, tasks_json: str, path: tuple[str, ...]) -> None:
    """Builds the reward and answers calls until the keeper is gone. Never returns."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        sys.path[:] = path
        tasks = TasksConfig.model_validate_json(tasks_json)
        is_of_the_user = isinstance(tasks.reward, Use) or bool(tasks.environments)
        _forget_secrets(() if is_of_the_user else _SECRET_ENDINGS)
        try:
            reward = make_reward(tasks)
        except BaseException as error:  # noqa: BLE001 - code of the user's; it is told, and no call is made
            pipe.send(str(error) if isinstance(error, Error) else described(error))
            os._exit(0)
        pipe.send("")
        while True:
            task, text = pipe.recv()
            try:
                pipe.send((call_reward(reward, task, text), ""))
            except RolloutError as error:
                pipe.send((0.0, str(error)))
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _forget_secrets(endings: Collection[str]) -> None:
    """Removes from the environment what is meant for the service, and names that end like secrets."""
    for name in list(os.environ):
        if name.startswith("ASTRAFLOW_") or name.upper().endswith(tuple(endings)):
            del os.environ[name]


# --- ending processes -----------------------------------------------------------------------------


def _kill_descendants() -> None:
    """Kills all below this process until none is left: the children of the dead become its own."""
    until_s = time.monotonic() + _KILLING_S
    while (below := _descendants()) and time.monotonic() < until_s:
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _descendants() -> list[int]:
    """Processes below this one that have not ended, by the kernel's table."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            if state not in {"Z", "X"} or int(parent) == os.getpid():
                parents[int(stat.parent.name)] = int(parent)
    below: list[int] = []
    level = {os.getpid()}
    while level:
        level = {pid for pid, parent in parents.items() if parent in level}
        below += level
    return below

"""The processes that score: in each worker of the pool a keeper, below it the process of the reward.

    keeper (the pool's worker) -> reward (its child) -> whatever it starts

The keeper runs none of the user's code. It is the subreaper of everything below it: a process that left its
parent or its session becomes the keeper's child, so none can escape. The keeper kills all of them when the
reward's process dies, when the pool ends the keeper (a call over its deadline, the end of the service), and
when the service itself is killed. Only a keeper that is itself killed by SIGKILL leaves some behind.

A worker that cannot be trusted any longer does not score again: after a comparison that was ended in the
middle, or a scorer of ours that failed, it answers the call and then refuses the next one with the exit code
`RENEWED`. The pool starts another worker and gives it that call.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from astraflow.errors import Error, LateScoreError, RolloutError, ScorerError
from astraflow.protocols import Score
from astraflow.tasks.config import TasksConfig
from astraflow.tasks.rewards import RecipeReward, is_waiting, keeps_keys, make_reward
from astraflow.types import Task
from astraflow.user_input.own_code import described

__all__ = [
    "BUILD_S",
    "RENEWED",
    "BuiltReward",
    "Outcome",
    "Problem",
    "built_reward",
    "call_reward",
    "late",
    "score_calls",
    "start_worker",
]

BUILD_S = 600.0
"""Time to import the libraries of a reward and to build it. It takes seconds, but a slow disk and a busy
machine take a multiple of that."""
RENEWED = 75
"""Exit code of a worker that wants to be replaced before it scores a call (`EX_TEMPFAIL`)."""
_PR_SET_PDEATHSIG = 1
"""`prctl` option of Linux: the signal that a process gets when its parent dies."""
_PR_SET_CHILD_SUBREAPER = 36
"""`prctl` option of Linux: orphans below a process become its children."""
_KILLING_S = 2.0
"""The pool waits 3 s after SIGTERM before it kills the keeper."""
_SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIALS")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a call has no score."""

    text: str
    is_retryable: bool = False
    is_late: bool = False
    """The reward took too long."""
    is_final: bool = False
    """The process that found it must not score again."""


@dataclass(frozen=True, slots=True)
class BuiltReward:
    """What the service must know of the reward that a process has built."""

    problem: str
    """Why it cannot be built; empty if it can."""
    is_async: bool = False


Outcome: TypeAlias = Score | Problem


def call_reward(reward: RecipeReward, task: Task, text: str) -> Score:
    """The score of a text. Raises: RolloutError if the reward raises or returns no finite number.

    An `exit()` of the reward, or any other exception that is no Exception, is a failure like the others.
    """
    try:
        return reward(task, text)
    except BaseException as error:
        raise _failure(task, error) from error


def _failure(task: Task, error: BaseException) -> RolloutError:
    """The user's exception may not survive the way to the service, so ours goes instead."""
    if isinstance(error, RolloutError):
        return error
    return RolloutError(f"task {task.id}: the reward raised {described(error)}", is_retryable=False)


# --- in a worker of the pool: the keeper ------------------------------------------------------------


class _Keeper:
    """Scores by a process of its own, and ends all that the process started.

    Example: `keeper = _Keeper(tasks_json, path)`; `keeper.built()`; `keeper.score([(task, "5")])`. One
    per process, in its main thread.
    """

    def __init__(self, tasks_json: str, path: tuple[str, ...]) -> None:
        self._tasks_json = tasks_json
        self._path = path
        self._pid = 0
        self._pipe: Connection | None = None
        self._built = BuiltReward("it is not built yet")
        self._is_used_up = False
        if sys.platform == "linux":
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._end_by_signal)

    def built(self) -> BuiltReward:
        """What is known of the reward, once it is built."""
        self._pipe_to_reward()
        return self._built

    def score(self, calls: "Sequence[tuple[Task, str]]") -> list[Outcome]:
        """The scores of some texts.

        If the process of the reward dies, so does this one, with its code: the pool starts another, off the
        clock of any call.
        """
        if self._is_used_up:
            self._end(RENEWED)
        pipe = self._pipe_to_reward()
        if self._built.problem:
            # The pool's first worker could build it, so what failed is this worker.
            self._is_used_up = True
            what = f"the reward could not be built again: {self._built.problem}"
            return [Problem(f"task {task.id}: {what}", is_retryable=True) for task, _ in calls]
        try:
            pipe.send(calls)
            outcomes: list[Outcome] = self._reply(pipe)
            self._is_used_up = any(isinstance(found, Problem) and found.is_final for found in outcomes)
            return outcomes
        except (EOFError, OSError):
            code = self._clean_up()
            os._exit(code if code >= 0 else 128 - code)

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
            self._built = self._reply(ours, BUILD_S)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            self._clean_up()
            self._built = BuiltReward(f"it was not built within {BUILD_S:g} s")
            self._pipe = ours
        except (EOFError, OSError):
            code = self._clean_up()
            self._built = BuiltReward(f"its process ended with {code} while the reward was built")
            self._pipe = ours
        return ours

    def _reply(self, pipe: Connection, deadline_s: float | None = None) -> Any:
        """What the process of the reward says. Raises: EOFError if it died; TimeoutError.

        The end of the pipe alone would not tell: what the reward started may hold it open.
        """
        ended = [os.pidfd_open(self._pid)] if hasattr(os, "pidfd_open") else []
        try:
            ready = connection.wait([pipe, *ended], deadline_s)
            if not ready:
                raise TimeoutError
            if pipe not in ready:
                raise EOFError
            return pipe.recv()
        finally:
            for descriptor in ended:
                os.close(descriptor)

    def _clean_up(self) -> int:
        """Ends what is left of a reward's process; returns its exit code, negative for a signal."""
        _, status = os.waitpid(self._pid, 0)
        if self._pipe is not None:
            self._pipe.close()
        self._pipe = None
        _kill_descendants()
        return os.waitstatus_to_exitcode(status)

    def _end_by_signal(self, *_: object) -> None:
        self._end(1)

    def _end(self, code: int) -> NoReturn:
        _kill_descendants()
        os._exit(code)


_keeper: list[_Keeper] = []
"""The worker's only keeper, made by the pool's initializer."""


def start_worker(tasks_json: str, path: tuple[str, ...]) -> None:
    """Begins a worker of the pool: its reward is built now, off the clock of the first call."""
    _keeper[:] = [_Keeper(tasks_json, path)]
    built_reward()


def built_reward() -> BuiltReward:
    """What is known of the worker's reward."""
    return _keeper[0].built()


def score_calls(calls: Sequence[tuple[Task, str]]) -> list[Outcome]:
    """Scores some texts in the worker."""
    return _keeper[0].score(calls)


# --- the process of the reward --------------------------------------------------------------------


def _run_reward(pipe: Connection, tasks_json: str, path: tuple[str, ...]) -> None:
    """Builds the reward and answers calls until the keeper is gone. Never returns."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        sys.path[:] = path
        tasks = TasksConfig.model_validate_json(tasks_json)
        _forget_secrets(() if keeps_keys(tasks) else _SECRET_ENDINGS)
        with asyncio.Runner() as loop:  # one for all calls: clients that a reward keeps belong to a loop
            try:
                reward = make_reward(tasks)
                reward.load()
                loop.run(reward.open())
            except BaseException as error:  # noqa: BLE001 - code of the user's; it is told, and no call is made
                pipe.send(BuiltReward(str(error) if isinstance(error, Error) else described(error)))
                os._exit(0)
            pipe.send(BuiltReward("", reward.is_async))
            while True:
                pipe.send(_scored(reward, pipe.recv(), loop, tasks.score_timeout_s))
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _scored(
    reward: RecipeReward, calls: Sequence[tuple[Task, str]], loop: asyncio.Runner, deadline_s: float
) -> list[Outcome]:
    """The outcome of each call; what is `async` runs at the same time."""
    started = [_started(reward, task, text) for task, text in calls]
    if any(isinstance(values, list) and is_waiting(values) for values in started):
        started = loop.run(_waited(reward, calls, started, deadline_s))
    return [
        values if isinstance(values, Problem) else _total(reward, task, text, values)
        for (task, text), values in zip(calls, started, strict=True)
    ]


def _started(reward: RecipeReward, task: Task, text: str) -> list[object] | Problem:
    try:
        return reward.start(task, text)
    except BaseException as error:  # noqa: BLE001 - code of the user's
        return _problem(task, error)


async def _waited(
    reward: RecipeReward,
    calls: Sequence[tuple[Task, str]],
    started: Sequence[list[object] | Problem],
    deadline_s: float,
) -> list[list[object] | Problem]:
    async def one(task: Task, text: str, values: list[object] | Problem) -> list[object] | Problem:
        if isinstance(values, Problem):
            return values
        timeout = asyncio.timeout(deadline_s)
        try:
            async with timeout:
                return await reward.waited(task, values)
        except BaseException as error:  # noqa: BLE001 - code of the user's
            return late(task, text, deadline_s) if timeout.expired() else _problem(task, error)

    work = [one(task, text, values) for (task, text), values in zip(calls, started, strict=True)]
    return await asyncio.gather(*work)


def _total(reward: RecipeReward, task: Task, text: str, values: list[object]) -> Outcome:
    try:
        return reward.total(task, text, values)
    except BaseException as error:  # noqa: BLE001 - a value of the user's may raise when it is read
        return _problem(task, error)


def _problem(task: Task, error: BaseException) -> Problem:
    failure = _failure(task, error)
    is_late = isinstance(failure, LateScoreError)
    return Problem(
        str(failure),
        failure.is_retryable,
        is_late=is_late,
        is_final=is_late or isinstance(failure, ScorerError),
    )


def late(task: Task, text: str, deadline_s: float) -> Problem:
    """Why a call over its deadline has no score."""
    message = (
        f"task {task.id}: the reward took longer than tasks.score_timeout_s = {deadline_s} for a completion "
        f"of {len(text)} characters"
    )
    return Problem(message, is_late=True)


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

"""The scoring processes: each worker of the pool is a keeper, whose child process runs the reward.

    keeper (the pool's worker) -> reward (its child) -> whatever it starts

Each call and its answer have a number, so no answer is taken for that of another call. A fork of the reward's
process ends when it returns from the user's code: it must not answer, too.

The keeper runs none of the user's code. It is the subreaper of everything below it: a process that leaves its
parent or its session becomes the keeper's child, so none can escape. The keeper kills all of them when the
reward's process dies, when the pool ends the keeper (because a call exceeded its deadline, or the service
ends), and when the service itself is killed. Only a keeper that is killed by SIGKILL leaves processes behind.

A worker that may have a corrupt state does not score again. This is so after a comparison was interrupted, or
a built-in scorer failed. The worker answers that call, and then refuses the next one with the exit code
`RENEWED`. The pool starts another worker and gives it the refused call.
"""

import asyncio
import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Collection, Generator, Sequence
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
from astraflow.user_input.own_code import describe_error, ending_forks

__all__ = [
    "BUILD_S",
    "RENEWED",
    "BuiltReward",
    "Outcome",
    "Problem",
    "build_reward",
    "call_reward",
    "late_problem",
    "score_calls",
    "start_worker",
]

_log = logging.getLogger(__name__)

BUILD_S = 600.0
"""Time limit for importing the libraries of a reward and building it. It usually takes seconds, but much
longer with a slow disk or a busy machine."""
RENEWED = 75
"""Exit code of a worker that has to be replaced before another call (`EX_TEMPFAIL`)."""
_PR_SET_PDEATHSIG = 1
"""`prctl` option of Linux: the signal that a process gets when its parent dies."""
_PR_SET_CHILD_SUBREAPER = 36
"""`prctl` option of Linux: orphans below a process become its children."""
_KILLING_S = 2.0
"""Time limit for killing descendants. The pool waits 3 s after SIGTERM before it kills the keeper."""
_SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIALS")


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a call has no score."""

    text: str
    is_retryable: bool = False
    is_late: bool = False
    """The reward took too long."""
    is_final: bool = False
    """The process must not score again."""


@dataclass(frozen=True, slots=True)
class BuiltReward:
    """What the service has to know about the reward that a process has built."""

    problem: str
    """Why the reward could not be built; empty if it was."""
    is_async: bool = False


Outcome: TypeAlias = Score | Problem


def call_reward(reward: RecipeReward, task: Task, text: str) -> Score:
    """Scores a text. Raises: RolloutError if the reward raises, or doesn't return a finite number.

    An `exit()` in the reward, or any other BaseException, is a failure too.
    """
    try:
        return reward(task, text)
    except BaseException as error:
        raise _to_rollout_error(task, error) from error


def _to_rollout_error(task: Task, error: BaseException) -> RolloutError:
    """Replaces the user's exception, which may not survive being sent to the service."""
    if isinstance(error, RolloutError):
        return error
    return RolloutError(f"task {task.id}: the reward raised {describe_error(error)}", is_retryable=False)


class _Keeper:
    """Scores in a child process, and ends everything that the child has started.

    Example: `keeper = _Keeper(tasks_json, path)`; `keeper.build()`; `keeper.score([(task, "5")])`. There is
    one per process, in its main thread.
    """

    def __init__(self, tasks_json: str, path: tuple[str, ...]) -> None:
        self._tasks_json = tasks_json
        self._path = path
        self._pid = 0
        self._pipe: Connection | None = None
        self._num_calls = 0
        """Number of the last call of the reward's process; 0: building the reward."""
        self._built = BuiltReward("it is not built yet")
        self._is_used_up = False
        if sys.platform == "linux":
            libc = ctypes.CDLL(None)
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGTERM, self._end_by_signal)

    def build(self) -> BuiltReward:
        """Builds the reward unless it is built already. Returns: what is known about it."""
        self._connect()
        return self._built

    def score(self, calls: "Sequence[tuple[Task, str]]") -> list[Outcome]:
        """Scores some texts.

        If the process of the reward dies, this one ends too, with the same exit code. The pool then starts
        another worker, whose start doesn't count against the deadline of any call.
        """
        if self._is_used_up:
            self._end(RENEWED)
        pipe = self._connect()
        if self._built.problem:
            # The pool's first worker could build the reward, so the fault lies with this worker.
            self._is_used_up = True
            what = f"the reward could not be built again: {self._built.problem}"
            return [Problem(f"task {task.id}: {what}", is_retryable=True) for task, _ in calls]
        try:
            self._num_calls += 1
            pipe.send((self._num_calls, calls))
            outcomes: list[Outcome] = self._receive(pipe)
            self._is_used_up = any(isinstance(found, Problem) and found.is_final for found in outcomes)
            return outcomes
        except Exception:  # noqa: BLE001 - the process died, or sent something that isn't an answer
            code = self._clean_up() or 1  # the pool would take 0 for the end of an idle worker
            os._exit(code if code >= 0 else 128 - code)

    def _connect(self) -> Connection:
        """Returns the pipe to the reward's process, which is started unless it runs."""
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
            self._built = self._receive(ours, BUILD_S)
        except Exception as err:  # noqa: BLE001 - as in `score`
            code = self._clean_up()
            is_late = isinstance(err, TimeoutError)
            what = f"was not built within {BUILD_S:g} s" if is_late else f"ended its process with {code}"
            self._built = BuiltReward(f"it {what}")
            self._pipe = ours
        return ours

    def _receive(self, pipe: Connection, deadline_s: float | None = None) -> Any:
        """Receives the answer to the last call. Raises: EOFError if the process died; TimeoutError; whatever
        an invalid answer raises.

        It watches the process too, because a child of the reward may hold the pipe open.
        """
        with _watched(self._pid) as ended:
            while True:
                ready = connection.wait([pipe, *ended], deadline_s)
                if not ready:
                    raise TimeoutError
                if pipe not in ready:
                    raise EOFError
                number, answer = pipe.recv()
                if number == self._num_calls:
                    return answer
                _log.warning("dropped an answer of the reward to call %s, not %d", number, self._num_calls)

    def _clean_up(self) -> int:
        """Ends the reward's process, which may still run without its pipe, and what is left of it. Returns:
        its exit code, negative for a signal."""
        with _watched(self._pid) as ended:
            connection.wait(ended, _KILLING_S / 4)
        os.kill(self._pid, signal.SIGKILL)
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


@contextlib.contextmanager
def _watched(pid: int) -> Generator[list[int]]:
    """Yields a descriptor that is readable once the process has ended; none if the system has no such."""
    ended = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else []
    try:
        yield ended
    finally:
        for descriptor in ended:
            os.close(descriptor)


_keeper: list[_Keeper] = []
"""The worker's only keeper, which the pool's initializer makes."""


def start_worker(tasks_json: str, path: tuple[str, ...]) -> None:
    """Initializes a worker of the pool. The reward is built now, so no call's deadline includes that time."""
    _keeper[:] = [_Keeper(tasks_json, path)]
    build_reward()


def build_reward() -> BuiltReward:
    """Builds the worker's reward unless it is built already. Returns: what is known about it."""
    return _keeper[0].build()


def score_calls(calls: Sequence[tuple[Task, str]]) -> list[Outcome]:
    """Scores some texts in the worker."""
    return _keeper[0].score(calls)


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
                with ending_forks():
                    reward = make_reward(tasks)
                    reward.load()
                    loop.run(reward.open())
            except BaseException as error:  # noqa: BLE001 - the user's code; the service gets the message
                problem = str(error) if isinstance(error, Error) else describe_error(error)
                pipe.send((0, BuiltReward(problem)))
                os._exit(0)
            pipe.send((0, BuiltReward("", reward.is_async)))
            while True:
                number, calls = pipe.recv()
                pipe.send((number, _score(reward, calls, loop, tasks.score_timeout_s)))
    except (EOFError, OSError):
        os._exit(0)
    finally:
        os._exit(1)


def _score(
    reward: RecipeReward, calls: Sequence[tuple[Task, str]], loop: asyncio.Runner, deadline_s: float
) -> list[Outcome]:
    """Makes calls. Their `async` parts run at the same time."""
    started = [_start_call(reward, task, text) for task, text in calls]
    if any(isinstance(values, list) and is_waiting(values) for values in started):
        started = loop.run(_await_calls(reward, calls, started, deadline_s))
    return [
        values if isinstance(values, Problem) else _add_up(reward, task, text, values)
        for (task, text), values in zip(calls, started, strict=True)
    ]


def _start_call(reward: RecipeReward, task: Task, text: str) -> list[object] | Problem:
    try:
        with ending_forks():
            return reward.start(task, text)
    except BaseException as error:  # noqa: BLE001 - the user's code
        return _make_problem(task, error)


async def _await_calls(
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
                with ending_forks():
                    return await reward.waited(task, values)
        except BaseException as error:  # noqa: BLE001 - the user's code
            if timeout.expired():
                return late_problem(task, text, deadline_s)
            return _make_problem(task, error)

    work = [one(task, text, values) for (task, text), values in zip(calls, started, strict=True)]
    return await asyncio.gather(*work)


def _add_up(reward: RecipeReward, task: Task, text: str, values: list[object]) -> Outcome:
    try:
        with ending_forks():
            return reward.total(task, text, values)
    except BaseException as error:  # noqa: BLE001 - reading a user's value may raise
        return _make_problem(task, error)


def _make_problem(task: Task, error: BaseException) -> Problem:
    failure = _to_rollout_error(task, error)
    is_late = isinstance(failure, LateScoreError)
    return Problem(
        str(failure),
        failure.is_retryable,
        is_late=is_late,
        is_final=is_late or isinstance(failure, ScorerError),
    )


def late_problem(task: Task, text: str, deadline_s: float) -> Problem:
    """Makes the problem of a call that exceeded its deadline."""
    message = (
        f"task {task.id}: the reward took longer than tasks.score_timeout_s = {deadline_s} for a completion "
        f"of {len(text)} characters"
    )
    return Problem(message, is_late=True)


def _forget_secrets(endings: Collection[str]) -> None:
    """Removes environment variables that are meant for the service, or whose names end like secrets."""
    for name in list(os.environ):
        if name.startswith("ASTRAFLOW_") or name.upper().endswith(tuple(endings)):
            del os.environ[name]


def _kill_descendants() -> None:
    """Kills all processes below this one until none is left. Orphans become children of this process."""
    until_s = time.monotonic() + _KILLING_S
    while (below := _descendants()) and time.monotonic() < until_s:
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _descendants() -> list[int]:
    """The running processes below this one, from /proc."""
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

"""The process in which rewards run, and what ends everything that they started.

    worker of the pool (keeper) -> pipe -> process of the reward -> whatever the reward starts

The keeper runs no code of the user's. It is the subreaper of all below it: a process that left its parent or
its session becomes the keeper's child, so that none can escape. When the reward's process dies, when the
pool ends the keeper (a call over its deadline, the end of the service), or when the service itself is killed,
the keeper kills all of them. Only a keeper that is itself killed by SIGKILL leaves some behind.
"""

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

from astraflow.config import Use
from astraflow.envs.config import TasksConfig
from astraflow.envs.rewards import make_reward
from astraflow.errors import RolloutError
from astraflow.protocols import Reward
from astraflow.types import Task

__all__ = ["Keeper", "call_reward"]

_PR_SET_PDEATHSIG = 1
"""`prctl` option of Linux: the signal that a process gets when its parent dies."""
_PR_SET_CHILD_SUBREAPER = 36
"""`prctl` option of Linux: orphans below a process become its children."""
_KILLING_S = 2.0
"""The pool waits 3 s after SIGTERM before it kills the keeper."""
_SECRET_ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIALS")


class Keeper:
    """Scores by a process of its own, and ends all that the process started.

    Example: `keeper = Keeper(tasks_json, path)`; `keeper.problem()`; `keeper.score(task, "5")`. One per
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
        self._pid, self._pipe = pid, ours
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


def call_reward(reward: Reward, task: Task, text: str) -> float:
    """The reward of a text. Raises: RolloutError, not retryable, if it raises or returns no finite number.

    An `exit()` of the reward, or any other exception that is no Exception, is a failure like the others.
    """
    try:
        value: object = reward(task, text)
    except BaseException as error:
        # the user's exception may not survive the way back, so ours goes instead
        raise RolloutError(
            f"task {task.id}: the reward raised {type(error).__name__}: {error}", is_retryable=False
        ) from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise RolloutError(
            f"task {task.id}: the reward returned {value!r}; expected a finite number", is_retryable=False
        )
    return float(value)


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
            pipe.send(f"{type(error).__name__}: {error}")
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

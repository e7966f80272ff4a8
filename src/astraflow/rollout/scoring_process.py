"""What runs in a scoring process (a `service.kept_object`): builds the reward, and scores with it.

A fork of the process ends when it returns from the user's code: it must not answer, too.
"""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from astraflow.errors import Error, LateScoreError, RolloutError, ScorerError
from astraflow.protocols import Score
from astraflow.tasks.config import TasksConfig
from astraflow.tasks.rewards import RecipeReward, is_waiting, keeps_keys, make_reward
from astraflow.types import Task
from astraflow.user_input.own_code import describe_error, ending_forks

__all__ = [
    "BuiltReward",
    "Outcome",
    "Problem",
    "ScoringProcess",
    "call_reward",
    "late_problem",
    "scoring_environment",
]

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
_T = TypeVar("_T")


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


class ScoringProcess:
    """The object of a scoring process. Example: `ScoringProcess(tasks_json).build()`."""

    def __init__(self, tasks_json: str) -> None:
        self._tasks = TasksConfig.model_validate_json(tasks_json)
        self._loop = asyncio.Runner()  # one for all calls: clients that a reward keeps belong to a loop
        self._reward: RecipeReward

    def build(self) -> BuiltReward:
        """Builds the reward."""
        try:
            with ending_forks():
                self._reward = make_reward(self._tasks)
                self._reward.load()
                self._loop.run(self._reward.open())
        except BaseException as error:  # noqa: BLE001 - the user's code; the service gets the message
            return BuiltReward(str(error) if isinstance(error, Error) else describe_error(error))
        return BuiltReward("", self._reward.is_async)

    def score(self, calls: Sequence[tuple[Task, str]]) -> list[Outcome]:
        """Scores some texts. The `async` parts of the reward run at the same time."""
        reward = self._reward
        started = [_guarded(task, partial(reward.start, task, text)) for task, text in calls]
        if any(isinstance(values, list) and is_waiting(values) for values in started):
            started = self._loop.run(self._await_all(calls, started))
        return [
            values
            if isinstance(values, Problem)
            else _guarded(task, partial(reward.total, task, text, values))
            for (task, text), values in zip(calls, started, strict=True)
        ]

    async def _await_all(
        self, calls: Sequence[tuple[Task, str]], started: Sequence[list[object] | Problem]
    ) -> list[list[object] | Problem]:
        work = [self._await(task, text, values) for (task, text), values in zip(calls, started, strict=True)]
        return await asyncio.gather(*work)

    async def _await(self, task: Task, text: str, values: list[object] | Problem) -> list[object] | Problem:
        if isinstance(values, Problem):
            return values
        deadline_s = self._tasks.score_timeout_s
        timeout = asyncio.timeout(deadline_s)
        try:
            async with timeout:
                with ending_forks():
                    return await self._reward.waited(task, values)
        except BaseException as error:  # noqa: BLE001 - the user's code
            if timeout.expired():
                return late_problem(task, text, deadline_s)
            return _make_problem(task, error)


def scoring_environment(tasks: TasksConfig) -> dict[str, str]:
    """The environment variables of a scoring process: none that are meant for the service, and, unless the
    reward needs keys, none whose names end like those of secrets."""
    endings = () if keeps_keys(tasks) else _SECRET_ENDINGS
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("ASTRAFLOW_") and not name.upper().endswith(endings)
    }


def _guarded(task: Task, step: Callable[[], _T]) -> _T | Problem:
    """Runs a step of a call, in which the user's code may raise anything."""
    try:
        with ending_forks():
            return step()
    except BaseException as error:  # noqa: BLE001 - the user's code
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

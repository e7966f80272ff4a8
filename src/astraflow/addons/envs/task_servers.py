"""The base class of environments whose episodes run on a server: numbered tasks in two splits, and waiting
while the server is full.

An error of the server fails the episode. It is never a reward of 0.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import InteractiveEnvironment
from astraflow.types import Task
from astraflow.types.bounds import MAX_REWARD
from astraflow.user_input.splits import is_heldout

__all__ = ["MAX_QUOTED", "ServerFullError", "TaskServer", "is_reward"]

MAX_QUOTED = 200
"""Number of characters of an invalid answer that an error message quotes."""
_MAX_TASKS = 1_000_000
_FIRST_WAIT_S = 0.1
_LONGEST_WAIT_S = 2.0
"""Bounds of the wait between two attempts while the server is full. Each wait is twice the one before."""

_T = TypeVar("_T")


class ServerFullError(RolloutError):
    """The server has no room for another episode now. The same request may succeed later."""


class TaskServer(InteractiveEnvironment):
    """Tasks 0 to `num_tasks - 1` of a server, in the splits `train` and `heldout`.

    A subclass runs the episodes. It begins one with `await self._begin_when_free(begin)`.
    """

    def __init__(
        self,
        url: str,
        *,
        schemes: Sequence[str],
        num_tasks: int,
        heldout_frac: float,
        wait_s: float,
        call_s: float,
    ) -> None:
        """`schemes`: how `url` may begin, such as `https://`. `heldout_frac`: share of the tasks held out.
        `wait_s`: longest wait while the server is full. `call_s`: longest wait for one answer.

        Raises: ConfigError.
        """
        if not url.startswith(tuple(schemes)):
            raise ConfigError(f"url = {url!r} does not begin with {' or '.join(schemes)}")
        if not 1 <= num_tasks <= _MAX_TASKS:
            raise ConfigError(f"{num_tasks} tasks: expected a number from 1 to {_MAX_TASKS:,}")
        if not 0 < heldout_frac < 1:
            raise ConfigError(f"heldout_frac = {heldout_frac} is not between 0 and 1, so a split is empty")
        if wait_s < 0 or call_s <= 0:
            raise ConfigError(f"wait_s = {wait_s}, call_s = {call_s}: at least 0 and more than 0 are needed")
        self._url = url.rstrip("/")
        self._num_tasks = num_tasks
        self._heldout_frac = heldout_frac
        self._wait_s = wait_s
        self._call_s = call_s

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in {"train", "heldout"}:
            raise ConfigError(f"split = {split!r} is not one of: train, heldout")
        # A task's name for people, which also determines its split.
        prompts = {number: f"{self._url} {number}" for number in range(self._num_tasks)}
        return [
            Task(id=str(number), source=split, prompt=prompt, spec=str(number))
            for number, prompt in prompts.items()
            if is_heldout(prompt, frac=self._heldout_frac) is (split == "heldout")
        ]

    async def _begin_when_free(self, begin: Callable[[], Awaitable[_T]]) -> _T:
        """Calls `begin`, and calls it again for up to `wait_s` while it raises ServerFullError.

        Raises: what `begin` raises.
        """
        deadline_s = time.monotonic() + self._wait_s
        wait_s = _FIRST_WAIT_S
        while True:
            try:
                return await begin()
            except ServerFullError as err:
                if time.monotonic() + wait_s > deadline_s:
                    raise ServerFullError(f"{err} (waited for {self._wait_s:.0f} s)") from err
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def is_reward(value: Any) -> bool:
    """Whether a value is a number that can be a reward."""
    return isinstance(value, int | float) and abs(value) <= MAX_REWARD  # false for NaN

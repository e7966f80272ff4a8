"""Keeps an `exit()` within an episode: of what its workflow starts as tasks, none may end the process.

asyncio raises SystemExit and KeyboardInterrupt of a task out of the event loop itself, whoever awaits the
task: one `sys.exit()` in a library that a workflow calls in a task would end the service and all episodes on
it. Within `guarded_tasks` every new task turns them into an `EpisodeExitError`, which fails the episode like
any other exception. It holds for tasks made by `create_task`, `gather`, task groups and `ensure_future`, and
for tasks that such tasks make; for eager ones as well.
"""

import asyncio
import contextlib
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from typing import Any, NoReturn

from astraflow.errors import RolloutError

__all__ = ["EpisodeExitError", "guarded_tasks"]

_is_guarded: ContextVar[bool] = ContextVar("astraflow_is_guarded", default=False)
"""Whether tasks that are made here belong to an episode; tasks inherit it."""


class EpisodeExitError(RolloutError):
    """A task of an episode called `exit()`, or raised KeyboardInterrupt."""


@contextlib.contextmanager
def guarded_tasks() -> Generator[None]:
    """Tasks that are made within cannot end the process. Needs a running event loop."""
    _install(asyncio.get_running_loop())
    token = _is_guarded.set(True)
    try:
        yield
    finally:
        _is_guarded.reset(token)


def _install(loop: asyncio.AbstractEventLoop) -> None:
    """Puts the guard before the loop's task factory, once; it stays, and acts in episodes only."""
    factory = loop.get_task_factory()
    if not isinstance(factory, _Factory):
        loop.set_task_factory(_Factory(factory or asyncio.Task))  # pyright: ignore[reportArgumentType] - typed for any awaitable; loops give coroutines


class _Factory:
    """A task factory that guards the coroutines of episodes, and leaves all others to the former one."""

    def __init__(self, make: Any) -> None:
        """`make`: the former factory, or `asyncio.Task`, called in its place."""
        self._make = make

    def __call__(
        self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], **options: Any
    ) -> "asyncio.Future[Any]":
        if _is_guarded.get() and not isinstance(work, _Guarded):
            work = _Guarded(work)
        if self._make is asyncio.Task:
            return asyncio.Task(work, loop=loop, **options)
        return self._make(loop, work, **options)


class _Guarded(Coroutine[Any, Any, Any]):
    """Runs a coroutine step by step, and keeps exceptions from ending the process.

    A class, since an `async def` around it would leave it without a step if its task is cancelled before it
    starts, and Python warns of such coroutines.
    """

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._work = work

    def send(self, value: Any, /) -> Any:
        try:
            return self._work.send(value)
        except (SystemExit, KeyboardInterrupt) as err:
            _fail(self._work, err)

    def throw(self, *error: Any) -> Any:
        try:
            return self._work.throw(*error)
        except (SystemExit, KeyboardInterrupt) as err:
            _fail(self._work, err)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._work.__await__()

    def __getattr__(self, name: str) -> Any:
        """What logs and task libraries read of a coroutine: `__qualname__`, `cr_frame` and the like."""
        return getattr(self._work, name)


def _fail(work: Coroutine[Any, Any, Any], err: BaseException) -> NoReturn:
    name = getattr(work, "__qualname__", repr(work))
    raise EpisodeExitError(
        f"{name}, a task of the episode, raised {type(err).__name__}: {err}; it ends the episode alone. A "
        "workflow returns or raises another exception instead",
        is_retryable=False,
    ) from err

"""Watches background tasks that a service depends on: if one ends early, the service ends and logs why.

Nobody awaits such a task while the service works, so its end would go unnoticed. For example, without its
HTTP server, a service would keep running but not respond to anyone. `run_service` handles such failures;
elsewhere, as in tests, they are logged.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any

from astraflow.errors import ServiceError

__all__ = ["handle_ends", "vital"]

_log = logging.getLogger(__name__)
_take: ContextVar[Callable[[ServiceError], None] | None] = ContextVar("astraflow_take_end", default=None)


@contextlib.contextmanager
def handle_ends(take: Callable[[ServiceError], None]) -> Generator[None]:
    """Calls `take`, in the task's loop, when a vital task that was created in this context ends early."""
    is_over = False

    def take_unless_over(error: ServiceError) -> None:
        if not is_over:
            take(error)

    token = _take.set(take_unless_over)
    try:
        yield
    finally:
        is_over = True
        _take.reset(token)


def vital(task: "asyncio.Task[Any]", what: str, *, may_end: Callable[[], bool]) -> None:
    """Watches a task: if it ends for any reason while `may_end()` is false, the service ends.

    Example: `vital(task, "the HTTP server of the dataflow", may_end=lambda: self._is_stopping)`.
    """
    take = _take.get()

    def ended(task: "asyncio.Task[Any]") -> None:
        if may_end():
            return
        cause = None if task.cancelled() else task.exception()
        if task.cancelled():
            how = "was cancelled"
        elif cause is not None:
            how = f"failed: {cause!r}"
        else:
            how = "returned"
        error = ServiceError(f"{what} {how}, but the service had not ended it; start the service again")
        error.__cause__ = cause
        if take is not None:
            take(error)
        elif cause is not None:
            _log.critical("%s", error, exc_info=cause)

    task.add_done_callback(ended)

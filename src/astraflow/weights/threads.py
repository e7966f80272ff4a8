"""The threads that copy, hash and encode versions.

They are reused, because the first memory accesses of a new thread cost as much as its share of the work.
"""

import asyncio
import functools
import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

__all__ = ["NUM_THREADS", "cancel_and_wait", "off_loop", "shared_threads"]

NUM_THREADS = min(os.cpu_count() or 1, 4)
"""More threads would wait for the memory bus."""

_FEW_BYTES = 1024 * 1024
"""Copying or hashing this much takes less time than handing it to another thread, especially while other
threads keep the interpreter busy."""

_ArgsT = ParamSpec("_ArgsT")
_ResultT = TypeVar("_ResultT")


async def off_loop(
    num_bytes: int, work: Callable[_ArgsT, _ResultT], *args: _ArgsT.args, **kwargs: _ArgsT.kwargs
) -> _ResultT:
    """Runs `work` in a thread, or at once if it handles few bytes."""
    if num_bytes <= _FEW_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


@functools.cache
def shared_threads() -> ThreadPoolExecutor:
    """The threads of this process for short work that never waits."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")


def cancel_and_wait(waiting: Collection[Future[Any]]) -> None:
    """Cancels the work that has not begun, and waits for the rest."""
    for future in waiting:
        future.cancel()
    wait(waiting)

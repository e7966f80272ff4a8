"""Threads that copy, hash and code versions: they stay, because a new thread's first memory costs as much as
its share of the work."""

import asyncio
import functools
import os
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

__all__ = ["NUM_THREADS", "give_up", "off_loop", "shared_threads"]

NUM_THREADS = min(os.cpu_count() or 1, 4)
"""More would wait for the memory."""

_FEW_BYTES = 1024 * 1024
"""Copied or hashed in less time than it takes to change threads, above all where others keep the interpreter
busy."""

_ArgsT = ParamSpec("_ArgsT")
_ResultT = TypeVar("_ResultT")


async def off_loop(
    num_bytes: int, work: Callable[_ArgsT, _ResultT], *args: _ArgsT.args, **kwargs: _ArgsT.kwargs
) -> _ResultT:
    """What `work` returns, in a thread unless it works on few bytes."""
    if num_bytes <= _FEW_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


@functools.cache
def shared_threads() -> ThreadPoolExecutor:
    """The process's threads for short work that waits for nothing."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")


def give_up(waiting: Collection[Future[Any]]) -> None:
    """Nothing of this work runs any more when it returns."""
    for future in waiting:
        future.cancel()
    wait(waiting)

"""Threads that copy, hash and code versions: they stay, because a new thread's first memory costs as much as
its share of the work."""

import functools
import os
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

__all__ = ["NUM_THREADS", "give_up", "shared_threads"]

NUM_THREADS = min(os.cpu_count() or 1, 4)
"""More would wait for the memory."""


@functools.cache
def shared_threads() -> ThreadPoolExecutor:
    """The process's threads for short work that waits for nothing."""
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="weights")


def give_up(waiting: Collection[Future[Any]]) -> None:
    """Nothing of this work runs any more when it returns."""
    for future in waiting:
        future.cancel()
    wait(waiting)

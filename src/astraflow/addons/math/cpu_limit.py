"""Ends a function that has used too much CPU time, in whatever thread it runs.

The limit counts the CPU time of the function's own thread, so time that the thread spends waiting, for a CPU
or a disk, does not count. A second limit on elapsed time, which should be far larger, ends a function that
waits forever.

A function that was ended may leave libraries in an unexpected state.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["OutOfTimeError", "within_cpu_time"]

_AGAIN_S = 0.5
"""CPU time after which a function that caught the exception gets it again."""

_T = TypeVar("_T")


class OutOfTimeError(BaseException):
    """Raised in a function that has used up its time.

    It is not an `Exception`, so libraries in between do not catch it.
    """


def within_cpu_time(work: Callable[[], _T], *, cpu_s: float, wall_s: float) -> _T:
    """Calls `work` and returns its result. Raises: OutOfTimeError, inside of `work`, if it takes longer.

    Example: `within_cpu_time(lambda: is_right(gold, text), cpu_s=4.0, wall_s=60.0)`. A single instruction,
    such as one power of two large numbers, cannot be interrupted.
    """
    watch = _Watch(cpu_s, wall_s)
    try:
        try:
            watch.start()
            return work()
        finally:
            watch.end()
    except OutOfTimeError:
        watch.end()  # the exception may have come in `end` itself
        raise


class _Watch:
    """A thread that raises `OutOfTimeError` in the thread that made the watch."""

    def __init__(self, cpu_s: float, wall_s: float) -> None:
        self._wall_s = wall_s
        self._thread_id = threading.get_ident()
        # Only Linux has a CPU clock for each thread. Elsewhere, the process's clock is used.
        is_linux = sys.platform == "linux"
        self._clock = (
            time.pthread_getcpuclockid(self._thread_id) if is_linux else time.CLOCK_PROCESS_CPUTIME_ID
        )
        self._cpu_until_s = time.clock_gettime(self._clock) + cpu_s
        self._wall_until_s = time.monotonic() + wall_s
        self._is_over = False
        self._has_raised = False
        self._changed = threading.Condition()

    def start(self) -> None:
        threading.Thread(target=self._watch, name="cpu limit", daemon=True).start()

    def end(self) -> None:
        """Ends the thread. An exception that is still pending arrives in this method, which catches it."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        if self._has_raised:
            # The interpreter could drop a pending exception, but CPython 3.11 then keeps the flag that one is
            # set, and the next traced function never returns. So replace it by one that arrives now.
            try:
                _raise_in(self._thread_id, OutOfTimeError)
                while True:
                    time.sleep(0)
            except OutOfTimeError:
                pass

    def _watch(self) -> None:
        with self._changed:
            while not self._is_over:
                cpu_left_s = self._cpu_until_s - time.clock_gettime(self._clock)
                wall_left_s = self._wall_until_s - time.monotonic()
                if cpu_left_s > 0 and wall_left_s > 0:
                    # A thread uses at most one second of CPU time per second.
                    self._changed.wait(min(cpu_left_s, wall_left_s))
                    continue
                self._has_raised = True
                _raise_in(self._thread_id, OutOfTimeError)
                self._cpu_until_s = time.clock_gettime(self._clock) + _AGAIN_S
                self._wall_until_s = time.monotonic() + self._wall_s


def _raise_in(thread_id: int, kind: type[BaseException]) -> None:
    """Raises an exception in a thread, at its next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(kind))

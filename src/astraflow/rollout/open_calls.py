"""Counts the calls that run or wait, and measures the age of the oldest one."""

import itertools
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

__all__ = ["OpenCalls"]


class OpenCalls:
    """Calls that run or wait. Example: `with calls.one(): await score()`; inside, `calls.num` is 1."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s: dict[int, float] = {}
        """Start time by call number, oldest call first."""
        self._numbers = itertools.count()

    @contextmanager
    def one(self) -> Generator[None]:
        """Counts a call while the block runs."""
        number = next(self._numbers)
        self._began_s[number] = self._clock()
        try:
            yield
        finally:
            del self._began_s[number]

    @property
    def num(self) -> int:
        """Number of calls that run or wait."""
        return len(self._began_s)

    @property
    def oldest_s(self) -> float:
        """Age of the oldest call in seconds; 0 if there is none."""
        began_s = next(iter(self._began_s.values()), None)
        return 0.0 if began_s is None else self._clock() - began_s

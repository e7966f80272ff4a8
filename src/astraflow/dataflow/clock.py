"""The dataflow's clock: Unix time that never jumps.

The wall clock may be set while a run goes on; no deadline must pass because of it. So the time of a process
is the wall clock's when it began, plus what the monotonic clock counted since; after a restart it is never
before what the journal holds. Every record of the journal carries it.
"""

import time
from collections.abc import Callable

__all__ = ["SteadyClock"]


class SteadyClock:
    """Call it for Unix seconds. Example: `SteadyClock()()` is about `time.time()`."""

    def __init__(
        self,
        *,
        at_least_s: float = 0.0,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`at_least_s`: the time of the newest record."""
        self._monotonic = monotonic
        self._offset_s = max(wall(), at_least_s) - monotonic()

    def __call__(self) -> float:
        """Unix seconds, never less than before."""
        return self._offset_s + self._monotonic()

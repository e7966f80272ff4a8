"""The dataflow's clock: Unix time that never jumps.

Someone may set the wall clock during a run, and that must not make a deadline pass. So the time of a process
is the wall clock's at its start, plus what the monotonic clock has counted since. After a restart, it is
never earlier than the newest record of the journal, since every record carries the time.
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
        """`at_least_s`: the time of the journal's newest record."""
        self._monotonic = monotonic
        self._offset_s = max(wall(), at_least_s) - monotonic()

    def __call__(self) -> float:
        """Unix seconds; never less than an earlier result."""
        return self._offset_s + self._monotonic()

"""One deadline for all that runs at once, by one timer: a timer each costs a tenth of a short episode.

What began first ends first, so the timer waits for the oldest only. It is cancelled when nothing runs, so
that nothing is left in an event loop.
"""

import asyncio

__all__ = ["Deadlines"]


class Deadlines:
    """Timeouts of `seconds` each. Used from one event loop at a time.

    Example::

        timeout = deadlines.begin()
        try:
            async with timeout:
                await work()
        finally:
            deadlines.end(timeout)
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._ends_at: dict[asyncio.Timeout, float] = {}
        """What runs, the oldest first, and when its time is over."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> asyncio.Timeout:
        """A timeout to enter at once; `end` it."""
        loop = asyncio.get_running_loop()
        timeout = asyncio.timeout(None)
        self._ends_at[timeout] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(self._ends_at[timeout], self._expire, loop)
        return timeout

    def end(self, timeout: asyncio.Timeout) -> None:
        """The timeout was left, in time or not."""
        self._ends_at.pop(timeout, None)
        if not self._ends_at and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets expire what is due, and waits for the oldest of the rest."""
        self._timer = None
        now = loop.time()
        for timeout, ends_at in list(self._ends_at.items()):
            if ends_at > now:
                self._timer = loop.call_at(ends_at, self._expire, loop)
                return
            del self._ends_at[timeout]
            timeout.reschedule(now)

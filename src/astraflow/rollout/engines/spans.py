"""Collects the wall-clock intervals in which an engine was busy, until they are taken for a report."""

import threading

from astraflow.types import BusySpan

__all__ = ["BusyClock"]

_MERGE_GAP_S = 0.005
"""Busy intervals with a pause of at most this length are merged. In such a pause, the event loop prepares the
next request; the engine isn't idle."""


class BusyClock:
    """Collects busy intervals. The working thread calls `start` and `stop`; any thread may call `take`.

    Times are arguments, in Unix seconds.
    Example: `clock.start(10.0); clock.stop(12.5); clock.take(13.0)` returns one span from 10.0 to 12.5.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._closed: list[tuple[float, float]] = []
        self._since: float | None = None

    def start(self, now_s: float) -> None:
        """Begins a busy interval. Does nothing if one is open."""
        with self._lock:
            if self._since is not None:
                return
            self._since = now_s
            if self._closed and now_s - self._closed[-1][1] <= _MERGE_GAP_S:
                self._since = self._closed.pop()[0]

    def stop(self, now_s: float) -> None:
        """Ends the busy interval. Does nothing if none is open."""
        with self._lock:
            if self._since is not None:
                self._closed.append((self._since, now_s))
                self._since = None

    def take(self, now_s: float) -> tuple[BusySpan, ...]:
        """Takes the busy intervals since the last call. An open interval is cut in two at `now_s`."""
        with self._lock:
            spans = self._closed
            self._closed = []
            if self._since is not None:
                spans.append((self._since, now_s))
                self._since = now_s
        return tuple(BusySpan(self._kind, start, end) for start, end in spans if end > start)

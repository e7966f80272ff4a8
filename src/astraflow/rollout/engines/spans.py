"""Keeps the wall-clock intervals in which an engine was busy, until somebody takes them to report them."""

import threading

from astraflow.types import BusySpan

__all__ = ["BusyClock"]

_MERGE_GAP_S = 0.005
"""A pause of at most this length joins its neighbours: it is the event loop's time between two requests, not
idleness."""


class BusyClock:
    """Collects busy intervals. One thread works and calls `start` and `stop`; any thread may call `take`.

    Times are arguments, in Unix seconds.
    Example: `clock.start(10.0); clock.stop(12.5); clock.take(13.0)` gives one span from 10.0 to 12.5.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._closed: list[tuple[float, float]] = []
        self._since: float | None = None

    def start(self, now_s: float) -> None:
        """Work begins; does nothing if it runs already."""
        with self._lock:
            if self._since is not None:
                return
            self._since = now_s
            if self._closed and now_s - self._closed[-1][1] <= _MERGE_GAP_S:
                self._since = self._closed.pop()[0]

    def stop(self, now_s: float) -> None:
        """Work ends; does nothing if none runs."""
        with self._lock:
            if self._since is not None:
                self._closed.append((self._since, now_s))
                self._since = None

    def take(self, now_s: float) -> tuple[BusySpan, ...]:
        """The busy intervals since the last call; one that still runs is cut in two at `now_s`."""
        with self._lock:
            spans = self._closed
            self._closed = []
            if self._since is not None:
                spans.append((self._since, now_s))
                self._since = now_s
        return tuple(BusySpan(self._kind, start, end) for start, end in spans if end > start)

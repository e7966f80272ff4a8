"""When an engine was busy: merged wall-clock intervals, drained by whoever reports them."""

import threading

from astraflow.types import BusySpan

__all__ = ["BusyClock"]

_MERGE_GAP_S = 0.005
"""Pauses shorter than this are the event loop's turn-around between requests, not idleness."""


class BusyClock:
    """Written by the thread that works, drained by any other; times are arguments (Unix seconds).

    Example: `clock.start(10.0); clock.stop(12.5); clock.take(13.0)` gives one span from 10.0 to 12.5.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._lock = threading.Lock()
        self._closed: list[tuple[float, float]] = []
        self._since: float | None = None

    def start(self, now_s: float) -> None:
        """Work begins; no effect while it already runs."""
        with self._lock:
            if self._since is not None:
                return
            self._since = now_s
            if self._closed and now_s - self._closed[-1][1] <= _MERGE_GAP_S:
                self._since = self._closed.pop()[0]

    def stop(self, now_s: float) -> None:
        """Work ended; no effect while there is none."""
        with self._lock:
            if self._since is not None:
                self._closed.append((self._since, now_s))
                self._since = None

    def take(self, now_s: float) -> tuple[BusySpan, ...]:
        """Busy intervals since the last call; one that still runs is cut at `now_s`."""
        with self._lock:
            spans = self._closed
            self._closed = []
            if self._since is not None:
                spans.append((self._since, now_s))
                self._since = now_s
        return tuple(BusySpan(self._kind, start, end) for start, end in spans if end > start)

"""What one receiver remembers of its sources: how fast they are, and what they did to it.

Kept from version to version, and forgotten slowly: a source that was bad is left out for a while, for longer
each time, and has its good name back once it delivers. Passive; time is an argument.
"""

from dataclasses import dataclass

__all__ = ["TOO_SLOW", "Standing"]

_SPEED_MEMORY = 0.7
"""Weight of the past in a source's measured speed."""
_FIRST_PAUSE_S = 15.0
_LONGEST_PAUSE_S = 60.0
"""A peer that was late is asked again after a minute at the latest: waiting for it in vain costs seconds."""
_LONGEST_LIE_PAUSE_S = 3600.0
_GROWTH = 4.0
_MOST_WASTED_S = 2.0
"""Seconds that a source may cost in vain, in sum, before it is left out."""
_WASTED_AGAIN_S = 0.5
"""The same for one that was left out before and has not delivered since."""
TOO_SLOW = 4.0
"""A source may take so many times as long as the fastest other one."""


@dataclass(slots=True)
class _Record:
    speed: float = 0.0
    wasted_s: float = 0.0
    charged_until_s: float = float("-inf")
    num_pauses: int = 0
    paused_until_s: float = float("-inf")


class Standing:
    """Sources by URL.

    Example::

        standing.wasted(url, 10.0, 12.5)      # waited for it from 10.0 to 12.5, in vain
        standing.is_paused(url, 13.0)         # True: nobody asks it for now
        standing.delivered(url)               # later it gave a chunk: as good as any other
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    # --- speed ---

    def measure(self, url: str, num_bytes: int, duration_s: float) -> None:
        """It gave so many bytes in this time."""
        record = self._record(url)
        speed = num_bytes / max(duration_s, 1e-6)
        past = record.speed or speed
        record.speed = _SPEED_MEMORY * past + (1 - _SPEED_MEMORY) * speed

    def speed(self, url: str) -> float:
        """Bytes per second; 0 if it was never measured."""
        return self._records[url].speed if url in self._records else 0.0

    # --- blame ---

    def is_paused(self, url: str, now_s: float) -> bool:
        """Whether it is left out for now."""
        record = self._records.get(url)
        return record is not None and now_s < record.paused_until_s

    def wasted(self, url: str, began_s: float, now_s: float) -> bool:
        """Somebody waited for it in vain; those who did so at the same time count once. True if it is left
        out from now on."""
        record = self._record(url)
        record.wasted_s += max(0.0, now_s - max(began_s, record.charged_until_s))
        record.charged_until_s = max(record.charged_until_s, now_s)
        most_s = _WASTED_AGAIN_S if record.num_pauses else _MOST_WASTED_S
        if record.wasted_s < most_s or now_s < record.paused_until_s:
            return False
        self._pause(record, now_s, _LONGEST_PAUSE_S)
        return True

    def blame(self, url: str, now_s: float, *, is_lie: bool) -> None:
        """It failed, or `is_lie`, gave wrong bytes: it is left out from now on."""
        record = self._record(url)
        if now_s >= record.paused_until_s:
            self._pause(record, now_s, _LONGEST_LIE_PAUSE_S if is_lie else _LONGEST_PAUSE_S)

    def delivered(self, url: str) -> None:
        """It gave a chunk whose hash was right."""
        record = self._record(url)
        record.wasted_s /= 2
        record.num_pauses = 0

    def _pause(self, record: _Record, now_s: float, longest_s: float) -> None:
        pause_s = min(_FIRST_PAUSE_S * _GROWTH**record.num_pauses, longest_s)
        record.paused_until_s = now_s + pause_s
        record.num_pauses = min(record.num_pauses + 1, 8)
        record.wasted_s = 0.0

    def _record(self, url: str) -> _Record:
        return self._records.setdefault(url, _Record())

"""What a receiver remembers about its sources: their speed and their failures.

The memory outlasts a version, and it fades. A source that fails is avoided for a while, longer each time, and
is trusted again once it delivers. Passive; time is an argument.
"""

from dataclasses import dataclass

__all__ = ["TOO_SLOW", "Reputation"]

_SPEED_MEMORY = 0.7
"""Weight of earlier measurements in the speed of a source."""
_FIRST_PAUSE_S = 15.0
_MAX_PAUSE_S = 60.0
"""A peer that was late is asked again after at most a minute, since waiting for it in vain costs only
seconds."""
_MAX_LIE_PAUSE_S = 3600.0
_GROWTH = 4.0
"""Each pause is this many times as long as the one before."""
_MAX_WASTE_S = 2.0
"""Total seconds that receivers may wait in vain for a source before it is avoided."""
_MAX_WASTE_AGAIN_S = 0.5
"""The same for a source that was avoided before and has not delivered since."""
TOO_SLOW = 4.0
"""A source may take this many times as long as the fastest other one."""


@dataclass(slots=True)
class _Record:
    speed: float = 0.0
    wasted_s: float = 0.0
    charged_until_s: float = float("-inf")
    """Time up to which waiting has been counted, so that parallel waits count once."""
    num_pauses: int = 0
    paused_until_s: float = float("-inf")


class Reputation:
    """Speed and failures of each source, by URL.

    Example::

        reputation.note_waste(url, 10.0, 12.5)      # someone waited for it from 10.0 to 12.5, in vain
        reputation.is_paused(url, 13.0)         # True: it is not asked for now
        reputation.note_delivery(url)               # later it gave a chunk: it is trusted like any other
    """

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def measure(self, url: str, num_bytes: int, duration_s: float) -> None:
        """Records that the source delivered this many bytes in this time."""
        record = self._record(url)
        speed = num_bytes / max(duration_s, 1e-6)
        past = record.speed or speed
        record.speed = _SPEED_MEMORY * past + (1 - _SPEED_MEMORY) * speed

    def speed(self, url: str) -> float:
        """Bytes per second of the source; 0 if it was never measured."""
        return self._records[url].speed if url in self._records else 0.0

    def is_paused(self, url: str, now_s: float) -> bool:
        """Whether the source is avoided for now."""
        record = self._records.get(url)
        return record is not None and now_s < record.paused_until_s

    def note_waste(self, url: str, began_s: float, now_s: float) -> bool:
        """Records that a receiver waited for the source in vain. Simultaneous waits count once.

        Returns True if the source is avoided from now on.
        """
        record = self._record(url)
        record.wasted_s += max(0.0, now_s - max(began_s, record.charged_until_s))
        record.charged_until_s = max(record.charged_until_s, now_s)
        most_s = _MAX_WASTE_AGAIN_S if record.num_pauses else _MAX_WASTE_S
        if record.wasted_s < most_s or now_s < record.paused_until_s:
            return False
        self._pause(record, now_s, _MAX_PAUSE_S)
        return True

    def blame(self, url: str, now_s: float, *, is_lie: bool) -> None:
        """Avoids the source for a while, because it failed or, with `is_lie`, sent wrong bytes."""
        record = self._record(url)
        if now_s >= record.paused_until_s:
            self._pause(record, now_s, _MAX_LIE_PAUSE_S if is_lie else _MAX_PAUSE_S)

    def note_delivery(self, url: str) -> None:
        """Records that the source delivered a chunk with the right hash."""
        record = self._record(url)
        record.wasted_s /= 2
        record.num_pauses = 0

    def _pause(self, record: _Record, now_s: float, longest_s: float) -> None:
        pause_s = min(_FIRST_PAUSE_S * _GROWTH**record.num_pauses, longest_s)
        record.paused_until_s = now_s + pause_s
        record.num_pauses = min(record.num_pauses + 1, 8)  # bounds the power above
        record.wasted_s = 0.0

    def _record(self, url: str) -> _Record:
        return self._records.setdefault(url, _Record())

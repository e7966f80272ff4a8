"""Reports how much of a version in transfer has arrived, and for how long nothing has arrived.

Passive: the time and the number of arrived bytes are arguments.
"""

from astraflow.types import WeightTransfer
from astraflow.types.bounds import as_label
from astraflow.weights.arrival import Arrival

__all__ = ["WeightArrivals"]


class WeightArrivals:
    """The newest version of one policy that has not arrived yet.

    Example: `arrivals.begin(7, before, now_s)`, then `arrivals.make_report("actor", arrival, now_s)` now and
    then, and `arrivals.end()` once the version is here.
    """

    def __init__(self) -> None:
        self._version = -1
        """-1: nothing is in transfer."""
        self._began_s = 0.0
        self._moved_s = 0.0
        """When a report last found that bytes had arrived."""
        self._received_before = 0
        self._received = 0
        self._arrived = 0
        self._problem = ""

    def begin(self, version: int, before: Arrival, now_s: float) -> None:
        """Begins an attempt to fetch a version; a second attempt at the same version continues the first."""
        if version == self._version:
            return
        if self._version < 0:
            self._began_s = self._moved_s = now_s
        self._version = version
        self._problem = ""
        self._received_before = before.received_bytes
        self._received = before.received_bytes
        self._arrived = before.arrived_bytes

    def fail(self, reason: str) -> None:
        """Notes that an attempt has failed, and why. Another attempt follows."""
        self._problem = reason

    def end(self) -> None:
        """Notes that the version has arrived, or is no longer wanted."""
        self._version = -1
        self._problem = ""

    def make_report(self, policy: str, arrival: Arrival, now_s: float) -> WeightTransfer | None:
        """The transfer in progress; None if there is none, for example because only the engine is awaited."""
        if self._version < 0 or not (arrival.num_bytes or self._problem):
            return None
        if (arrival.received_bytes, arrival.arrived_bytes) != (self._received, self._arrived):
            self._received = arrival.received_bytes
            self._arrived = arrival.arrived_bytes
            self._moved_s = now_s
        # `arrived_bytes` counts only complete ranges; bytes of incomplete ranges show in `received` alone.
        received = self._received - self._received_before
        return WeightTransfer(
            policy=policy,
            version=self._version,
            num_bytes=arrival.num_bytes,
            arrived_bytes=min(max(arrival.arrived_bytes, received), arrival.num_bytes),
            age_s=now_s - self._began_s,
            quiet_s=now_s - self._moved_s,
            problem=as_label(self._problem),
        )

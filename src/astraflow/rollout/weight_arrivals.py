"""What a rollout service tells of a version on its way: how much has arrived, since when nothing does.

Passive: time and what has arrived are arguments.
"""

from astraflow.types import WeightTransfer
from astraflow.types.bounds import as_label
from astraflow.weights.arrival import Arrival

__all__ = ["WeightArrivals"]


class WeightArrivals:
    """The newest version of one policy that is not here yet.

    Example: `arrivals.begin(7, before, now_s)`, then `arrivals.told("actor", arrival, now_s)` now and then,
    and `arrivals.end()` once the version is here.
    """

    def __init__(self) -> None:
        self._version = -1
        """-1: nothing is on its way."""
        self._began_s = 0.0
        self._moved_s = 0.0
        """When it was last seen that bytes had arrived."""
        self._received_before = 0
        self._received = 0
        self._arrived = 0
        self._problem = ""

    def begin(self, version: int, before: Arrival, now_s: float) -> None:
        """A try begins. Of the same version, it goes on with an earlier one."""
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
        """A try has failed, for a reason in words; there will be another one."""
        self._problem = reason

    def end(self) -> None:
        """The version is here, or is no longer wanted."""
        self._version = -1
        self._problem = ""

    def told(self, policy: str, arrival: Arrival, now_s: float) -> WeightTransfer | None:
        """What is on its way now; None if nothing is. What is here whole may still wait for its engine."""
        if self._version < 0 or not (arrival.num_bytes or self._problem):
            return None
        if (arrival.received_bytes, arrival.arrived_bytes) != (self._received, self._arrived):
            self._received = arrival.received_bytes
            self._arrived = arrival.arrived_bytes
            self._moved_s = now_s
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

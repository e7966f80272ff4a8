"""Progress of the transfer of a version."""

from dataclasses import dataclass

__all__ = ["Arrival"]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Progress of the transfer of a policy's version, as its receiver sees it."""

    num_bytes: int = 0
    """Bytes of all parts; 0 if nothing is being transferred."""
    arrived_bytes: int = 0
    """Bytes of the ranges that are complete."""
    received_bytes: int = 0
    """Bytes that the receiver has read over HTTP since its start, for all transfers, complete or not."""

"""Sampler `edf`: earliest staleness deadline first."""

from collections.abc import Collection, Mapping
from heapq import nsmallest

from astraflow.protocols import Completed

__all__ = ["Edf"]


class Edf:
    """The ready groups whose oldest token is oldest go first, since they are the next to grow stale.

    A group's deadline is the trainer version `oldest_version + max_staleness`; equal ones go in draw order.
    Example: groups 4 (version 3) and 5 (version 1) are ready: a batch of one holds 5.
    """

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, Completed], num_groups: int
    ) -> tuple[int, ...] | None:
        """The `num_groups` of `ready` with the earliest deadlines, or None if there are fewer."""
        if len(ready) < num_groups:
            return None
        return tuple(nsmallest(num_groups, ready, key=lambda i: (ready[i].oldest_version, i)))

    def worst_staleness(
        self, *, max_tickets: int, groups_per_batch: int, engine_lag: int, max_staleness: int
    ) -> int:
        """`max_staleness`: a group that completes after its deadline is dropped at take."""
        return max_staleness

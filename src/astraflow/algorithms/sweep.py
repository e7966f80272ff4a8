"""Sampler `sweep`: groups in the order in which they completed."""

from collections.abc import Collection, Mapping
from itertools import islice

from astraflow.protocols import Completed

__all__ = ["Sweep"]


class Sweep:
    """The first ready groups go, so slow groups are passed over and may grow stale.

    Example: groups 4, 5, 6 were drawn, 6 completed and then 5: a batch of two holds 6 and 5.
    """

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, Completed], num_groups: int
    ) -> tuple[int, ...] | None:
        """The first `num_groups` of `ready` (completion order), or None if there are fewer."""
        return tuple(islice(ready, num_groups)) if len(ready) >= num_groups else None

    def worst_staleness(
        self, *, max_tickets: int, groups_per_batch: int, engine_lag: int, max_staleness: int
    ) -> int:
        """`max_staleness`: groups above it are dropped at take. Without that, a slow group has no bound."""
        return max_staleness

"""Sampler `on_policy`: the barrier of synchronous training, as a setting."""

from collections.abc import Collection, Mapping
from itertools import islice

from astraflow.protocols import Completed

__all__ = ["OnPolicy"]


class OnPolicy:
    """Trains each batch on groups of the very version that it updates; needs `max_staleness: 0`.

    With that, the tickets are one batch: nothing is drawn for the next version before it is published. Of
    the groups that are ready, the first to complete go; all are equally new.
    """

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, Completed], num_groups: int
    ) -> tuple[int, ...] | None:
        """The first `num_groups` of `ready`, or None if there are fewer."""
        return tuple(islice(ready, num_groups)) if len(ready) >= num_groups else None

    def worst_staleness(
        self, *, max_tickets: int, groups_per_batch: int, engine_lag: int, max_staleness: int
    ) -> int:
        """0."""
        return 0

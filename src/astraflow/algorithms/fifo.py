"""Sampler `fifo`: groups in the order in which they were drawn."""

from collections.abc import Collection, Mapping
from itertools import islice

from astraflow.protocols import Completed

__all__ = ["Fifo"]


class Fifo:
    """The next groups of the draw order must all be ready: slow groups are waited for, never passed over.

    Example: groups 4, 5, 6 were drawn and 5 and 6 are ready: a batch of two waits for group 4.
    """

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, Completed], num_groups: int
    ) -> tuple[int, ...] | None:
        """The first `num_groups` of `waiting` (draw order) if all are in `ready`, else None."""
        if len(ready) < num_groups:
            return None
        head = tuple(islice(waiting, num_groups))
        return head if all(group_id in ready for group_id in head) else None

    def worst_staleness(
        self, *, max_tickets: int, groups_per_batch: int, engine_lag: int, max_staleness: int
    ) -> int:
        """`ceil(max_tickets / groups_per_batch) - 1 + engine_lag`, and a sweep at take never lets it pass
        `max_staleness`.

        A group drawn at version v has at most `max_tickets - 1` groups before it, so it is taken at version
        `v + ceil(max_tickets / groups_per_batch) - 1` at the latest; its oldest token is of version `v -
        engine_lag` or newer. The sweep acts only after a trainer's restart, when versions jump.
        """
        by_tickets = -(-max_tickets // groups_per_batch) - 1 + engine_lag
        return min(by_tickets, max_staleness)

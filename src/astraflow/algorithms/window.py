"""Sampler `window`: draw order, but a slow group may be passed over by those drawn soon after it."""

from collections.abc import Collection, Mapping
from itertools import islice

from astraflow.protocols import Completed

__all__ = ["Window"]


class Window:
    """Takes ready groups among those drawn less than `span` draws after the oldest that waits.

    Between `fifo` (nobody passes) and `sweep` (anybody does): a slow group holds back at most what was drawn
    `span` or more after it. If the span holds fewer groups than a batch (others were filtered), it is
    widened to one batch, which then is FIFO's.
    Example: span 4, batch 2, groups 4 to 9 wait, all but 4 are ready: 5 and 6 go; then 7 and 4, once 4 is.
    """

    def __init__(self, *, span: int = 128) -> None:
        self._span = span

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, Completed], num_groups: int
    ) -> tuple[int, ...] | None:
        """The first `num_groups` ready ones of the span, in draw order, or None if there are fewer."""
        if len(ready) < num_groups:
            return None
        end = next(iter(waiting)) + self._span
        head = islice(waiting, max(num_groups, self._span))
        within = [i for position, i in enumerate(head) if i < end or position < num_groups]
        picked = tuple(islice((i for i in within if i in ready), num_groups))
        return picked if len(picked) == num_groups else None

    def worst_staleness(
        self, *, max_tickets: int, groups_per_batch: int, engine_lag: int, max_staleness: int
    ) -> int:
        """`(max_tickets + max(span, groups_per_batch) - 2) // groups_per_batch + engine_lag`, at most
        `max_staleness` (the sweep at take).

        A group has at most `max_tickets - 1` groups before it when it is drawn, and at most `max(span,
        groups_per_batch) - 1` later ones pass it.
        """
        passing = max(self._span, groups_per_batch) - 1
        by_draws = (max_tickets - 1 + passing) // groups_per_batch + engine_lag
        return min(by_draws, max_staleness)

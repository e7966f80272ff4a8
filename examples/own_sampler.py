"""A custom sampler: it forms batches from the groups with the most to learn from."""

from collections.abc import Collection, Mapping
from heapq import nlargest

from astraflow.protocols import CompleteGroup, TableSizes


def strength(group: CompleteGroup) -> float:
    """Returns the mean squared advantage of the group's trained tokens."""
    return group.advantage_square_sum / max(1, group.num_trained_tokens)


class MostToLearn:
    """Waits until `spare` more groups are ready than a batch needs, then takes the strongest."""

    def __init__(self, *, spare: int) -> None:
        self.spare = spare

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> list[int] | None:
        # At the end of the run, no more groups will come, so the last batch takes what is there.
        wanted = max(num_groups, min(num_groups + self.spare, len(waiting)))
        if len(ready) < wanted:
            return None
        return nlargest(num_groups, ready, key=lambda i: (strength(ready[i]), -i))

    def worst_staleness(self, sizes: TableSizes, *, max_tickets: int) -> int:
        return sizes.max_staleness  # groups that are never picked become stale and are dropped

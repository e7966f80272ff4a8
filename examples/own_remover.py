"""A remover of one's own: when many groups wait, those from which there is least to learn go."""

from collections.abc import Mapping
from heapq import nsmallest

from astraflow.protocols import CompleteGroup


class LeastToLearn:
    """Evicts the groups above `num_groups` whose advantages are smallest."""

    def __init__(self, *, num_groups: int) -> None:
        self.num_groups = num_groups

    def remove(self, ready: Mapping[int, CompleteGroup], num_groups: int) -> list[int]:
        surplus = len(ready) - max(self.num_groups, num_groups)
        return nsmallest(
            surplus, ready, key=lambda group_id: (ready[group_id].advantage_square_sum, group_id)
        )

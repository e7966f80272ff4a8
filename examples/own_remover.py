"""A custom remover: when too many groups wait, it evicts those with the least to learn from."""

from collections.abc import Mapping
from heapq import nsmallest

from astraflow.protocols import CompleteGroup


class LeastToLearn:
    """Keeps at most `num_groups` groups and evicts those with the smallest advantages."""

    def __init__(self, *, num_groups: int) -> None:
        self.num_groups = num_groups

    def remove(self, ready: Mapping[int, CompleteGroup], num_groups: int) -> list[int]:
        surplus = len(ready) - max(self.num_groups, num_groups)
        return nsmallest(
            surplus, ready, key=lambda group_id: (ready[group_id].advantage_square_sum, group_id)
        )

"""The distinct sequences of a running batch, so that each is computed once.

Requests that share a prompt and have sampled the same tokens so far share a branch. Their next tokens depend
on the same keys, values, and logits, and differ only in what each request picks. A branch forks when they
pick different tokens. In a group, a policy that is sure of its answer follows few branches.

Branch i is in slot i of the cache, and live branches are dense. As for rows, the newest token of a branch is
not in the cache yet.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Branches"]

Ints = NDArray[np.int64]

_TOKEN_BITS = 32
"""Token ids are int32."""


class Branches:
    """The branches of up to `num_slots` rows. Passive: the owner moves the cache's slots.

    Example: two rows of one branch pick different tokens. `regroup` then leaves the first in its slot, and
    returns another slot for the second.
    """

    def __init__(self, num_slots: int) -> None:
        self.count = 0
        """Number of live branches."""
        self.positions = np.zeros(num_slots, np.int64)
        """Position of each branch's newest token."""
        self.newest = np.zeros(num_slots, np.int64)
        """The newest token itself."""

    def open(self, prompt: tuple[int, ...]) -> int:
        """Adds a branch that has only a prompt. Returns its number."""
        self.positions[self.count] = len(prompt) - 1
        self.newest[self.count] = prompt[-1]
        self.count += 1
        return self.count - 1

    def regroup(self, of_rows: Ints, positions: Ints, newest: Ints) -> tuple[Ints, Ints, Ints]:
        """Forks the branches whose rows have different newest tokens, and drops those without rows.

        `of_rows` [N]: the branch of each row. `positions`, `newest` [N]: each row's newest token.
        Returns: the new branch of each row, and the old and the new slots of the branches that are copied.
        """
        keys = (of_rows << _TOKEN_BITS) | newest
        _, first_rows, numbers = np.unique(keys, return_index=True, return_inverse=True)
        parents = of_rows[first_rows]
        self.count = len(parents)
        # The first child of each branch stays in its slot, unless that lies beyond the last live branch.
        stays = (np.diff(parents, prepend=-1) != 0) & (parents < self.count)
        is_free = np.ones(self.count, np.bool_)
        is_free[parents[stays]] = False
        slots = parents.copy()
        slots[~stays] = np.flatnonzero(is_free)
        self.positions[slots] = positions[first_rows]
        self.newest[slots] = newest[first_rows]
        return slots[numbers], parents[~stays], slots[~stays]

    def move(self, of_rows: Ints, sources: Ints, targets: Ints) -> Ints:
        """Moves branches, all at once. `targets` is a permutation of `sources`. Returns: the new branch of
        each row."""
        for column in (self.positions, self.newest):
            column[targets] = column[sources]
        places = np.arange(self.count)
        places[sources] = targets
        return places[of_rows]

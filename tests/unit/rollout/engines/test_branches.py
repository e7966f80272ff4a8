"""The distinct sequences of a batch: how they fork, end, and stay dense."""

import numpy as np
from numpy.typing import NDArray

from astraflow.rollout.engines.branches import Branches


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def test_rows_with_the_same_token_stay_together_and_the_others_fork() -> None:
    branches = Branches(8)
    assert [branches.open((5, 6)), branches.open((7,))] == [0, 1]
    rows, sources, targets = branches.regroup(ints(0, 1, 0, 0), ints(2, 1, 2, 2), ints(9, 4, 8, 9))
    # Tokens are taken in ascending order, so the rows with token 8 stay in slot 0.
    assert rows.tolist() == [2, 1, 0, 2]
    assert (sources.tolist(), targets.tolist()) == ([0], [2])
    assert branches.count == 3
    assert branches.newest[:3].tolist() == [8, 4, 9]
    assert branches.positions[:3].tolist() == [2, 1, 2]


def test_the_last_branches_move_into_the_slots_of_those_without_rows() -> None:
    branches = Branches(8)
    for token in range(5):
        branches.open((token,))
    rows, sources, targets = branches.regroup(ints(4, 1, 3), ints(1, 1, 1), ints(9, 9, 9))
    assert branches.count == 3
    assert rows.tolist() == [2, 1, 0]
    assert (sources.tolist(), targets.tolist()) == ([3, 4], [0, 2])


def test_a_fork_takes_the_slot_of_a_branch_without_rows() -> None:
    branches = Branches(8)
    for token in range(3):
        branches.open((token,))
    rows, sources, targets = branches.regroup(ints(2, 2), ints(1, 1), ints(5, 6))
    assert rows.tolist() == [0, 1]
    assert (sources.tolist(), targets.tolist()) == ([2, 2], [0, 1])


def test_without_rows_no_branch_is_left() -> None:
    branches = Branches(4)
    branches.open((1,))
    rows, sources, targets = branches.regroup(ints(), ints(), ints())
    assert branches.count == rows.size == sources.size == targets.size == 0


def test_moved_branches_keep_their_rows() -> None:
    branches = Branches(4)
    for token in range(3):
        branches.open((token,) * (token + 1))
    assert branches.move(ints(0, 1, 2, 2), ints(0, 2), ints(2, 0)).tolist() == [2, 1, 0, 0]
    assert branches.newest[:3].tolist() == [2, 1, 0]
    assert branches.positions[:3].tolist() == [2, 1, 0]

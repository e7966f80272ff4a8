"""Curator `shuffle`: every task once an epoch, in an order that depends on the seed and the epoch.

The order is computed, not stored: a Feistel network permutes the next power of four above the number of
tasks, and positions that fall outside are walked on ("cycle walking"). A draw costs the same for ten tasks
as for ten billion, and the state is two numbers.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from astraflow.facts import Outcome

__all__ = ["Shuffle", "permuted"]

_ROUNDS = 8
"""Four make a pseudorandom permutation of large domains; small ones mix better with more."""


class Shuffle:
    """Draws every task once an epoch.

    Example: `Shuffle(num_tasks=3, seed=7)` gives e.g. 2, 0, 1, and then the next epoch's order, 0, 2, 1.
    """

    def __init__(self, *, num_tasks: int, seed: int) -> None:
        self._num_tasks = num_tasks
        self._seed = seed
        self._epoch = 0
        self._position = 0

    def next(self) -> int:
        """Index of the next task to draw."""
        task_idx = permuted(self._position, size=self._num_tasks, seed=self._seed, epoch=self._epoch)
        self._position += 1
        if self._position == self._num_tasks:
            self._position = 0
            self._epoch += 1
        return task_idx

    def observe(self, outcome: Outcome) -> None:
        """Outcomes do not change the order."""

    def state(self) -> dict[str, Any]:
        """Epoch and position in it."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state` was taken."""
        self._epoch = int(state["epoch"])
        self._position = int(state["position"])


def permuted(position: int, *, size: int, seed: int, epoch: int) -> int:
    """Where `position` of `[0, size)` goes: for each seed and epoch a permutation of that range."""
    if not 0 <= position < size:
        raise IndexError(f"position {position} is outside of [0, {size})")
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [xxhash.xxh3_64_intdigest(f"{seed}/{epoch}/{number}".encode()) for number in range(_ROUNDS)]
    value = _feistel(position, half_bits, keys)
    while value >= size:
        value = _feistel(value, half_bits, keys)
    return value


def _feistel(value: int, half_bits: int, keys: Sequence[int]) -> int:
    low_mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & low_mask
    for key in keys:
        mixed = xxhash.xxh3_64_intdigest(right.to_bytes(8, "little"), seed=key)
        left, right = right, left ^ (mixed & low_mask)
    return (left << half_bits) | right

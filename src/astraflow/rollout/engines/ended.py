"""Ended requests whose keys and values are still in the cache, where the next turn of a conversation finds
them.

The prompt of a next turn begins with the tokens of the turn before it. So a slot that no branch uses keeps
what it has until it is needed, and the request that continues there computes only what is new. What is found
was computed by the same version of the weights, because the owner clears all when it installs another one.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ended"]

_TOKEN_BYTES = np.dtype(np.int64).itemsize


class Ended:
    """The tokens in the free slots of a cache with `num_slots` slots. Passive: the owner moves the slots.

    Live branches have the first slots. A move is a pair of slots, from and to; all moves of a call happen at
    once. Example: `slot, moves = ended.take(7, prompt)` for a request that gets the slot 7.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._held: dict[int, bytes] = {}
        """Slot -> the tokens whose keys and values it has. The oldest entry is the first one."""

    @property
    def longest(self) -> int:
        """The largest number of tokens of a request."""
        return max(map(len, self._held.values()), default=0) // _TOKEN_BYTES

    def clear(self) -> None:
        """Forgets all requests."""
        self._held.clear()

    def keep(self, ended: dict[int, NDArray[np.int64]], num_live: int) -> list[tuple[int, int]]:
        """Adds requests that ended in these slots, with their tokens, when `num_live` branches remain.

        Returns: the moves out of slots that now belong to branches.
        """
        found = self._held
        self._held = {}
        leaving: dict[int, bytes] = {}
        new = ((slot, tokens.tobytes()) for slot, tokens in ended.items() if tokens.size)
        for slot, held in (*found.items(), *new):
            (leaving if slot < num_live else self._held)[slot] = held
        placed = [(slot, self._put(held, num_live)) for slot, held in leaving.items()]
        return [(slot, target) for slot, target in placed if target >= 0]

    def take(self, slot: int, prompt: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
        """Gives the slot, which is the first free one, to a request.

        Returns: the number of the prompt's first tokens whose keys and values the slot has after the moves,
        and the moves.
        """
        if not self._held:
            return 0, []
        source, length = self._find(prompt)
        held = self._held.pop(slot, None)
        if source == slot:
            return length, []
        moves: list[tuple[int, int]] = []
        if length:
            del self._held[source]
            moves.append((source, slot))
        if held is not None and (target := self._put(held, slot + 1)) >= 0:
            moves.append((slot, target))
        return length, moves

    def _find(self, prompt: tuple[int, ...]) -> tuple[int, int]:
        """The slot with the most tokens with which a prompt begins, and their number; -1 and 0 without one.

        The prompt's last token is not among them: the first step computes it.
        """
        wanted = np.array(prompt[:-1], np.int64).tobytes()
        fitting = {slot: len(held) for slot, held in self._held.items() if wanted.startswith(held)}
        slot = max(fitting, key=fitting.__getitem__, default=-1)
        return slot, fitting.get(slot, 0) // _TOKEN_BYTES

    def _put(self, tokens: bytes, num_live: int) -> int:
        """Finds a free slot for tokens: an empty one, or that of the oldest request; -1 if there is none."""
        if num_live == self._num_slots:
            return -1
        empty = (slot for slot in range(self._num_slots - 1, num_live - 1, -1) if slot not in self._held)
        slot = next(empty, -1)
        if slot < 0:
            slot = next(iter(self._held))
            del self._held[slot]
        self._held[slot] = tokens
        return slot

"""A game of Nim: its rules, and who can win.

    A3 B1 C4  ->  take 2 from C      (the first player)
    A3 B1 C2  ->  take 3 from A      (the second player)
    B1 C2     ->  take 1 from C
    B1 C1     ->  take 1 from B
    C1        ->  take 1 from C      (the first player takes the last thing and wins)

Players take turns. One takes at least one thing from one heap. A move that is not possible loses the game.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import xor

__all__ = ["MOST_HEAPS", "MOST_THINGS", "NimGame", "can_win", "moves", "shown", "winning_moves"]

_NAMES = "ABCDEF"
MOST_HEAPS = len(_NAMES)
MOST_THINGS = 9
"""In one heap: a move names one digit."""
_MOVE = re.compile(rf"take ([1-{MOST_THINGS}]) from ([{_NAMES}])", re.ASCII | re.IGNORECASE)


def shown(heaps: Sequence[int]) -> str:
    """The heaps in which there is something: `A3 B1 C4`."""
    return " ".join(f"{name}{num}" for name, num in zip(_NAMES, heaps, strict=False) if num)


def moves(heaps: Sequence[int]) -> list[str]:
    """All moves that are possible."""
    named = zip(_NAMES, heaps, strict=False)
    return [f"take {taken} from {name}" for name, num in named for taken in range(1, num + 1)]


def can_win(heaps: Sequence[int]) -> bool:
    """Whether the player who is to move wins, if both play as well as can be.

    That is so unless the bitwise sum (xor) of the heaps is 0. Source: Bouton 1901.
    """
    return reduce(xor, heaps) != 0


def winning_moves(heaps: Sequence[int]) -> list[str]:
    """The moves after which the other player cannot win; none if `can_win` is false."""
    total = reduce(xor, heaps)
    named = zip(_NAMES, heaps, strict=False)
    return [f"take {num - (num ^ total)} from {name}" for name, num in named if num ^ total < num]


@dataclass
class NimGame:
    """A game while it is played. Player 0 moves first.

    Example: `NimGame([1]).take("take 1 from A")` leaves a game whose `winner` is 0.
    """

    heaps: list[int]
    num_moves: int = 0
    """The player whose turn it is has the parity of this number."""
    winner: int = -1
    """-1 until the game is over."""

    @property
    def is_over(self) -> bool:
        """Whether somebody has won."""
        return self.winner >= 0

    def take(self, move: str) -> bool:
        """Makes a move of the player whose turn it is. Returns: whether it was possible; if not, it loses.

        Nothing happens in a game that is over.
        """
        if self.is_over:
            return False
        mover = self.num_moves % 2
        self.num_moves += 1
        found = _MOVE.fullmatch(move)
        heap = _NAMES.index(found[2].upper()) if found else 0
        taken = int(found[1]) if found else 0
        if not taken or heap >= len(self.heaps) or taken > self.heaps[heap]:
            self.winner = 1 - mover
            return False
        self.heaps[heap] -= taken
        if not any(self.heaps):
            self.winner = mover
        return True

"""Those who play `nim`: an expert and a random player, each a function from the heaps to a move."""

import random
from collections.abc import Callable, Iterator, Sequence

from recipes.nim.nim_game import NimGame, moves, winning_moves

__all__ = ["Player", "both", "expert", "random_player"]

Player = Callable[[Sequence[int]], str]
"""Chooses a move where something is left."""


def expert(heaps: Sequence[int]) -> str:
    """Plays as well as can be; where every move loses against such a player, it takes as little as it can."""
    return (winning_moves(heaps) or moves(heaps))[0]


def random_player(rng: random.Random) -> Player:
    """Makes any possible move, each as likely as the others."""
    return lambda heaps: rng.choice(moves(heaps))


def both(game: NimGame, first: Player, second: Player) -> Iterator[str]:
    """Yields the moves of two players; each must be made before the next."""
    while not game.is_over:
        yield (second if game.num_moves % 2 else first)(game.heaps)

"""Plays games of `nim` by scripted players: what the short test and the long one have in common."""

import random
import statistics

from recipes.nim.nim_game import can_win
from recipes.nim.nim_players import Player, both, expert, random_player
from recipes.nim.nim_world import Nim, heaps_of

from drivers.world_driver import rewards_of

__all__ = ["ODD_MOVES", "shares_won"]

ODD_MOVES = [
    "",
    "ACTION:",
    "take 1 from",
    "take 9 from A",
    "take 1 from Z",
    "take -1 from A",
    "take \u0664 from A",
    "take 1 from \x00\x1b[2J",
    "x" * 1_000_000,
    "ACTION: " * 100_000,
]


def shares_won(world: Nim, rng: random.Random) -> dict[str, float]:
    """Shares of games from all positions held out that are won by who moves first, if that is the named one.

    `expert` and `random player`: from positions that can be won, against the expert. `expert, any position,
    against the random player`: from all, and from both sides.
    """
    tasks = world.tasks("heldout")
    are_won = [can_win(heaps_of(task.spec)) for task in tasks]
    chance = random_player(rng)

    def rewards(first: Player, second: Player) -> list[float]:
        return rewards_of(world, lambda game: both(game, first, second), len(tasks))

    def from_won(first: Player) -> float:
        return statistics.mean(
            reward for reward, is_won in zip(rewards(first, expert), are_won, strict=True) if is_won
        )

    as_first, as_second = rewards(expert, chance), rewards(chance, expert)
    return {
        "expert": from_won(expert),
        "random player": from_won(chance),
        "expert, any position, against the random player": statistics.mean(as_first) / 2
        + (1 - statistics.mean(as_second)) / 2,
    }

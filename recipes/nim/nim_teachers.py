"""The teachers of a warm start in `nim`: players that know the rules, and seldom what a good move is."""

import random
from collections.abc import Sequence
from typing import Any

from recipes.nim.nim_game import NimGame, moves, shown
from recipes.nim.nim_players import expert
from recipes.nim.nim_world import Nim

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.types import Message

__all__ = ["demonstrations"]


def demonstrations(
    num: int, seed: int, skill_frac: tuple[float, float] = (0.5, 0.0), **world: Any
) -> Sequence[Demonstration]:
    """What the players of games see and do; no game begins with a position that is held out.

    `skill_frac`: share of the expert's moves, at the first and at the last demonstration; linear in between.
    All others are drawn from the possible ones. `world`: arguments of `Nim`, without `form`, `size` and
    `seed`.
    """
    rng = random.Random(seed)
    # Another seed draws other games than those of the tasks.
    nim = Nim(**world, form="bare", seed=f"demonstrations {seed}")
    first, last = skill_frac
    made = list[Demonstration]()
    while len(made) < num:
        skill = first + (last - first) * len(made) / num
        game = NimGame(nim.heaps("train", len(made)))
        said: tuple[list[Message], list[Message]] = ([], [])
        while not game.is_over:
            move = expert(game.heaps) if rng.random() < skill else rng.choice(moves(game.heaps))
            seen = Message(role="user", content=shown(game.heaps))
            said[game.num_moves % 2].extend([seen, Message(role="assistant", content=move)])
            game.take(move)
        made += [Demonstration(messages=messages) for messages in said if messages]
    return made[:num]

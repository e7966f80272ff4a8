"""The teachers of a warm start in `household`: players of whom a part forgets what makes goals hard."""

import random
from collections.abc import Sequence
from typing import Any

from recipes.alfworld.household_players import expert
from recipes.alfworld.household_room import Room
from recipes.alfworld.household_world import Household

from astraflow.models.demonstrations import Demonstration
from astraflow.types import Message

__all__ = ["demonstrations"]


def demonstrations(
    num: int,
    seed: int,
    careful_frac: tuple[float, float] = (0.7, 0.1),
    **world: Any,
) -> Sequence[Demonstration]:
    """Games of careful and of hasty players, in rooms of the split `train`; none is held out.

    `careful_frac`: share of careful games, at the first and at the last demonstration; linear in between.
    `world`: arguments of `Household`, without `form` and `seed`.
    """
    rng = random.Random(seed)
    # Another seed draws other rooms than those of the tasks.
    household = Household(**world, form="bare", seed=f"demonstrations {seed}")
    first, last = careful_frac
    return [
        Demonstration(
            messages=_game(household.room("train", idx), rng.random() < first + (last - first) * idx / num)
        )
        for idx in range(num)
    ]


def _game(room: Room, is_careful: bool) -> list[Message]:
    messages = [Message(role="user", content=room.text)]
    for command in expert(room, is_careful=is_careful):
        messages.append(Message(role="assistant", content=command))
        told = room.do(command)
        # Asking twice in a row is enough to be learned; then the world soon ends an episode.
        has_given_up = [said.content for said in messages[-3::2]] == ["inventory"] * 2
        if room.is_solved or has_given_up:
            return messages
        messages.append(Message(role="user", content=told))
    raise AssertionError("a player never stops")

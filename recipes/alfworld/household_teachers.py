"""The teachers of a warm start in `household`: players of whom a part forgets what makes goals hard.

All of them may slip: they reach for the thing where it is not to be had, hear that nothing happens, and go
on. A model that has seen this does not end its search with its first mistake.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from recipes.alfworld.household_players import expert
from recipes.alfworld.household_room import Room
from recipes.alfworld.household_world import Household

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.types import Message

__all__ = ["demonstrations"]

GIVES_UP = "inventory"
"""What a player says who knows nothing else to do."""


def demonstrations(
    num: int,
    seed: int,
    careful_frac: tuple[float, float] = (0.7, 0.1),
    slip_frac: float = 0.0,
    **world: Any,
) -> Sequence[Demonstration]:
    """Games of careful and of hasty players, in rooms of the split `train`; none is held out.

    `careful_frac`: share of careful games, at the first and at the last demonstration; linear in between.
    `slip_frac`: share of the commands before which a player slips, where it can.
    `world`: arguments of `Household`, without `form` and `seed`.
    """
    rng = random.Random(seed)
    # Another seed draws other rooms than those of the tasks.
    household = Household(**world, form="bare", seed=f"demonstrations {seed}")
    first, last = careful_frac
    shown = list[Demonstration]()
    for idx in range(num):
        room = household.room("train", idx)
        is_careful = rng.random() < first + (last - first) * idx / num
        player = expert(room, is_careful=is_careful)
        if slip_frac:
            player = _with_slips(player, room, rng, slip_frac)
        shown.append(Demonstration(messages=_game(room, player)))
    return shown


def _with_slips(player: Iterator[str], room: Room, rng: random.Random, slip_frac: float) -> Iterator[str]:
    """A player's commands, and slips before some of them; a slip changes nothing in the room."""
    for command in player:
        slip = _slip(room, rng)
        if slip and command != GIVES_UP and rng.random() < slip_frac:
            yield slip
        yield command


def _slip(room: Room, rng: random.Random) -> str:
    """A grasp for the thing that the goal asks for, where it is not to be had; empty if it would succeed."""
    number = rng.choice((1, 2)) if room.goal.kind == "pick_two_obj_and_place" else 1
    grasp = f"take {room.goal.thing} {number} from {room.here}"
    return grasp if room.here and not room.held and grasp not in room.commands() else ""


def _game(room: Room, player: Iterator[str]) -> list[Message]:
    messages = [Message(role="user", content=room.text)]
    for command in player:
        messages.append(Message(role="assistant", content=command))
        told = room.do(command)
        # Asking twice in a row is enough to be learned; then the world soon ends an episode.
        has_given_up = [said.content for said in messages[-3::2]] == [GIVES_UP] * 2
        if room.is_solved or has_given_up:
            return messages
        messages.append(Message(role="user", content=told))
    raise AssertionError("a player never stops")

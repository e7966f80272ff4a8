"""Those who play `household`: an expert and a random player.

The expert knows what a player can have seen: it looks for things place by place, in the order in which the
places are listed.
"""

import random
from collections.abc import Iterator

from recipes.alfworld.household_room import APPLIANCES, LAMP, TREATMENTS, Room

__all__ = ["expert", "random_player"]


def expert(room: Room, *, is_careful: bool = True) -> Iterator[str]:
    """Yields commands until the goal is reached; each must be carried out before the next is asked for.

    One that is not careful leaves out what makes a goal hard: it does not wash, heat or cool the thing, puts
    down one of two, and turns on the lamp without the thing. Then it asks for its inventory.
    """
    goal = room.goal
    search = _Search(room)
    if goal.kind == "look_at_obj_in_light":
        if is_careful:
            yield from search.take(goal.thing)
        yield "go to desk 1"
        yield f"use {LAMP}"
    else:
        yield from search.take(goal.thing)
        if is_careful and goal.kind in TREATMENTS:
            treatment, place = TREATMENTS[goal.kind]
            yield f"go to {place}"
            yield f"{treatment} {room.held} with {place}"
        yield from search.put(goal.target)
        if is_careful and goal.kind == "pick_two_obj_and_place":
            yield from search.take(goal.thing)
            yield from search.put(goal.target)
    while True:
        yield "inventory"


def random_player(room: Room, rng: random.Random) -> Iterator[str]:
    """Any command that does something, each as likely as the others."""
    while True:
        yield rng.choice(room.commands())


class _Search:
    """Walks through the places of a room, each once, and remembers how far it came."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._left = [
            place
            for place in room.contents
            if place not in APPLIANCES and not place.startswith(f"{room.goal.target} ")
        ]

    def take(self, thing: str) -> Iterator[str]:
        """Looks for a thing of this kind and takes it."""
        room = self._room
        while True:
            place = self._left[0]
            yield from self._reach(place)
            found = [name for name in room.contents[place] if name.startswith(f"{thing} ")]
            if found:
                yield f"take {found[0]} from {place}"
                return
            # The place stays on the list while it has such things: the second one may lie there as well.
            self._left.pop(0)

    def put(self, target: str) -> Iterator[str]:
        """Puts what is held at the first place of a kind."""
        place = next(name for name in self._room.contents if name.startswith(f"{target} "))
        yield from self._reach(place)
        yield f"move {self._room.held} to {place}"

    def _reach(self, place: str) -> Iterator[str]:
        if self._room.here != place:
            yield f"go to {place}"
        if self._room.is_closed(place):
            yield f"open {place}"

"""A room of the world `household`: its rules, and how rooms are drawn.

    You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a desk 1, ...

    Your task is to: put a clean mug in cabinet.   ->  go to shelf 1
    You arrive at shelf 1. On the shelf 1, you see a mug 1.  ->  take mug 1 from shelf 1
    ...

The kinds of goals, the commands and the sentences are those of ALFWorld.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["APPLIANCES", "GOALS", "LAMP", "NOTHING", "PLACES", "TREATMENTS", "Goal", "Room", "make_room"]

GOALS = {
    "pick_and_place_simple": ("put a {thing} in {target}.", "put some {thing} on {target}."),
    "look_at_obj_in_light": ("look at {thing} under the desklamp.", "examine the {thing} with the desklamp."),
    "pick_clean_then_place_in_recep": (
        "put a clean {thing} in {target}.",
        "clean some {thing} and put it in {target}.",
    ),
    "pick_heat_then_place_in_recep": (
        "put a hot {thing} in {target}.",
        "heat some {thing} and put it in {target}.",
    ),
    "pick_cool_then_place_in_recep": (
        "put a cool {thing} in {target}.",
        "cool some {thing} and put it in {target}.",
    ),
    "pick_two_obj_and_place": (
        "put two {thing} in {target}.",
        "find two {thing} and put them in {target}.",
    ),
}
"""How each kind of goal is put into words."""
TREATMENTS = {
    "pick_clean_then_place_in_recep": ("clean", "sinkbasin 1"),
    "pick_heat_then_place_in_recep": ("heat", "microwave 1"),
    "pick_cool_then_place_in_recep": ("cool", "fridge 1"),
}
"""What a thing needs before it is put down, and where that is done."""
_ALL = ("clean", "heat", "cool")
THINGS = {
    "apple": _ALL,
    "book": (),
    "bowl": _ALL,
    "bread": ("heat", "cool"),
    "cd": (),
    "cup": _ALL,
    "egg": _ALL,
    "fork": ("clean",),
    "keychain": (),
    "knife": ("clean",),
    "lettuce": ("clean", "cool"),
    "mug": _ALL,
    "pan": ("clean", "cool"),
    "pencil": (),
    "plate": _ALL,
    "pot": ("clean", "cool"),
    "potato": _ALL,
    "spoon": ("clean",),
    "tomato": _ALL,
}
"""Every kind of thing that can be carried, and how it can be treated."""
PLACES = (
    "bed",
    "cabinet",
    "countertop",
    "diningtable",
    "drawer",
    "dresser",
    "garbagecan",
    "safe",
    "shelf",
    "sidetable",
    "sofa",
)
"""Every kind of place at which things lie and to which they are put."""
APPLIANCES = ("desk 1", "fridge 1", "microwave 1", "sinkbasin 1")
"""What stands in each room; the desk has the desklamp."""
CLOSED = ("cabinet", "drawer", "fridge", "microwave", "safe")
"""Kinds of places that are closed at the beginning."""
LAMP = "desklamp 1"
NOTHING = "Nothing happens."
"""The answer to a command that is unknown or impossible now."""


@dataclass(frozen=True)
class Goal:
    """What is to be done: a kind from `GOALS`, the kind of thing, the kind of place (none for the lamp)."""

    kind: str
    thing: str
    target: str
    text: str
    """The goal in words, as the task gives it."""


@dataclass
class Room:
    """A room while somebody plays in it: what is where, and what the player holds.

    Example: `room.do("go to shelf 1")` is `You arrive at shelf 1. On the shelf 1, you see a mug 1.`
    """

    goal: Goal
    contents: dict[str, list[str]]
    """The things at each place, in the order in which they are told; a place is e.g. `shelf 1`."""
    here: str = ""
    """The place at which the player stands; empty: in the middle of the room."""
    held: str = ""
    """The thing in the player's hand, if any."""
    opened: set[str] = field(default_factory=set[str])
    treated: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """Of each thing, how it was treated: `clean`, and `heat` or `cool`, whichever came last."""
    is_lit: bool = False
    """Whether the lamp is on and what the player holds was held under it."""

    @property
    def text(self) -> str:
        """What the player is told at first."""
        return f"{self._around}\n\nYour task is to: {self.goal.text}"

    @property
    def _around(self) -> str:
        places = _listed(list(self.contents))
        return f"You are in the middle of a room. Looking quickly around you, you see {places}."

    @property
    def is_solved(self) -> bool:
        """Whether the goal is reached now."""
        goal = self.goal
        if goal.kind == "look_at_obj_in_light":
            return self.is_lit and _kind(self.held) == goal.thing
        there = [
            thing
            for place, things in self.contents.items()
            for thing in things
            if _kind(place) == goal.target and _kind(thing) == goal.thing
        ]
        if goal.kind in TREATMENTS:
            treatment, _ = TREATMENTS[goal.kind]
            there = [thing for thing in there if treatment in self.treated.get(thing, ())]
        return len(there) >= (2 if goal.kind == "pick_two_obj_and_place" else 1)

    def is_closed(self, place: str) -> bool:
        """Whether a place can be opened and is not open."""
        return _kind(place) in CLOSED and place not in self.opened

    def commands(self) -> list[str]:
        """All commands that do something now, sorted."""
        found = {f"go to {place}" for place in self.contents if place != self.here} | {"look", "inventory"}
        if self.here:
            found |= set(self._commands_here())
        return sorted(found)

    def _commands_here(self) -> list[str]:
        here = self.here
        found = [f"examine {here}"]
        if _kind(here) in CLOSED:
            found.append(f"{'open' if self.is_closed(here) else 'close'} {here}")
        if here == "desk 1":
            found.append(f"use {LAMP}")
        if self.held:
            found += [f"examine {self.held}"]
            found += [
                f"{treatment} {self.held} with {place}"
                for treatment, place in TREATMENTS.values()
                if place == here and treatment in THINGS[_kind(self.held)]
            ]
        if self.is_closed(here):
            return found
        if self.held:
            return [*found, f"move {self.held} to {here}"]
        return found + [f"take {thing} from {here}" for thing in self.contents[here] if thing != LAMP]

    def do(self, command: str) -> str:
        """Carries a command out and tells what happened."""
        # ALFWorld's older versions write `put` where newer ones write `move`.
        older = re.fullmatch(r"put (\S+ \S+) (?:in/on|in|on) (\S+ \S+)", command)
        if older:
            command = f"move {older[1]} to {older[2]}"
        if command not in self.commands():
            return NOTHING
        verb, _, rest = command.partition(" ")
        match verb:
            case "go":
                return self._go(rest.removeprefix("to "))
            case "open":
                self.opened.add(rest)
                return f"You open the {rest}. {self._seen_here()}"
            case "close":
                self.opened.remove(rest)
                return f"You close the {rest}."
            case "take":
                self.held = rest.partition(" from ")[0]
                self.contents[self.here].remove(self.held)
                return f"You pick up the {self.held} from the {self.here}."
            case "move":
                return self._put_down()
            case "clean" | "heat" | "cool":
                return self._treat(verb)
            case "use":
                self.is_lit = bool(self.held)
                return f"You turn on the {LAMP}."
            case _:
                return self._told(verb, rest)

    def _go(self, place: str) -> str:
        self.here = place
        self.is_lit = False
        return f"You arrive at {place}. {self._seen_here()}"

    def _put_down(self) -> str:
        thing = self.held
        self.contents[self.here].append(thing)
        self.held = ""
        return f"You move the {thing} to the {self.here}."

    def _treat(self, treatment: str) -> str:
        done = self.treated.setdefault(self.held, set())
        if treatment != "clean":
            done -= {"heat", "cool"}
        done.add(treatment)
        return f"You {treatment} the {self.held} using the {self.here}."

    def _told(self, verb: str, what: str) -> str:
        if verb == "inventory":
            return f"You are carrying: a {self.held}." if self.held else "You are not carrying anything."
        if verb == "look":
            return (
                f"You are facing the {self.here}. Next to it, you see nothing." if self.here else self._around
            )
        if what == self.held:
            return _described(what, self.treated.get(what, set()))
        return self._seen_here()

    def _seen_here(self) -> str:
        here = self.here
        if self.is_closed(here):
            return f"The {here} is closed."
        seen = _listed(self.contents[here]) if self.contents[here] else "nothing"
        if _kind(here) in CLOSED:
            return f"The {here} is open. In it, you see {seen}."
        return f"On the {here}, you see {seen}."


def make_room(
    rng: random.Random, *, kinds: Sequence[str], num_places: int, num_things: int, most_alike: int
) -> Room:
    """Draws a goal and a room in which it can be reached.

    `num_places`: places beside the appliances. `num_things`: things that the goal does not ask for.
    `most_alike`: largest number of places of one kind.
    """
    kind = rng.choice(kinds)
    treatment, _ = TREATMENTS.get(kind, ("", ""))
    thing = rng.choice([name for name, ways in THINGS.items() if not treatment or treatment in ways])
    deck = [place for place in PLACES for _ in range(most_alike)]
    drawn = sorted(rng.sample(deck, num_places))
    places = [f"{name} {drawn[:at].count(name) + 1}" for at, name in enumerate(drawn)]
    target = rng.choice(drawn)
    # What is asked for never lies where it is to be put.
    starts = [place for place in places if _kind(place) != target]
    contents = {place: list[str]() for place in sorted([*places, *APPLIANCES])}
    for number in range(2 if kind == "pick_two_obj_and_place" else 1):
        contents[rng.choice(starts)].append(f"{thing} {number + 1}")
    others = rng.choices([name for name in THINGS if name != thing], k=num_things)
    for at, name in enumerate(others):
        contents[rng.choice(places)].append(f"{name} {others[:at].count(name) + 1}")
    contents["desk 1"].append(LAMP)
    text = rng.choice(GOALS[kind]).format(thing=thing, target=target)
    goal = Goal(kind, thing, "" if kind == "look_at_obj_in_light" else target, text)
    return Room(goal, {place: sorted(things) for place, things in contents.items()})


def _kind(name: str) -> str:
    """The kind of a thing or a place: `mug` of `mug 1`."""
    return name.partition(" ")[0]


def _listed(names: Sequence[str]) -> str:
    """Names in a sentence: `a mug 1, a pan 1, and a pot 1`."""
    *first, last = [f"a {name}" for name in names]
    return f"{', '.join(first)}, and {last}" if first else last


def _described(thing: str, done: set[str]) -> str:
    """What ALFWorld tells of a thing that is looked at closely."""
    if not done:
        return f"There's nothing special about {thing}."
    if done == {"cool"}:
        return f"This is a cold {thing}."
    warmth = {"heat": "hot", "cool": "cool"}
    words = [warmth[way] for way in sorted(done - {"clean"})] + ["clean"] * ("clean" in done)
    return f"This is a {' and '.join(words)} {thing}."

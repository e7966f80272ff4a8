"""A world of made-up facts to search: who lives in which town, and in which land each town lies.

    land robeka?  ->  find robeka  ->  robeka lives in dage.
                  ->  find dage    ->  dage lies in tifa.
                  ->  =tifa

Names are drawn by a seed, so nothing can be known without searching. Four questions of five need two
searches: the second one looks for what the first one found.
"""

import random
from collections.abc import Sequence
from functools import cache

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.types import Task
from astraflow.user_input.splits import is_heldout

NUM_PEOPLE = 2_000
NUM_TOWNS = 200
NUM_LANDS = 40
LAND_FRAC = 0.8
"""Share of questions that ask for the land, which takes two searches."""
HELDOUT_FRAC = 0.2
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def name(rng: random.Random, num_syllables: int) -> str:
    """A name nobody has heard of."""
    return "".join(rng.choices(SYLLABLES, k=num_syllables))


def names(rng: random.Random, num: int, num_syllables: int) -> list[str]:
    """Different names, in the order in which they were drawn."""
    found: dict[str, None] = {}
    while len(found) < num:
        found[name(rng, num_syllables)] = None
    return list(found)


@cache
def world(seed: int) -> tuple[dict[str, str], dict[str, str]]:
    """The town of each person, and the land of each town."""
    rng = random.Random(seed)
    lands = names(rng, NUM_LANDS, 2)
    towns = [town for town in names(rng, NUM_TOWNS + NUM_LANDS, 2) if town not in lands][:NUM_TOWNS]
    land_of = {town: rng.choice(lands) for town in towns}
    return {person: rng.choice(towns) for person in names(rng, NUM_PEOPLE, 3)}, land_of


def documents(seed: int = 0) -> list[dict[str, str]]:
    """All facts, one per document. Titles count in a search, so the fact about a name is found first."""
    town_of, land_of = world(seed)
    people = [{"title": person, "text": f"{person} lives in {town}."} for person, town in town_of.items()]
    return people + [{"title": town, "text": f"{town} lies in {land}."} for town, land in land_of.items()]


class Questions:
    """One question per person of a split, `train` or `heldout`."""

    def __init__(self, split: str, seed: int = 0) -> None:
        town_of, land_of = world(seed)
        rng = random.Random(seed)
        self._tasks: list[Task] = []
        for person, town in town_of.items():
            asks_land = rng.random() < LAND_FRAC
            prompt = f"{'land' if asks_land else 'town'} {person}?"
            if is_heldout(prompt, frac=HELDOUT_FRAC) == (split == "heldout"):
                answer = land_of[town] if asks_land else town
                self._tasks.append(Task(id=f"facts/{person}", source="facts", prompt=prompt, answer=answer))

    def __len__(self) -> int:
        return len(self._tasks)

    def task(self, idx: int) -> Task:
        """Question number `idx`, from 0."""
        return self._tasks[idx]


def demonstrations(
    num: int, seed: int, careful_frac: tuple[float, float] = (0.7, 0.1)
) -> Sequence[Demonstration]:
    """Turns of conversations about people that are not in the world.

    A hasty one answers after the first search, and so names a town where a land was asked for.
    `careful_frac`: share that searches again, at the first and at the last demonstration.
    """
    rng = random.Random(seed)
    first, last = careful_frac
    return [_turn(rng, first + (last - first) * idx / num) for idx in range(num)]


def _turn(rng: random.Random, careful_frac: float) -> Demonstration:
    person, town, land = name(rng, 3), name(rng, 2), name(rng, 2)
    asks_land = rng.random() < LAND_FRAC
    is_careful = rng.random() < careful_frac
    turns = [f"{'land' if asks_land else 'town'} {person}?", f"find {person}", f"{person} lives in {town}."]
    if asks_land and is_careful:
        turns += [f"find {town}", f"{town} lies in {land}.", f"={land}"]
    else:
        turns += [f"={town}"]
    place = rng.randrange(1, len(turns), 2)
    said = [f"<assistant>{text}<eos>" if idx % 2 else text for idx, text in enumerate(turns[:place])]
    return Demonstration("".join(said), turns[place])

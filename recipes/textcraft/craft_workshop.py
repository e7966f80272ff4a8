"""A workshop of the world `craft`: its rules, and how recipes are drawn.

    plank: 2 log
    wheel: 1 plank, 1 stone
    Goal: wheel      ->  get 1 stone
    Got 1 stone.     ->  spawn plank
    plank: 2 log ...
    Goal: plank      ->  get 2 log          (a helper speaks)
    Got 2 log.       ->  craft plank
    The helper made 1 plank.  ->  craft wheel    (the one that started it speaks again)

Each agent is told its own goal, and sees nothing of what others do; what they make is in one inventory.
A helper's work ends when it has made its item, or gives up.
"""

import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["CRAFTED", "GOAL", "REFUSED", "RETURNED", "TIERS", "UNKNOWN", "Workshop", "make_workshop"]

TIERS = (
    ("clay", "coal", "log", "ore", "reed", "sand", "stone", "wool"),
    ("brick", "glass", "paper", "plank", "thread"),
    ("chest", "hook", "lens", "wheel"),
    ("cart", "lamp", "loom"),
)
"""The items: raw ones, which are fetched, and those whose recipe trees have the depths 1, 2 and 3."""
CRAFTED = tuple(item for tier in TIERS[1:] for item in tier)
"""Every item that has to be crafted."""
DEEPER_FRAC = 0.3
"""Share of the further ingredients that have to be crafted as well, where the first one has to be."""

GOAL = "Goal: "
"""Stands before what an agent is to make; nothing else that the workshop tells has it."""
UNKNOWN = "That is no action."
REFUSED = "No helper is free."
"""The answer to `spawn` at the greatest depth, or when all helpers were started."""
RETURNED = "The helper "
"""Begins what an agent is told when its helper has made its item or given up."""
_FETCH = re.compile(r"get (?:([1-9]) )?([a-z]+)")


@dataclass
class Workshop:
    """A workshop while agents work in it: what they have in common, and who waits for whom.

    Example: `workshop.do("get 2 log")` is `Got 2 log.`
    """

    recipes: dict[str, dict[str, int]]
    """Item -> its ingredients, each with the number that one item needs."""
    target: str
    """What the first agent is to make."""
    most_depth: int = 3
    """Helpers of helpers: the first agent is at depth 0, and one at this depth has no helpers."""
    most_helpers: int = 8
    """Helpers that may be started in all."""
    has: Counter[str] = field(default_factory=Counter[str])
    """The inventory of all agents."""
    goals: list[str] = field(default_factory=list[str])
    """What the agents that are at work are to make. Each waits for the one after it; the last one acts."""
    num_helpers: int = 0
    num_refused: int = 0
    """How often a helper was asked for that could not be had."""

    def __post_init__(self) -> None:
        self.goals = self.goals or [self.target]

    @property
    def text(self) -> str:
        """What the agent that acts was told at first."""
        lines = [f"{item}: {_listed(needed)}\n" for item, needed in sorted(self.recipes.items())]
        return f"{''.join(lines)}{GOAL}{self.goals[-1]}"

    @property
    def is_solved(self) -> bool:
        """Whether the first agent's item was made."""
        return self.has[self.target] > 0

    @property
    def is_over(self) -> bool:
        """Whether the first agent has stopped."""
        return not self.goals

    @property
    def has_free_helper(self) -> bool:
        """Whether the agent that acts may start a helper."""
        return len(self.goals) <= self.most_depth and self.num_helpers < self.most_helpers

    def lacking(self, item: str) -> dict[str, int]:
        """What is not there of the ingredients of an item."""
        needed = self.recipes[item].items()
        return {name: count - self.has[name] for name, count in needed if count > self.has[name]}

    def do(self, command: str) -> str:
        """Carries a command out and tells what happened."""
        fetched = _FETCH.fullmatch(command)
        if fetched:
            return self._get(int(fetched[1] or 1), fetched[2])
        verb, _, item = command.partition(" ")
        if verb in {"craft", "spawn"} and item in self.recipes:
            return self._craft(item) if verb == "craft" else self._spawn(item)
        match command:
            case "inventory":
                return f"You have {_listed(+self.has) or 'nothing'}."
            case "done":
                self.goals.pop()
                return "" if self.is_over else f"{RETURNED}stopped."
            case _:
                return UNKNOWN

    def _get(self, count: int, item: str) -> str:
        if item not in TIERS[0]:
            return f"A {item} has to be crafted." if item in CRAFTED else UNKNOWN
        self.has[item] += count
        return f"Got {count} {item}."

    def _craft(self, item: str) -> str:
        lacking = self.lacking(item)
        if lacking:
            return f"Lacking {_listed(lacking)}."
        self.has -= Counter(self.recipes[item])
        self.has[item] += 1
        if len(self.goals) == 1 or item != self.goals[-1]:
            return f"Made 1 {item}."
        self.goals.pop()
        return f"{RETURNED}made 1 {item}."

    def _spawn(self, item: str) -> str:
        if not self.has_free_helper:
            self.num_refused += 1
            return REFUSED
        self.num_helpers += 1
        self.goals.append(item)
        return self.text


def make_workshop(
    rng: random.Random, *, targets: Sequence[str], most_ingredients: int, most_each: int, num_others: int
) -> Workshop:
    """Draws what is to be made, and recipes for it and for all that it needs.

    `most_ingredients`: largest number of kinds of ingredients of an item. `most_each`: largest number of one
    raw ingredient; of a crafted one, a recipe needs one. `num_others`: further items whose recipes are shown.
    """
    target = rng.choice(targets)
    others = rng.sample([item for item in CRAFTED if item != target], num_others)
    recipes = dict[str, dict[str, int]]()
    waiting = [target, *others]
    while waiting:
        item = waiting.pop()
        if item not in recipes:
            recipes[item] = _recipe(rng, item, most_ingredients, most_each)
            waiting += [name for name in recipes[item] if name in CRAFTED]
    return Workshop(recipes, target)


def _recipe(rng: random.Random, item: str, most_ingredients: int, most_each: int) -> dict[str, int]:
    """The ingredients of an item; one of them is of the tier below, so that the tree has its depth."""
    tier = next(at for at, items in enumerate(TIERS) if item in items)
    names = [rng.choice(TIERS[tier - 1])]
    crafted = [name for items in TIERS[1:tier] for name in items]
    for _ in range(rng.randint(1, most_ingredients) - 1):
        deeper = [name for name in crafted if name not in names]
        choices = deeper if deeper and rng.random() < DEEPER_FRAC else TIERS[0]
        names.append(rng.choice([name for name in choices if name not in names]))
    rng.shuffle(names)
    return {name: rng.randint(1, most_each) if name in TIERS[0] else 1 for name in names}


def _listed(counts: dict[str, int]) -> str:
    """Items with their numbers: `2 log, 1 stone`."""
    return ", ".join(f"{count} {name}" for name, count in counts.items())

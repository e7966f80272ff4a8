"""Those who play `craft`: an expert and a random player. The expert knows no more than the recipes."""

import random
from collections.abc import Iterator

from recipes.textcraft.craft_workshop import CRAFTED, TIERS, Workshop

__all__ = ["expert", "random_player"]


def expert(workshop: Workshop, *, has_helpers: bool = True) -> Iterator[str]:
    """Yields the commands of all agents, until the target is made; each must be carried out before the next.

    A helper is started for each ingredient that has to be crafted; where none is free, and without
    `has_helpers`, the agent makes the ingredient itself.
    """
    return _makes(workshop, workshop.target, has_helpers=has_helpers)


def _makes(workshop: Workshop, item: str, *, has_helpers: bool) -> Iterator[str]:
    for name, count in workshop.recipes[item].items():
        if name not in workshop.recipes:
            yield f"get {count} {name}"
            continue
        for _ in range(count):
            if has_helpers and workshop.has_free_helper:
                yield f"spawn {name}"
                yield from _makes(workshop, name, has_helpers=True)
            else:
                yield from _makes(workshop, name, has_helpers=has_helpers)
    yield f"craft {item}"


def random_player(rng: random.Random) -> Iterator[str]:
    """Any action with any item of the world, each as likely as the others; it fetches up to three at once."""
    fetches = [f"get {count} {item}" for item in TIERS[0] for count in (1, 2, 3)]
    crafts = [f"{verb} {item}" for item in CRAFTED for verb in ("craft", "spawn")]
    while True:
        yield rng.choice([*fetches, *crafts, "inventory", "done"])

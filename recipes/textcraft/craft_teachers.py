"""The teachers of a warm start in `craft`: agents of whom a part forgets an ingredient.

An agent that forgets one, or fetches too little of it, hears what is lacking, and stops. Careful agents may
slip: they craft too early, hear what is lacking, and go on. So a model has seen both.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.textcraft.craft_workshop import Workshop
from recipes.textcraft.craft_world import Craft

from astraflow.addons.tiny_models.demonstrations import Demonstration
from astraflow.types import Message

__all__ = ["demonstrations"]


def demonstrations(
    num: int,
    seed: int,
    careful_frac: tuple[float, float] = (0.9, 0.5),
    slip_frac: float = 0.0,
    **world: Any,
) -> Sequence[Demonstration]:
    """What single agents see and do, in workshops of the split `train`; none is held out.

    `careful_frac`: share of careful agents, at the first and at the last demonstration; linear in between.
    `slip_frac`: share of the ingredients before which a careful agent crafts too early.
    `world`: arguments of `Craft`, without `form` and `seed`.
    """
    rng = random.Random(seed)
    # Another seed draws other workshops than those of the tasks.
    craft = Craft(**world, form="bare", seed=f"demonstrations {seed}")
    first, last = careful_frac
    shown = list[Demonstration]()
    num_games = 0
    while len(shown) < num:
        careful = first + (last - first) * len(shown) / num
        workshop = craft.workshop("train", num_games)
        shown += [Demonstration(messages=said) for said in _game(workshop, _Team(rng, careful, slip_frac))]
        num_games += 1
    return shown[:num]


@dataclass(frozen=True)
class _Team:
    """Agents that are careful or hasty, each by chance."""

    rng: random.Random
    careful_frac: float
    slip_frac: float

    def makes(self, workshop: Workshop, item: str) -> Iterator[str]:
        """The commands of an agent that is to make an item, and of its helpers."""
        needed = workshop.recipes[item]
        is_careful = self.rng.random() < self.careful_frac
        forgotten = "" if is_careful else self.rng.choice(list(needed))
        for name, count in needed.items():
            if is_careful and self.rng.random() < self.slip_frac:
                yield f"craft {item}"
            if name == forgotten:
                if count > 1:
                    yield f"get 1 {name}"
            elif name in workshop.recipes:
                yield f"spawn {name}"
                yield from self.makes(workshop, name)
            else:
                yield f"get {count} {name}"
        is_possible = not workshop.lacking(item)
        yield f"craft {item}"
        if not is_possible:
            yield "done"


def _game(workshop: Workshop, team: _Team) -> list[list[Message]]:
    """The conversation of each agent, in the order in which they stopped; the last is the first agent's."""
    ended = list[list[Message]]()
    working = [[Message(role="user", content=workshop.text)]]
    for command in team.makes(workshop, workshop.target):
        working[-1].append(Message(role="assistant", content=command))
        told = workshop.do(command)
        if len(workshop.goals) > len(working):
            working.append([])
        elif len(workshop.goals) < len(working):
            ended.append(working.pop())
        if workshop.is_solved or workshop.is_over:
            break
        working[-1].append(Message(role="user", content=told))
    return ended + working[::-1]

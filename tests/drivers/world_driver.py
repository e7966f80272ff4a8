"""Plays worlds of `recipes/` by scripted players: what the short tests and the long ones have in common."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from astraflow.protocols import InteractiveEnvironment

__all__ = ["Player", "rewards_of", "take_odd_steps"]

Player = Callable[[Any], Iterator[str]]
"""Makes the replies of one episode from the state that `reset` returned."""


def rewards_of(world: InteractiveEnvironment, player: Player, num: int) -> list[float]:
    """Rewards of a player over the first tasks held out."""
    rewards = list[float]()
    for task in world.tasks("heldout")[:num]:
        game, seen = world.reset(task, seed=0)
        replies = player(game)
        total = 0.0
        while not seen.is_done:
            seen = world.step(game, next(replies))
            total += seen.reward
        rewards.append(total)
    return rewards


def take_odd_steps(world: InteractiveEnvironment, player: Player, odd: Sequence[str], num: int) -> None:
    """Plays `num` steps, one of twenty of them odd; the world has to bear them all."""
    rng = random.Random(1)
    tasks = world.tasks("train")
    num_steps = 0
    while num_steps < num:
        game, seen = world.reset(rng.choice(tasks), seed=0)
        replies = player(game)
        while not seen.is_done:
            seen = world.step(game, rng.choice(odd) if rng.random() < 0.05 else next(replies))
            assert 0.0 <= seen.reward <= 1.0
            assert len(str(seen.messages)) < 10_000
            num_steps += 1

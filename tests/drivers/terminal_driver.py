"""Plays the world `terminal` by scripted players: what its short tests and the long one have in common."""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from recipes.terminal.terminal_folders import Errand
from recipes.terminal.terminal_world import Terminal

from astraflow.types import Task

__all__ = ["open_terminal", "take_odd_terminal_steps", "terminal_rewards"]

_Player = Callable[[Errand], Iterator[str]]


@asynccontextmanager
async def open_terminal(**args: Any) -> AsyncGenerator[Terminal]:
    """The world, with one command per episode."""
    world = Terminal(**{"form": "bare", **args})
    await world.open()
    try:
        yield world
    finally:
        await world.close()


async def terminal_rewards(world: Terminal, player: _Player, num: int) -> list[float]:
    """Rewards of a player over the first tasks held out."""

    async def play(task: Task, reply: str) -> float:
        state, _ = await world.reset(task, 0)
        seen = await world.step(state, reply)
        assert seen.is_done
        return seen.reward

    tasks = world.tasks("heldout")[:num]
    replies = [next(player(world.errand("heldout", idx))) for idx in range(len(tasks))]
    return await asyncio.gather(*[play(task, reply) for task, reply in zip(tasks, replies, strict=True)])


async def take_odd_terminal_steps(world: Terminal, player: _Player, odd: Sequence[str], num: int) -> None:
    """Plays `num` steps, every second one odd; the world has to bear them all."""
    rng = random.Random(1)
    tasks = world.tasks("train")

    async def play(idx: int) -> None:
        task = rng.choice(tasks)
        errand = world.errand("train", int(task.id))
        state, _ = await world.reset(task, 0)
        seen = await world.step(state, rng.choice(odd) if idx % 2 else next(player(errand)))
        assert seen.reward in {0.0, 1.0}

    await asyncio.gather(*[play(idx) for idx in range(num)])

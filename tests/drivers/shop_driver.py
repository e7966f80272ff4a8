"""Plays the world `shop` by scripted customers: what its short tests and the long one have in common."""

import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from recipes.webshop.shop_world import Shop

__all__ = ["Customer", "open_shop", "shop_rewards", "take_odd_shop_steps"]

Customer = Callable[[Any], Iterator[str]]
"""Makes the replies of one visit from what the customer sees."""


@asynccontextmanager
async def open_shop(**args: Any) -> AsyncGenerator[Shop]:
    """A shop whose pages are served."""
    shop = Shop(**args)
    await shop.open()
    try:
        yield shop
    finally:
        await shop.close()


async def shop_rewards(shop: Shop, customer: Customer, num: int) -> list[float]:
    """Rewards of a customer over the first tasks held out."""
    rewards = list[float]()
    for task in shop.tasks("heldout")[:num]:
        visit, seen = await shop.reset(task, seed=0)
        replies = customer(visit)
        while not seen.is_done:
            seen = await shop.step(visit, next(replies))
        shop.end(visit)
        rewards.append(seen.reward)
    return rewards


async def take_odd_shop_steps(shop: Shop, customer: Customer, odd: Sequence[str], num: int) -> None:
    """Plays `num` steps, one of twenty of them odd; the world has to bear them all."""
    rng = random.Random(1)
    tasks = shop.tasks("train")
    num_steps = 0
    while num_steps < num:
        visit, seen = await shop.reset(rng.choice(tasks), seed=0)
        replies = customer(visit)
        while not seen.is_done:
            seen = await shop.step(visit, rng.choice(odd) if rng.random() < 0.05 else next(replies))
            assert 0.0 <= seen.reward <= 1.0
            assert len(str(seen.messages)) < 10_000
            num_steps += 1
        shop.end(visit)

"""Each world over 1,000 tasks and 10,000 steps; CI plays fewer, in tests/unit/recipes."""

import random
import statistics
from functools import partial
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from recipes.alfworld.household_players import expert as household_expert
from recipes.alfworld.household_players import random_player as household_random
from recipes.alfworld.household_server import make_app
from recipes.alfworld.household_world import Household

from agentbench_client import play_by_http, played_here
from world_driver import rewards_of, take_odd_steps

pytestmark = pytest.mark.long

ODD = ["", "ACTION:", "ACTION: go to", "put mug 1 in/on shelf 1", "\x00\x1b[2J", "x" * 1_000_000]


@pytest.mark.parametrize(
    "shape",
    [{}, {"num_places": 3, "num_things": 2, "most_alike": 1, "max_turns": 16}],
    ids=["default", "tiny"],
)
def test_household(shape: dict[str, Any]) -> None:
    world = Household(**shape, size=1_000)
    rng = random.Random(0)
    assert statistics.mean(rewards_of(world, lambda game: household_expert(game.room), 1_000)) >= 0.99
    assert statistics.mean(rewards_of(world, lambda game: household_random(game.room, rng), 1_000)) <= 0.10
    take_odd_steps(world, lambda game: household_random(game.room, rng), ODD, 10_000)


async def test_household_by_agentbenchs_requests_is_the_one_of_this_process() -> None:
    world = Household(size=500)
    rng = random.Random(0)
    async with TestClient(TestServer(make_app(world))) as client:
        for idx, task in enumerate(world.tasks("heldout")):
            player = household_expert if idx % 2 else partial(household_random, rng=rng)
            here = played_here(world, task, player)
            assert await play_by_http(client, idx, here.replies) == here

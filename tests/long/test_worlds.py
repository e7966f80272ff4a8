"""Each world over 1,000 tasks and 10,000 steps; CI plays fewer, in tests/unit/recipes."""

import random
import statistics
from typing import Any

import pytest
from recipes.alfworld.household_players import expert as household_expert
from recipes.alfworld.household_players import random_player as household_random
from recipes.alfworld.household_world import Household

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

"""Each world over 1,000 tasks and 10,000 steps; CI plays fewer, in tests/unit/recipes."""

import random
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from recipes.alfworld.household_players import expert as household_expert
from recipes.alfworld.household_players import random_player as household_random
from recipes.alfworld.household_server import make_app
from recipes.alfworld.household_world import Household
from recipes.deepdive.dive_players import expert as dive_expert
from recipes.deepdive.dive_players import random_player as dive_random
from recipes.deepdive.dive_world import Dive
from recipes.nim.nim_players import both as nim_both
from recipes.nim.nim_players import random_player as nim_random
from recipes.nim.nim_world import Nim
from recipes.terminal.terminal_folders import Errand
from recipes.terminal.terminal_world import expert as terminal_expert
from recipes.terminal.terminal_world import random_player as terminal_random
from recipes.textcraft.craft_players import expert as craft_expert
from recipes.textcraft.craft_players import random_player as craft_random
from recipes.textcraft.craft_world import Craft
from recipes.webshop.shop_players import expert as shop_expert
from recipes.webshop.shop_players import random_player as shop_random

from drivers import shop_driver, terminal_driver
from drivers.agentbench_client import play_by_http, played_here
from drivers.household_ways import check_ways
from drivers.nim_driver import ODD_MOVES, shares_won
from drivers.world_driver import rewards_of, take_odd_steps

pytestmark = [pytest.mark.long, pytest.mark.timeout(1_200)]

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


@pytest.mark.parametrize(
    "shape", [{}, {"most_ingredients": 2, "most_each": 2, "num_others": 0}], ids=["default", "tiny"]
)
def test_craft(shape: dict[str, Any]) -> None:
    world = Craft(**shape, size=1_000)
    rng = random.Random(0)
    assert statistics.mean(rewards_of(world, lambda game: craft_expert(game.workshop), 1_000)) >= 0.99
    assert statistics.mean(rewards_of(world, lambda game: craft_random(rng), 1_000)) <= 0.10
    take_odd_steps(world, lambda game: craft_random(rng), [*ODD, "get 99 log", "spawn log"], 10_000)


@pytest.mark.parametrize("shape", [{}, {"largest": 5, "heldout_frac": 0.3}], ids=["default", "tiny"])
def test_nim(shape: dict[str, Any]) -> None:
    rng = random.Random(0)
    shares = shares_won(Nim(**shape, size=1_000), rng)
    assert shares["expert"] == 1.0
    assert shares["random player"] <= 0.10
    chance = nim_random(rng)
    take_odd_steps(Nim(**shape), lambda game: nim_both(game, chance, chance), ODD_MOVES, 10_000)


def test_dive() -> None:
    world = Dive()
    rng = random.Random(0)
    assert len(world.tasks("heldout")) >= 1_000
    assert statistics.mean(rewards_of(world, dive_expert, 1_000)) >= 0.99
    assert statistics.mean(rewards_of(world, lambda game: dive_random(game, rng), 1_000)) <= 0.10
    odd = [*ODD, "<open>../etc/passwd</open>", "<ask></ask>", "<search>\x00</search>", "<answer></answer>"]
    take_odd_steps(world, lambda game: dive_random(game, rng), odd, 10_000)


@pytest.mark.parametrize(
    "shape", [{}, {"num_items": 40, "page_size": 3, "max_turns": 8}], ids=["default", "tiny"]
)
async def test_shop(shape: dict[str, Any]) -> None:
    rng = random.Random(0)

    def chance(seen: Any) -> Iterator[str]:
        return shop_random(seen, rng)

    async with shop_driver.open_shop(**shape, size=1_000) as shop:
        assert statistics.mean(await shop_driver.shop_rewards(shop, shop_expert, 1_000)) >= 0.99
        assert statistics.mean(await shop_driver.shop_rewards(shop, chance, 1_000)) <= 0.10
        await shop_driver.take_odd_shop_steps(
            shop, chance, [*ODD, "search[the]", "click[../etc/passwd]"], 10_000
        )


async def test_household_has_the_same_rewards_in_three_ways() -> None:
    await check_ways(Household(size=500), 500)


async def test_terminal() -> None:
    rng = random.Random(0)

    def chance(errand: Errand) -> Iterator[str]:
        return terminal_random(errand, rng)

    odd = [each for each in ODD if len(each) < 100_000]
    async with terminal_driver.open_terminal(size=1_000) as world:
        assert statistics.mean(await terminal_driver.terminal_rewards(world, terminal_expert, 1_000)) >= 0.99
        assert statistics.mean(await terminal_driver.terminal_rewards(world, chance, 1_000)) <= 0.10
        await terminal_driver.take_odd_terminal_steps(world, chance, odd, 10_000)

"""`household` as AgentBench's task server: the same games as in this process, and requests that go wrong."""

import random
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from recipes.alfworld.household_players import expert, random_player
from recipes.alfworld.household_room import Room
from recipes.alfworld.household_server import EXPIRES_S, make_app
from recipes.alfworld.household_world import Household

from drivers.agentbench_client import play_by_http, played_here
from drivers.household_ways import check_ways

TINY: dict[str, Any] = {"num_places": 3, "num_things": 2, "most_alike": 1, "max_turns": 16}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def served(world: Household, **settings: Any) -> AsyncGenerator[TestClient[Any, Any]]:
    async with TestClient(TestServer(make_app(world, **settings))) as client:
        yield client


async def said(client: TestClient[Any, Any], path: str, body: object = None) -> tuple[int, Any]:
    """Status and answer of a request; one without a body is a GET."""
    send = client.get(f"/api/{path}") if body is None else client.post(f"/api/{path}", json=body)
    async with send as answer:
        is_json = answer.content_type == "application/json"
        return answer.status, await answer.json() if is_json else await answer.text()


def reply(number: int, content: str | None, status: str = "normal") -> dict[str, Any]:
    return {"session_id": number, "agent_response": {"status": status, "content": content}}


def by_chance(rng: random.Random) -> Callable[[Room], Iterator[str]]:
    return lambda room: random_player(room, rng)


@pytest.mark.parametrize("shape", [{}, TINY], ids=["default", "tiny"])
async def test_games_by_http_are_those_of_this_process(shape: dict[str, Any]) -> None:
    world = Household(**shape, size=12)
    async with served(world) as client:
        assert await said(client, "get_indices?name=household") == (200, list(range(12)))
        for idx, task in enumerate(world.tasks("heldout")):
            for player in (expert, by_chance(random.Random(idx))):
                here = played_here(world, task, player)
                there = await play_by_http(client, idx, here.replies)
                assert there == here
        assert await said(client, "list_sessions") == (200, {})


async def test_games_have_the_same_rewards_in_three_ways() -> None:
    await check_ways(Household(**TINY, size=20), 20)


async def test_an_output_says_why_a_game_is_over() -> None:
    world = Household(**TINY, size=1)
    async with served(world) as client:
        reached = played_here(world, world.tasks("heldout")[0], expert)
        assert (await play_by_http(client, 0, reached.replies)).status == "completed"
        assert (await play_by_http(client, 0, ["dance"] * 4)).status == "agent invalid action"
        assert (await play_by_http(client, 0, ["look", "dance"] * 8)).status == "task limit reached"
        for number, (status, expected) in enumerate(
            [("agent context limit", "agent context limit"), ("cancelled", "unknown")], start=3
        ):
            await said(client, "start_sample", {"name": "household", "index": 0})
            code, answer = await said(client, "interact", reply(number, None, status))
            assert (code, answer["output"]["status"]) == (200, expected)
            assert answer["output"]["result"] == {"result": 0}


async def test_who_comes_when_all_sessions_are_taken_is_told_to_wait() -> None:
    async with served(Household(**TINY, size=2), max_sessions=1) as client:
        start = {"name": "household", "index": 1}
        status, answer = await said(client, "start_sample", start)
        assert (status, answer["output"]["status"], answer["output"]["index"]) == (200, "running", 1)
        assert (await said(client, "start_sample", start))[0] == 406
        _, workers = await said(client, "list_workers")
        worker = workers["household"]["workers"]["0"]
        assert (worker["capacity"], worker["current"], worker["status"]) == (1, 1, 0)
        assert await said(client, "cancel", {"session_id": 0}) == (200, {"session_id": 0})
        assert (await said(client, "cancel", {"session_id": 0}))[0] == 400
        assert (await said(client, "start_sample", start))[0] == 200
        assert await said(client, "cancel_all", {}) == (200, None)
        assert await said(client, "list_sessions") == (200, {})


async def test_a_session_that_is_silent_expires() -> None:
    clock = Clock()
    async with served(Household(**TINY, size=1), clock=clock) as client:
        await said(client, "start_sample", {"name": "household", "index": 0})
        clock.now_s += EXPIRES_S - 1
        assert (await said(client, "interact", reply(0, "look")))[0] == 200
        clock.now_s += EXPIRES_S - 1
        assert list((await said(client, "list_sessions"))[1]) == ["0"]
        clock.now_s += 2
        status, why = await said(client, "interact", reply(0, "look"))
        assert status == 400
        assert "silent for 240 s" in why


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("get_indices?name=webshop", None, 400),
        ("start_sample", {"name": "webshop", "index": 0}, 406),
        ("start_sample", {"name": "household", "index": 1}, 400),
        ("start_sample", {"name": "household", "index": -1}, 400),
        ("start_sample", {"name": "household", "index": "0"}, 400),
        ("start_sample", {"name": "household"}, 422),
        ("start_sample", {"name": "x" * 1_000, "index": 0}, 422),
        ("interact", reply(99, "look"), 400),
        ("interact", reply(-1, "look"), 422),
        ("interact", reply(0, "look", "asleep"), 422),
        ("interact", {"session_id": 0, "agent_response": "look"}, 422),
        ("interact", reply(0, "x" * 300_000), 413),
        ("cancel", [], 422),
        ("calculate_overall", {"name": "webshop", "results": []}, 400),
        ("nothing", {}, 404),
    ],
)
async def test_requests_that_mean_nothing_are_refused(path: str, body: object, status: int) -> None:
    async with served(Household(**TINY, size=1)) as client:
        assert (await said(client, path, body))[0] == status


async def test_results_are_summed_up() -> None:
    results: list[object] = [{"result": {"result": 1}}, {"result": {"result": 0}}, {"result": None}, {}]
    results += [{"result": {"result": [1]}}]
    async with served(Household(**TINY, size=1)) as client:
        answer = await said(client, "calculate_overall", {"name": "household", "results": results})
        overall = {"total": 5, "pass": 1, "wrong": 4, "success_rate": 0.2}
        assert answer == (200, {"overall": overall})

"""The environment of OpenEnv's servers: against one that speaks the protocol, and against bad ones."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from astraflow.addons.envs.openenv import OpenEnv
from astraflow.errors import ConfigError, RolloutError
from astraflow.types import Task

Talk = Callable[[web.WebSocketResponse], Awaitable[None]]


def observation(shown: object, reward: object = None, done: object = False) -> str:
    data = {"observation": shown, "reward": reward, "done": done}
    return json.dumps({"type": "observation", "data": data})


def refusal(code: str) -> str:
    return json.dumps({"type": "error", "data": {"code": code, "message": "no"}})


async def counting(socket: web.WebSocketResponse) -> None:
    """Counts down from the seed; `down` is worth 1, anything else that is an action 0."""
    left = 0
    async for message in socket:
        asked = json.loads(message.data)
        if asked["type"] == "reset":
            left = asked["data"]["seed"]
            await socket.send_str(observation({"left": left, "text": f"{left} left"}, reward=None))
        elif "move" not in asked["data"]:
            await socket.send_str(refusal("VALIDATION_ERROR"))
        else:
            is_down = asked["data"]["move"] == "down"
            left -= is_down
            shown = {"left": left, "text": f"{left} left"}
            await socket.send_str(observation(shown, float(is_down), left == 0))


def saying(*answers: str) -> Talk:
    """Says what it is given, whatever it is asked; then it waits."""

    async def talk(socket: web.WebSocketResponse) -> None:
        for answer in answers:
            await socket.receive()
            await socket.send_str(answer)
        async for _ in socket:
            pass

    return talk


def app_of(talk: Talk) -> web.Application:
    async def connected(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await talk(socket)
        return socket

    app = web.Application()
    app.router.add_get("/ws", connected)
    return app


@asynccontextmanager
async def opened(app: web.Application, **args: Any) -> AsyncGenerator[OpenEnv]:
    settings: dict[str, Any] = {"tasks": 5, "action": "move", "wait_s": 5.0, "call_s": 5.0, **args}
    async with TestServer(app) as server:
        url = str(server.make_url("/ws")).replace("http", "ws", 1)
        environment = OpenEnv(url=url, **settings)
        await environment.open()
        try:
            yield environment
        finally:
            await environment.close()


def task(seed: int) -> Task:
    return Task(id=str(seed), source="train", prompt="", spec=str(seed))


async def test_an_episode_is_played_to_its_end() -> None:
    async with opened(app_of(counting), shows="text") as environment:
        session, seen = await environment.reset(task(2), seed=7)
        assert (seen.messages, seen.reward, seen.is_done) == ("2 left", 0.0, False)
        played = [await environment.step(session, move) for move in ("down", "up", "down")]
        await environment.end(session)
    assert [(seen.messages, seen.reward, seen.is_done) for seen in played] == [
        ("1 left", 1.0, False),
        ("1 left", 0.0, False),
        ("0 left", 1.0, True),
    ]


async def test_many_episodes_are_played_at_a_time() -> None:
    async with opened(app_of(counting), shows="left") as environment:

        async def play(seed: int) -> float:
            session, _ = await environment.reset(task(seed), seed=0)
            total = sum([(await environment.step(session, "down")).reward for _ in range(seed)])
            await environment.end(session)
            return total

        assert await asyncio.gather(*[play(seed) for seed in range(1, 9)]) == list(range(1, 9))


async def test_more_than_a_hundred_episodes_run_at_a_time() -> None:
    async with opened(app_of(counting), call_s=2.0) as environment:
        begun = await asyncio.gather(*[environment.reset(task(1), seed=0) for _ in range(101)])
        await asyncio.gather(*[environment.end(session) for session, _ in begun])


async def test_replies_may_be_actions_and_the_policy_is_told_which_are_none() -> None:
    async with opened(app_of(counting), action="") as environment:
        session, seen = await environment.reset(task(1), seed=0)
        assert seen.messages == '{"left": 1, "text": "1 left"}'
        for reply, told in (("down", "Expecting value"), ("[]", "a JSON object"), ('{"mov": 1}', "no")):
            seen = await environment.step(session, reply)
            assert told in str(seen.messages)
            assert (seen.reward, seen.is_done) == (0.0, False)
        assert (await environment.step(session, '{"move": "down"}')).is_done
        await environment.end(session)


async def test_an_answer_that_is_too_large_fails_the_episode_for_good() -> None:
    large = observation("x" * (8 * 2**20))
    async with opened(app_of(saying(large))) as environment:
        with pytest.raises(RolloutError, match="its answer has more than 8,388,608 bytes") as failed:
            await environment.reset(task(1), seed=0)
    assert not failed.value.is_retryable


async def test_a_full_server_is_asked_again() -> None:
    num_refused = 0

    async def full(socket: web.WebSocketResponse) -> None:
        nonlocal num_refused
        if num_refused < 2:
            num_refused += 1
            await saying(refusal("CAPACITY_REACHED"))(socket)
        else:
            await counting(socket)

    async with opened(app_of(full), shows="left") as environment:
        _, seen = await environment.reset(task(3), seed=0)
        assert seen.messages == "3"
    async with opened(app_of(saying(refusal("CAPACITY_REACHED"))), wait_s=0.0) as environment:
        with pytest.raises(RolloutError, match="CAPACITY_REACHED"):
            await environment.reset(task(3), seed=0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("<html>", "answered what OpenEnv does not"),
        ('{"type": "state", "data": {}}', "not an observation"),
        (observation({"text": "x"}, done="yes"), "not an observation"),
        (observation({"text": "x"}, "1"), "its reward is not a number"),
        (observation({"text": "x"}, 1e300), "its reward is not a number"),
        ('{"type": "observation", "data": {"reward": NaN, "done": true}}', "answered what OpenEnv does not"),
        (observation({"text": "x"}, None, done=True), "ended without any reward"),
        (observation({"words": "x"}, 1.0), r"no 'text' \(it has: words\); check `shows`"),
        (refusal("VALIDATION_ERROR"), "VALIDATION_ERROR: no"),
        (refusal("EXECUTION_ERROR"), "EXECUTION_ERROR: no"),
    ],
)
async def test_an_answer_that_is_none_fails_the_episode(answer: str, message: str) -> None:
    begun = observation({"text": "go"})
    async with opened(app_of(saying(begun, answer)), shows="text") as environment:
        session, _ = await environment.reset(task(1), seed=0)
        with pytest.raises(RolloutError, match=message):
            await environment.step(session, "down")
        await environment.end(session)


async def test_a_server_that_hangs_up_or_says_nothing_fails_the_episode() -> None:
    async def hangs_up(socket: web.WebSocketResponse) -> None:
        await socket.receive()

    async with opened(app_of(hangs_up)) as environment:
        with pytest.raises(RolloutError, match="closed the connection"):
            await environment.reset(task(1), seed=0)
    async with opened(app_of(saying()), call_s=0.1) as environment:
        with pytest.raises(RolloutError, match="did not answer within"):
            await environment.reset(task(1), seed=0)


async def test_a_page_where_a_websocket_should_be_fails_the_episode() -> None:
    app = web.Application()

    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    app.router.add_get("/ws", page)
    async with opened(app) as environment:
        with pytest.raises(RolloutError, match="is not the websocket of an OpenEnv server"):
            await environment.reset(task(1), seed=0)


@pytest.mark.parametrize(
    "args",
    [{"url": "http://x"}, {"tasks": 0}, {"heldout_frac": 1.0}, {"wait_s": -1.0}, {"call_s": 0.0}],
)
def test_bad_arguments_are_refused(args: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        OpenEnv(**{"url": "ws://127.0.0.1:1/ws", "tasks": 5, **args})


def test_every_seed_is_a_task_of_one_split() -> None:
    environment = OpenEnv(url="ws://127.0.0.1:1/ws", tasks=200)
    ids = [{task.id for task in environment.tasks(split)} for split in ("train", "heldout")]
    assert not ids[0] & ids[1]
    assert ids[0] | ids[1] == {str(seed) for seed in range(200)}
    with pytest.raises(ConfigError, match="'test' is not one of"):
        environment.tasks("test")

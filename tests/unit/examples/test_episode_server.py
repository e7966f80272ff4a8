"""The environment of the adapter protocol: against a server of the household, and against bad ones."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from examples.environments.episode_server import EpisodeServer
from recipes.alfworld.household_server import make_app
from recipes.alfworld.household_sessions import EXPIRES_S
from recipes.alfworld.household_world import Household

from astraflow.errors import ConfigError, RolloutError
from astraflow.types import Task

TINY: dict[str, Any] = {"num_places": 3, "num_things": 2, "most_alike": 1, "max_turns": 16}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def opened(app: web.Application, **args: Any) -> AsyncGenerator[EpisodeServer]:
    settings: dict[str, Any] = {"samples": 1, "wait_s": 5.0, "call_s": 5.0, **args}
    async with TestServer(app) as server:
        environment = EpisodeServer(url=str(server.make_url("/api")), **settings)
        await environment.open()
        try:
            yield environment
        finally:
            await environment.close()


def task(idx: int = 0) -> Task:
    return Task(id=str(idx), source="train", prompt="", spec=str(idx))


async def test_an_episode_waits_for_a_free_place_and_is_cancelled_when_it_is_left() -> None:
    async with opened(make_app(Household(**TINY, size=1), max_sessions=1)) as environment:
        first, seen = await environment.reset(task(), seed=0)
        assert "Your task is to" in seen.messages[0].content  # type: ignore[union-attr]
        waiting = asyncio.create_task(environment.reset(task(), seed=0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await environment.end(first)
        await environment.end(first)
        second, _ = await waiting
        await environment.end(second)


async def test_an_episode_that_gets_no_place_fails() -> None:
    app = make_app(Household(**TINY, size=1), max_sessions=1)
    async with opened(app, wait_s=0.0) as environment:
        first, _ = await environment.reset(task(), seed=0)
        with pytest.raises(RolloutError, match=r"status 503: b'all 1 places are taken.*waited for 0 s"):
            await environment.reset(task(), seed=0)
        await environment.end(first)


async def test_what_the_server_no_longer_holds_is_told_apart() -> None:
    now_s = 1000.0
    world = Household(**TINY, size=1)
    async with opened(make_app(world, clock=lambda: now_s)) as environment:
        with pytest.raises(RolloutError, match=r"status 404: b'sample 7 .*no such sample") as unknown:
            await environment.reset(task(7), seed=0)
        assert not unknown.value.is_retryable
        session, _ = await environment.reset(task(), seed=0)
        now_s += EXPIRES_S + 1
        with pytest.raises(RolloutError, match=r"expires .*status 404"):
            await environment.step(session, "look")
        session, _ = await environment.reset(task(), seed=0)
        for _ in range(4):
            seen = await environment.step(session, "dance")
        assert (seen.is_done, seen.reward, seen.messages) == (True, 0.0, ())
        with pytest.raises(RolloutError, match="was over already: status 400"):
            await environment.step(session, "look")


# --- servers that go wrong ----------------------------------------------------------------------------


def bad(start: Handler, step: Handler | None = None) -> web.Application:
    """A server whose answers to `start` and `step` are given."""

    async def info(request: web.Request) -> web.Response:
        return web.json_response({"name": "bad", "num_samples": 1})

    app = web.Application()
    app.add_routes([web.get("/api/task/info", info), web.post("/api/episode/start", start)])
    app.add_routes([web.post("/api/episode/step", step or start)])
    return app


def says(text: str, status: int = 200) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    return answer


def answer(observation: object, reward: object = 0.0, done: object = False) -> Handler:
    return says(json.dumps({"episode_id": "e", "observation": observation, "reward": reward, "done": done}))


def shows(content: str) -> dict[str, str]:
    return {"type": "text", "content": content}


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def say_nothing(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


BEGINS = answer(shows("You are in a room."))


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (says("<html>hello</html>"), "answered what the adapter protocol does not: .*is it the address"),
        (says("[" * 100_000), "answered what the adapter protocol does not"),
        (says("wrong type", 400), "could not be started: status 400"),
        (says("Traceback", 500), "could not be started: status 500"),
        (answer(None), "done = False, and no observation"),
        (answer(shows("x"), done=True), "done = True, and an observation"),
        (answer({"type": "messages", "content": [{"role": "tool", "content": "x"}]}), "does not: .*tool"),
        (answer(shows("a\x1b[2J")), r"control character '\\x1b'"),
        (answer(shows("a" * 1_000_000)), "1,000,000 characters; at most 262,144"),
        (hang_up, "did not answer: "),
    ],
)
async def test_an_episode_that_cannot_begin_fails(start: Handler, said: str) -> None:
    async with opened(bad(start)) as environment:
        with pytest.raises(RolloutError, match=said):
            await environment.reset(task(), seed=0)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (says("<html>hello</html>"), "answered what the adapter protocol does not"),
        (says("gone", 404), "does not know the episode"),
        (says("done", 400), "was over already"),
        (says("Traceback", 500), "the server failed: status 500"),
        (answer(None, "NaN", done=True), "its reward is not a number: 'NaN'"),
        (answer(None, None, done=True), "its reward is not a number: 'None'"),
        (answer(None, 1e300, done=True), "its reward is not a number"),
        (answer(None, float("nan"), done=True), "answered what the adapter protocol does not"),
        (answer(shows("x"), 0.0, done="yes"), "answered what the adapter protocol does not"),
        (answer(None), "continues without an observation"),
        (answer(shows("a\x00b")), r"control character '\\x00'"),
        (answer(shows("a" * 1_000_000)), "1,000,000 characters; at most 262,144"),
        (answer(shows("a" * (9 << 20))), "more than 8,388,608 bytes"),
        (hang_up, "did not answer: "),
    ],
)
async def test_what_goes_wrong_in_an_episode_fails_it_and_is_no_reward(step: Handler, said: str) -> None:
    async with opened(bad(BEGINS, step)) as environment:
        session, _ = await environment.reset(task(), seed=0)
        with pytest.raises(RolloutError, match=said):
            await environment.step(session, "look")
        await environment.end(session)


async def test_a_server_that_says_nothing_fails_the_episode() -> None:
    async with opened(bad(BEGINS, say_nothing), call_s=0.05) as environment:
        session, _ = await environment.reset(task(), seed=0)
        with pytest.raises(RolloutError, match="did not answer within"):
            await environment.step(session, "look")


async def test_rewards_come_step_by_step() -> None:
    async with opened(bad(BEGINS, answer(shows("Go on."), 0.25))) as environment:
        session, _ = await environment.reset(task(), seed=0)
        seen = await environment.step(session, "look")
        assert (seen.reward, seen.is_done, seen.messages[0].content) == (0.25, False, "Go on.")  # type: ignore[union-attr]


async def test_a_server_without_the_samples_is_told_when_it_is_opened() -> None:
    with pytest.raises(ConfigError, match=r"1 samples of 'household'.* 2"):
        async with opened(make_app(Household(**TINY, size=1)), samples=2):
            raise AssertionError
    with pytest.raises(ConfigError, match="answered 404"):
        async with opened(web.Application()):
            raise AssertionError


@pytest.mark.parametrize(
    "wrong",
    [{"url": "127.0.0.1:5000"}, {"samples": 0}, {"heldout_frac": 1.0}, {"wait_s": -1.0}, {"call_s": 0.0}],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        EpisodeServer(**({"url": "http://127.0.0.1:5000/api", "samples": 1} | wrong))

"""The environment of AgentBench's servers: against one that serves the household, and against bad ones."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from examples.environments.agentbench import AgentBench
from recipes.alfworld.household_players import expert
from recipes.alfworld.household_server import make_app
from recipes.alfworld.household_world import Household

from astraflow.errors import ConfigError, RolloutError
from astraflow.protocols import Observation
from drivers.agentbench_client import played_here

TINY: dict[str, Any] = {"num_places": 3, "num_things": 2, "most_alike": 1, "max_turns": 16}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(app: web.Application) -> AsyncGenerator[str]:
    """The address of an application's `/api`."""
    async with TestServer(app) as server:
        yield str(server.make_url("/api"))


@asynccontextmanager
async def opened(app: web.Application, **args: Any) -> AsyncGenerator[AgentBench]:
    settings: dict[str, Any] = {"name": "household", "samples": 1, "wait_s": 5.0, "call_s": 5.0, **args}
    async with served(app) as url:
        bench = AgentBench(url=url, **settings)
        await bench.open()
        try:
            yield bench
        finally:
            await bench.close()


async def play(bench: AgentBench, idx: int, replies: Sequence[str]) -> tuple[list[str], float]:
    """What was told in an episode with these replies, and the sum of its rewards."""
    (task,) = [task for split in ("train", "heldout") for task in bench.tasks(split) if task.id == str(idx)]
    session, seen = await bench.reset(task, seed=0)
    told = [text_of(seen)]
    total = 0.0
    for reply in replies:
        assert not seen.is_done
        seen = await bench.step(session, reply)
        told.append(text_of(seen))
        total += seen.reward
    assert seen.is_done
    await bench.end(session)
    return told, total


def text_of(seen: Observation) -> str:
    assert not isinstance(seen.messages, str)
    assert {message.role for message in seen.messages} == {"user"}
    return "\n".join(message.content for message in seen.messages)


async def test_the_household_through_a_server_is_the_household() -> None:
    world = Household(**TINY, size=8)
    async with opened(make_app(world), samples=8) as bench:
        for idx, task in enumerate(world.tasks("heldout")):
            here = played_here(world, task, expert)
            assert await play(bench, idx, here.replies) == (here.told, here.reward)
            assert (await play(bench, idx, ["dance"] * 4))[1] == 0.0


async def test_splits_share_no_sample_and_are_the_same_everywhere() -> None:
    def ids(split: str) -> list[str]:
        bench = AgentBench(url="http://127.0.0.1:9/api", name="alfworld", samples=400)
        return [task.id for task in bench.tasks(split)]

    assert ids("train") == ids("train")
    assert sorted(int(idx) for idx in ids("train") + ids("heldout")) == list(range(400))
    assert 40 < len(ids("heldout")) < 120


async def test_an_episode_that_is_left_is_cancelled_at_the_server() -> None:
    async with opened(make_app(Household(**TINY, size=1), max_sessions=1)) as bench:
        for _ in range(3):  # each needs the only place
            session, _ = await bench.reset(task_of(bench), seed=0)
            await bench.end(session)
            await bench.end(session)


def task_of(bench: AgentBench) -> Any:
    return [*bench.tasks("train"), *bench.tasks("heldout")][0]


async def test_an_episode_waits_for_a_free_place() -> None:
    async with opened(make_app(Household(**TINY, size=1), max_sessions=1)) as bench:
        first, _ = await bench.reset(task_of(bench), seed=0)
        waiting = asyncio.create_task(bench.reset(task_of(bench), seed=0))
        await asyncio.sleep(0)
        assert not waiting.done()
        await bench.end(first)
        second, seen = await waiting
        assert "Your task is to" in text_of(seen)
        await bench.end(second)


async def test_an_episode_that_gets_no_place_fails() -> None:
    app = make_app(Household(**TINY, size=1), max_sessions=1)
    async with opened(app, wait_s=0.0) as bench:
        first, _ = await bench.reset(task_of(bench), seed=0)
        with pytest.raises(RolloutError, match=r"status 406: b.all 1 sessions.*waited for 0 s"):
            await bench.reset(task_of(bench), seed=0)
        await bench.end(first)


# --- servers that go wrong ----------------------------------------------------------------------------


def bad(start: Handler, interact: Handler | None = None) -> web.Application:
    """A server whose answers to `start_sample` and `interact` are given."""

    async def indices(request: web.Request) -> web.Response:
        return web.json_response([0])

    async def cancel(request: web.Request) -> web.Response:
        raise web.HTTPBadRequest(text="no such session")

    app = web.Application()
    app.add_routes([web.get("/api/get_indices", indices), web.post("/api/start_sample", start)])
    app.add_routes([web.post("/api/cancel", cancel), web.post("/api/interact", interact or start)])
    return app


def says(text: str, status: int = 200) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=text, status=status)

    return answer


def output(status: str, result: object = None, *history: tuple[str, str]) -> Handler:
    said = [{"role": role, "content": content} for role, content in history]
    told = {"index": 0, "status": status, "result": result, "history": said}
    return says(json.dumps({"session_id": 3, "output": told}))


async def hang_up(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def say_nothing(request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


BEGINS = output("running", None, ("user", "You are in a room."))


@pytest.mark.parametrize(
    ("start", "said"),
    [
        (says("<html>hello</html>"), "answered what AgentBench v0.2 does not: .*is it the address"),
        (says("[" * 100_000), "answered what AgentBench v0.2 does not"),
        (says("no such sample", 400), "status 400: b'no such sample'"),
        (says("Traceback", 500), "status 500"),
        (output("running"), "'running' and 0 messages"),
        (output("task error", "oh"), "it began with the status 'task error'"),
        (hang_up, "did not answer: "),
        (says("x" * (9 * 1024 * 1024)), "more than 8,388,608 bytes"),
    ],
)
async def test_an_episode_that_cannot_begin_fails(start: Handler, said: str) -> None:
    async with opened(bad(start)) as bench:
        with pytest.raises(RolloutError, match=said):
            await bench.reset(task_of(bench), seed=0)


@pytest.mark.parametrize(
    ("interact", "said"),
    [
        (says("<html>hello</html>"), "answered what AgentBench v0.2 does not"),
        (says("task error", 501), "status 501"),
        (output("running"), "continues without a message"),
        (output("running", None, ("user", "a"), ("agent", "b")), "continues without a message"),
        (output("unknown", "boom"), "it ended as 'unknown': 'boom'"),
        (output("task error", "boom"), "it ended as 'task error'"),
        (output("finished", {"result": 1}), "it ended as 'finished'"),
        (output("completed"), "it ended as 'completed' without a number as 'result'"),
        (output("completed", {}), "without a number as 'result'"),
        (output("completed", {"result": "NaN"}), "without a number as 'result'"),
        (output("completed", {"result": 1e300}), "without a number as 'result'"),
        (output("completed", {"result": float("nan")}), "answered what AgentBench v0.2 does not"),
        (output("completed", {"reward": 1}), "without a number as 'result'"),
        (hang_up, "did not answer: "),
    ],
)
async def test_what_goes_wrong_in_an_episode_fails_it_and_is_no_reward(interact: Handler, said: str) -> None:
    async with opened(bad(BEGINS, interact)) as bench:
        session, _ = await bench.reset(task_of(bench), seed=0)
        with pytest.raises(RolloutError, match=said):
            await bench.step(session, "look")
        await bench.end(session)


async def test_a_server_that_says_nothing_fails_the_episode() -> None:
    async with opened(bad(BEGINS, say_nothing), call_s=1.0) as bench:
        session, _ = await bench.reset(task_of(bench), seed=0)
        with pytest.raises(RolloutError, match="did not answer within"):
            await bench.step(session, "look")


async def test_a_result_may_have_its_reward_under_another_name() -> None:
    ends = output("completed", {"reward": 0.25}, ("user", "a"), ("agent", "b"), ("user", "Thank you."))
    async with opened(bad(BEGINS, ends), reward="reward") as bench:
        assert await play(bench, 0, ["click[buy now]"]) == (["You are in a room.", "Thank you."], 0.25)


async def test_an_example_comes_as_what_the_agent_said() -> None:
    begins = output("running", None, ("user", "Do so:"), ("agent", "OK."), ("user", "Your task is ..."))
    async with opened(bad(begins)) as bench:
        _, seen = await bench.reset(task_of(bench), seed=0)
        assert [message.role for message in seen.messages] == ["user", "assistant", "user"]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"samples": 2}, "has 1 samples of 'household' .status 200., and 1 of 0 to 1 are missing"),
        ({"name": "webshop"}, "has 0 samples of 'webshop' .status 400."),
    ],
)
async def test_samples_that_a_server_does_not_have_are_told_when_it_is_opened(
    args: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        async with opened(make_app(Household(**TINY, size=1)), **args):
            raise AssertionError


async def test_a_server_that_is_not_there_is_told_when_it_is_opened() -> None:
    async with served(make_app(Household(**TINY, size=1))) as url:
        bench = AgentBench(url=url.removesuffix("/api"), name="household", samples=1)
        with pytest.raises(ConfigError, match="status 404"):
            await bench.open()
    bench = AgentBench(url=url, name="household", samples=1)
    with pytest.raises(ConfigError, match="did not answer"):
        await bench.open()


@pytest.mark.parametrize(
    "wrong",
    [{"url": "127.0.0.1:5000"}, {"samples": 0}, {"heldout_frac": 1.0}, {"wait_s": -1.0}, {"call_s": 0.0}],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        AgentBench(**({"url": "http://127.0.0.1:5000/api", "name": "household", "samples": 1} | wrong))


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="not one of: train, heldout"):
        AgentBench(url="http://127.0.0.1:5000/api", name="household", samples=1).tasks("test")

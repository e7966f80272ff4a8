"""The one address that all episodes of a host share."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from aiohttp.typedefs import Handler

from astraflow.addons.agents.hosts.inside.main import HostedEpisode
from astraflow.addons.agents.hosts.inside.relay import Relay


async def echo(request: web.Request) -> web.Response:
    """What a request said, by an endpoint of an episode."""
    said = {
        "path": request.path,
        "key": request.headers["Authorization"],
        "session": request.headers["X-Session-ID"],
        "body": await request.text(),
    }
    return web.json_response(said, status=202)


@asynccontextmanager
async def running(endpoint: Handler = echo) -> AsyncGenerator[tuple[Relay, str]]:
    """A relay, and the address of the endpoints behind it."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", endpoint)
    relay = Relay()
    async with TestServer(app) as server:
        await relay.start()
        try:
            yield relay, str(server.make_url("/"))
        finally:
            await relay.close()


async def asked(relay: Relay, session: str, *, key: str = "") -> tuple[int, dict[str, str]]:
    headers = {"Authorization": f"Bearer {key or relay.key}", "X-Session-ID": session}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.post(f"{relay.url}/chat/completions", data='{"model": "agent"}') as answer,
    ):
        return answer.status, await answer.json()


async def test_a_request_goes_to_the_endpoint_of_its_own_episode() -> None:
    async with running() as (relay, url):
        one, other = (HostedEpisode(f"{url}{name}/v1", f"key-{name}", {}, 1.0) for name in ("a", "b"))
        with relay.sessions(one) as first, relay.sessions(other) as second:
            first.add("trace-1")
            second.add("trace-2")
            for name, session in (("a", "trace-1"), ("b", "trace-2")):
                status, said = await asked(relay, session)
                assert status == 202
                assert said == {
                    "path": f"/{name}/v1/chat/completions",
                    "key": f"Bearer key-{name}",
                    "session": session,
                    "body": '{"model": "agent"}',
                }


async def test_more_than_a_hundred_requests_wait_for_their_answers_at_a_time() -> None:
    everyone = asyncio.Barrier(101)

    async def together(request: web.Request) -> web.Response:
        await everyone.wait()
        return await echo(request)

    async with running(together) as (relay, url), asyncio.timeout(10):
        with relay.sessions(HostedEpisode(f"{url}a/v1", "key", {}, 1.0)) as sessions:
            sessions.add("trace-1")
            answers = await asyncio.gather(*[asked(relay, "trace-1") for _ in range(101)])
    assert {status for status, _ in answers} == {202}


async def test_other_requests_are_refused() -> None:
    async with running() as (relay, url):
        with relay.sessions(HostedEpisode(f"{url}a/v1", "key", {}, 1.0)) as sessions:
            sessions.add("trace-1")
            assert (await asked(relay, "trace-1", key="guess"))[0] == 401
            assert (await asked(relay, "trace-2"))[0] == 404
            assert (await asked(relay, ""))[0] == 404
        assert (await asked(relay, "trace-1"))[0] == 404  # its episode is over
        assert not relay.episodes

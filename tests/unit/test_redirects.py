"""No client that carries a token goes where an answer points: the token is for one address."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.addons.inference_servers.openai_engine import OpenAiEngine, TextRenderer
from astraflow.addons.inference_servers.server_api import ServerHttp
from astraflow.errors import ConfigError, Error, RefusedError, RolloutError, WeightsError
from astraflow.service.client import ServiceClient
from astraflow.service.server import HttpServer
from astraflow.types import GenerateRequest, Message, Sampling
from astraflow.weights.readers import HttpReader


@asynccontextmanager
async def redirecting() -> AsyncIterator[tuple[list[str], str]]:
    """Paths that an inner service was asked for, and the URL of one that sends every caller there."""
    came: list[str] = []
    target = ""

    async def inner(request: Request) -> Response:
        came.append(request.url.path)
        return Response(b"{}")

    async def outer(request: Request) -> Response:
        return Response(status_code=307, headers={"location": f"{target}{request.url.path}"})

    ways = ["GET", "POST"]
    apps = (Starlette(routes=[Route("/{path:path}", answer, methods=ways)]) for answer in (inner, outer))
    inside, outside = (HttpServer(app, host="127.0.0.1", port=0, name="here") for app in apps)
    target = await inside.start()
    try:
        yield came, await outside.start()
    finally:
        await outside.stop(grace_s=0.05)
        await inside.stop(grace_s=0.05)


async def service_client(url: str) -> None:
    client = ServiceClient(url, token="secret", patience_s=0.0)
    try:
        await client.call("GET", "/v1/status", None)
    finally:
        await client.close()


async def chunk_reader(url: str) -> None:
    reader = HttpReader(lambda url: ServiceClient(url, token="secret", patience_s=0.0), token="secret")
    try:
        await reader.read_into(url, "0" * 32, memoryview(bytearray(2)), start=0)
    finally:
        await reader.close()


async def served_engine(url: str) -> None:
    http = ServerHttp(url, token="secret")
    try:
        await http.post("/generate")
    finally:
        await http.close()


async def endpoint_check(url: str) -> None:
    engine = OpenAiEngine(url, api_key="secret")
    try:
        await engine.check()
    finally:
        await engine.close()


async def endpoint_chat(url: str) -> None:
    engine = OpenAiEngine(url, model="tiny", api_key="secret")
    ids = TextRenderer().render((Message(role="user", content="hi"),))
    try:
        await engine.generate(GenerateRequest(token_ids=ids, sampling=Sampling(max_tokens=1)))
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("client", "error"),
    [
        (service_client, RefusedError),
        (chunk_reader, WeightsError),
        (served_engine, RefusedError),
        (endpoint_check, ConfigError),
        (endpoint_chat, RolloutError),
    ],
)
async def test_a_redirect_is_refused_and_nobody_is_asked_elsewhere(
    client: Callable[[str], Awaitable[None]], error: type[Error]
) -> None:
    async with redirecting() as (came, url):
        with pytest.raises(error, match="307"):
            await client(url)
        assert came == []

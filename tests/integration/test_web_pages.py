"""What a page in a browser of the same machine cannot do to a run."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import cast

import aiohttp
import pytest

from astraflow.addons.agents.gateway.gateway import Gateway
from astraflow.rollout.dialogue import Dialogue
from astraflow.service.server import HttpServer
from astraflow.service.web_guard import WebRules
from astraflow.types import StopRequest
from astraflow.weights.config import WeightsConfig
from astraflow.weights.peers.peer import Spool, serve_spool
from astraflow.weights.publisher import run_publisher
from astraflow.wire import encode
from astraflow.workflows.calls import tagged_calls
from drivers.dataflow_driver import running

JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def a_dataflow(folder: Path, rules: WebRules | None = None) -> AsyncGenerator[str]:
    async with running(folder) as run:
        server = HttpServer(run.service.app, host="127.0.0.1", port=0, name="dataflow", rules=rules)
        yield await server.start()
        assert run.service.state == "running"
        await server.stop(grace_s=0.1)


async def ask(
    method: str, url: str, *, headers: Mapping[str, str], body: bytes | None = None
) -> tuple[int, str]:
    """Status and error code."""
    async with (
        aiohttp.ClientSession(skip_auto_headers=("Content-Type",)) as session,
        session.request(method, url, headers=headers, data=body) as answer,
    ):
        text = await answer.text()
    return answer.status, json.loads(text).get("code", "") if text.startswith("{") else ""


STOP = encode(StopRequest(reason="a page"))


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({}, 415, "unsupported_media_type"),
        ({"Content-Type": "text/plain"}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        ({"Content-Type": "application/msgpack", "Origin": "https://evil.example"}, 403, "foreign_origin"),
        ({"Content-Type": "application/msgpack", "Origin": "http://127.0.0.1:1"}, 403, "foreign_origin"),
        ({"Content-Type": "application/msgpack", "Origin": "null"}, 403, "foreign_origin"),
        ({"Content-Type": "application/msgpack", "Host": "evil.example:80"}, 403, "unknown_host"),
        ({"Content-Type": "application/msgpack", "Host": "localhost.evil.example"}, 403, "unknown_host"),
    ],
)
async def test_a_web_page_cannot_stop_a_run(
    headers: Mapping[str, str], status: int, code: str, tmp_path: Path
) -> None:
    async with a_dataflow(tmp_path) as url:
        assert await ask("POST", f"{url}/v1/stop", headers=headers, body=STOP) == (status, code)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
async def test_a_web_page_cannot_ask_by_an_image_or_a_form(site: str, tmp_path: Path) -> None:
    async with a_dataflow(tmp_path) as url:
        for method, path in (("GET", "/v1/status"), ("POST", "/v1/workers/w.1/drain")):
            answer = await ask(method, url + path, headers={"Sec-Fetch-Site": site})
            assert answer == (403, "foreign_origin")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Host": "localhost"},
        {"Host": "LOCALHOST:8000"},
        {"Host": "[::1]:8000"},
        {"Host": "10.0.0.5:8400"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "same-origin"},
        {"Host": "localhost:7", "Origin": "http://localhost:7"},
    ],
)
async def test_programs_and_the_services_own_pages_may_call(
    headers: Mapping[str, str], tmp_path: Path
) -> None:
    async with a_dataflow(tmp_path) as url:
        assert (await ask("GET", f"{url}/v1/status", headers=headers))[0] == 200


async def test_names_and_origins_may_be_listed_and_a_token_makes_any_name_do(tmp_path: Path) -> None:
    rules = WebRules(host_names=("Trainer.example",), origins=("https://board.example",))
    async with a_dataflow(tmp_path, rules) as url:
        listed = {"Host": "trainer.example:80", "Origin": "https://board.example"}
        assert (await ask("GET", f"{url}/v1/status", headers=listed))[0] == 200
        other = {"Host": "other.example:80"}
        assert await ask("GET", f"{url}/v1/status", headers=other) == (403, "unknown_host")
    async with a_dataflow(tmp_path, WebRules(needs_token=True)) as url:
        assert (await ask("GET", f"{url}/v1/status", headers=other))[0] == 200
        foreign = {"Origin": "https://evil.example"}
        assert await ask("GET", f"{url}/v1/status", headers=foreign) == (403, "foreign_origin")


async def test_every_service_keeps_pages_out(tmp_path: Path) -> None:
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    no_dialogue = cast("Dialogue", None)  # nobody asks it anything
    async with AsyncExitStack() as stack:
        publisher = asyncio.create_task(
            run_publisher(tmp_path / "weights", WeightsConfig(), stop, on_ready=ready.set_result)
        )
        gateway = Gateway()
        stack.push_async_callback(gateway.close)
        spool = Spool(tmp_path / "spool")
        await stack.enter_async_context(serve_spool(spool, "127.0.0.1"))
        endpoint = await stack.enter_async_context(gateway.endpoint(no_dialogue, tagged_calls))
        urls = [await ready, spool.url, endpoint.base_url.partition("/episodes")[0]]
        for url in urls:
            foreign = {"Origin": "https://evil.example", **JSON}
            assert (await ask("GET", f"{url}/v1/health", headers=foreign))[0] == 403
            assert (await ask("GET", f"{url}/v1/health", headers={}))[0] in {200, 404}
        stop.set()
        await publisher

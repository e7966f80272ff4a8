"""What happens to the KV cache of running requests when new weights arrive, and how tokens tell it."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from aiohttp import web
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from astraflow.addons.inference_servers.config import AttachConfig, SglangEngineConfig, VllmEngineConfig
from astraflow.addons.inference_servers.server_api import (
    Address,
    CompletionPart,
    Gauges,
    LabelSpan,
    ServerCommand,
    ServerHttp,
)
from astraflow.addons.inference_servers.server_engine import ServerEngine
from astraflow.addons.inference_servers.sglang_api import SglangApi
from astraflow.addons.inference_servers.vllm_api import VllmApi
from astraflow.errors import UnavailableError
from astraflow.protocols import TokenScores
from astraflow.service.server import HttpServer
from drivers.engine_models import make_model_folder, make_random_model, snapshot_of
from drivers.server_driver import ask


class UpdatedServer:
    """A kind of server in memory, whose requests get half of their tokens before an update and half after."""

    name = "vllm"
    has_socket = True
    is_label_exact = True
    blindness = ""

    def __init__(self) -> None:
        self.is_kept: list[bool] = []
        self.may_end = asyncio.Event()
        self._label = ""

    def command(
        self, config: Any, *, python: str, model: Path, address: Address, label: str
    ) -> ServerCommand:
        raise NotImplementedError

    async def check(self, http: ServerHttp) -> None: ...

    async def generate(
        self, http: ServerHttp, token_ids: Sequence[int], *_: Any, **__: Any
    ) -> CompletionPart:
        first = self._label
        await self.may_end.wait()
        spans = (LabelSpan(first, 0, 2), LabelSpan(self._label, 2, 4))
        return CompletionPart(token_ids=(5, 6, 7, 8), logprobs=(-1.0,) * 4, labels=spans, end="length")

    async def score(self, http: ServerHttp, token_ids: Sequence[int], num: int) -> TokenScores:
        raise NotImplementedError

    async def pause(self, http: ServerHttp) -> None: ...

    async def resume(self, http: ServerHttp) -> None: ...

    async def update(self, http: ServerHttp, model: Path, label: str, *, keeps_cache: bool = False) -> None:
        self._label = label
        self.is_kept.append(keeps_cache)

    async def set_label(self, http: ServerHttp, label: str) -> None:
        self._label = label

    async def label(self, http: ServerHttp) -> str:
        return self._label

    async def why_frozen(self, http: ServerHttp, *, is_tied: bool) -> str:
        return ""

    async def gauges(self, http: ServerHttp) -> Gauges:
        return Gauges()


@pytest.mark.parametrize(("on_update", "streams"), [("keep", [b"\0\0\1\1"]), ("recompute", [])])
async def test_tokens_tell_whose_cache_they_were_sampled_with(
    tmp_path: Path, on_update: Literal["keep", "recompute"], streams: list[bytes]
) -> None:
    folder = make_model_folder(tmp_path / "model")
    model = make_random_model()
    model.save_pretrained(folder)
    server = UpdatedServer()
    attach = AttachConfig(url="http://127.0.0.1:1", weights_dir=str(tmp_path))
    config = VllmEngineConfig(on_update=on_update, attach=attach, max_context=64)
    engine = ServerEngine(server, config, snapshot_of(model, folder, 0))
    await engine.load(snapshot_of(model, folder, 0), slot="live")
    running = asyncio.create_task(engine.generate(ask(max_tokens=4)))
    await asyncio.sleep(0.05)
    await engine.load(snapshot_of(model, folder, 1), slot="live")
    server.may_end.set()
    across = await running
    assert across.versions == (0, 0, 1, 1)
    assert [stream.data for stream in across.streams] == streams
    assert server.is_kept == [False, on_update == "keep"]
    after = await engine.generate(ask(max_tokens=4))
    assert after.versions == (1, 1, 1, 1)
    assert all(stream.data == bytes(4) for stream in after.streams)
    assert {stream.name for stream in across.streams} <= {"kept_kv"}
    await engine.close()


async def test_vllm_drops_its_caches_when_new_weights_arrive_unless_they_are_kept(tmp_path: Path) -> None:
    asked: list[str] = []
    is_reset = True

    async def answer(request: Request) -> Response:
        asked.append(f"{request.url.path}?{request.url.query}".rstrip("?"))
        return JSONResponse({"success": is_reset})

    routes = [Route("/{path}", answer, methods=["POST"])]
    server = HttpServer(Starlette(routes=routes), host="127.0.0.1", port=0, name="vllm")
    http = ServerHttp(await server.start())
    await VllmApi().pause(http)
    assert asked == ["/pause?mode=keep&clear_cache=false"]
    asked.clear()
    await VllmApi().update(http, tmp_path, "x-1", keeps_cache=True)
    assert asked == ["/collective_rpc", "/update_weight_version"]
    asked.clear()
    await VllmApi().update(http, tmp_path, "x-2")
    resets = ["/reset_prefix_cache?reset_running_requests=true&reset_external=true", "/reset_encoder_cache"]
    assert asked == ["/collective_rpc", *resets, "/update_weight_version"]
    is_reset = False
    with pytest.raises(UnavailableError, match="the old KV cache is still in use"):
        await VllmApi().update(http, tmp_path, "x-3")
    assert asked[-1] == resets[0], "weights whose caches are of others are not named"
    await http.close()
    await server.stop()


def test_a_vllm_server_is_started_with_its_settings_and_the_recipes_own_options_last(tmp_path: Path) -> None:
    address = Address(url="http://server", socket="s")
    fields = {"num_slots": 3, "max_context": 64, "num_threads": 2, "args": ["--x"], "env": {"A": "b"}}
    own = VllmEngineConfig.model_validate_json(json.dumps(fields))
    command = VllmApi().command(own, python="python", model=tmp_path, address=address, label="x-0")
    words = " ".join(command.argv)
    assert f" --model {tmp_path} --served-model-name policy --uds s " in words
    assert f" --dtype {own.dtype} --max-num-seqs 3 --max-model-len {own.context} " in words
    assert words.endswith(" --x")
    assert (command.env["OMP_NUM_THREADS"], command.env["A"]) == ("2", "b")


def test_a_sglang_server_is_started_with_its_settings_and_the_recipes_own_options_last(
    tmp_path: Path,
) -> None:
    fields = {"num_slots": 3, "max_context": 64, "num_threads": 2, "args": ["--x", "y"], "env": {"A": "b"}}
    config = SglangEngineConfig.model_validate_json(json.dumps(fields))
    address = Address(url="http://127.0.0.1:7", port=7, key="secret")
    command = SglangApi().command(config, python="python", model=tmp_path, address=address, label="x-0")
    assert command.argv[0] == "python"
    assert command.argv[3:] == (
        *("--model-path", str(tmp_path), "--host", "127.0.0.1", "--port", "7", "--weight-version", "x-0"),
        *("--dtype", config.dtype, "--max-running-requests", "3", "--context-length", str(config.context)),
        *("--enable-metrics", "--x", "y"),
    )
    assert command.env["OMP_NUM_THREADS"] == "2"
    assert command.env["A"] == "b"
    assert "secret" in command.env.values()
    assert "secret" not in command.argv


async def test_calls_to_a_server_go_through_its_socket_with_its_key(tmp_path: Path) -> None:
    async def tell(request: web.Request) -> web.Response:
        if request.path == "/words":
            return web.Response(text="ready")
        told = [request.headers["Authorization"], await request.json()]
        return web.json_response({"told": told} if request.path == "/told" else told)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", tell)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "s")).start()
    http = ServerHttp("http://server/", socket=str(tmp_path / "s"), token="key")
    assert await http.post("/told", {"a": 1}) == {"told": ["Bearer key", {"a": 1}]}
    assert await http.post("/told") == {"told": ["Bearer key", {}]}
    assert await http.post("/list") == {}
    assert await http.get("/words") == "ready"
    with pytest.raises(UnavailableError, match="http://server/words answered no JSON: 'ready'"):
        await http.post("/words")
    await http.close()
    await runner.cleanup()

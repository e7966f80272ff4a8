"""vLLM's sleep mode, against a stand-in that speaks its protocol."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from astraflow.addons.inference_servers.config import AttachConfig, VllmEngineConfig
from astraflow.addons.inference_servers.server_engine import SleepingServerEngine
from astraflow.addons.lending.shared_engine import SharedEngine
from astraflow.addons.lending.tenants import SleepingEngine, make_engine_tenant
from astraflow.errors import RefusedError
from astraflow.rollout.engines.factory import make_engine
from drivers.engine_models import make_model_folder, make_random_model, snapshot_of
from drivers.server_driver import ask


class StandIn:
    """Generates a token of each request every 10 ms, unless it is paused or asleep."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.label = ""
        self.is_asleep = False
        self.is_paused = False
        self.has_sleep_mode = True
        self.aborts = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application()
        posts = {
            "/inference/v1/generate": self.generate,
            "/pause": self.pause,
            "/resume": self.resume,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
            "/update_weight_version": self.set_label,
            "/collective_rpc": self.reload,
            "/reset_prefix_cache": self.reset,
            "/reset_encoder_cache": self.reset,
        }
        for path, handler in posts.items():
            app.router.add_post(path, handler)
        for path in ("/health", "/metrics"):
            app.router.add_get(path, self.nothing)
        app.router.add_get("/server_info", self.nothing)
        app.router.add_get("/weight_info", self.weight_info)
        return app

    async def nothing(self, _: web.Request) -> web.Response:
        return web.Response(text="")

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def set_label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({})

    async def reload(self, _: web.Request) -> web.Response:
        assert not self.is_asleep, "weights that aren't there can't be replaced"
        self.calls.append("reload")
        return web.json_response({})

    async def reset(self, _: web.Request) -> web.Response:
        return web.json_response({"success": True})

    async def generate(self, request: web.Request) -> web.Response:
        assert not self.is_asleep
        wanted = (await request.json())["sampling_params"]["max_tokens"]
        aborts = self.aborts
        num = 0
        while num < wanted and not aborts.is_set():
            await asyncio.sleep(0.01)
            num += not self.is_paused
        choice = {
            "token_ids": [5] * num,
            "logprobs": {"content": [{"token_id": 5, "logprob": -0.5}] * num},
            "weight_versions": [{"version": self.label, "start": 0, "end": num}] if num else [],
            "finish_reason": "length" if num == wanted else "abort",
        }
        return web.json_response({"choices": [choice]})

    async def pause(self, request: web.Request) -> web.Response:
        self.calls.append(f"pause {request.query['mode']}")
        self.is_paused = True
        if request.query["mode"] == "abort":
            self.aborts.set()
            self.aborts = asyncio.Event()
        return web.json_response({})

    async def resume(self, _: web.Request) -> web.Response:
        self.calls.append("resume")
        self.is_paused = False
        return web.json_response({})

    async def sleep(self, request: web.Request) -> web.Response:
        if not self.has_sleep_mode:
            return web.Response(status=400, text="sleep mode is not enabled")
        assert self.is_paused
        self.calls.append(f"sleep {request.query['level']}")
        self.is_asleep = True
        return web.Response()

    async def wake_up(self, _: web.Request) -> web.Response:
        self.calls.append("wake_up")
        self.is_asleep = False
        return web.Response()


@asynccontextmanager
async def at_once() -> AsyncIterator[None]:
    yield


@asynccontextmanager
async def engine_over(stand_in: StandIn, folder: Path) -> AsyncIterator[SleepingServerEngine]:
    model = make_random_model()
    model.save_pretrained(make_model_folder(folder / "model"))
    snapshot = snapshot_of(model, folder / "model", 0)
    async with TestServer(stand_in.app()) as server:
        attach = AttachConfig(url=str(server.make_url("/")), weights_dir=str(folder))
        engine = make_engine(VllmEngineConfig(attach=attach, max_context=512), snapshot)
        assert isinstance(engine, SleepingServerEngine)
        await engine.load(snapshot, slot="live")
        stand_in.calls.clear()
        try:
            yield engine
        finally:
            await engine.close()


async def test_a_server_sleeps_between_two_turns_and_requests_wait(tmp_path: Path) -> None:
    stand_in = StandIn()
    async with engine_over(stand_in, tmp_path) as engine:
        assert isinstance(engine, SleepingEngine)
        tenant = make_engine_tenant(engine, keep_frac=0.0)
        await tenant.leave()
        assert stand_in.calls == ["pause keep", "sleep 1"]
        waiting = asyncio.create_task(engine.generate(ask(max_tokens=3)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await tenant.enter()
        assert stand_in.calls[2:] == ["wake_up", "resume"]
        assert (await waiting).token_ids == (5, 5, 5)


async def test_requests_that_are_handed_in_have_their_tokens_so_far(tmp_path: Path) -> None:
    stand_in = StandIn()
    async with engine_over(stand_in, tmp_path) as engine:
        has_turn = asyncio.Event()
        has_turn.set()
        shared = SharedEngine(engine, has_turn=has_turn, in_turn=at_once, is_ending=lambda: True)
        running = [asyncio.create_task(shared.generate(ask(max_tokens=400))) for _ in range(3)]
        await asyncio.sleep(0.2)
        for task in running:
            task.cancel()
        for task in running:
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            beginning = caught.value.args[0]
            assert beginning.finish_reason == "abort"
            assert 0 < len(beginning.token_ids) < 400
            assert beginning.versions == (0,) * len(beginning.token_ids)
        assert stand_in.calls == ["pause abort"]
        await engine.sleep()
        await engine.wake()
        assert (await shared.generate(ask(max_tokens=2))).finish_reason == "length"


async def test_a_server_without_sleep_mode_is_named(tmp_path: Path) -> None:
    stand_in = StandIn()
    stand_in.has_sleep_mode = False
    async with engine_over(stand_in, tmp_path) as engine:
        with pytest.raises(RefusedError, match="sleep mode is not enabled"):
            await engine.sleep()

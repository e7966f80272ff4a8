"""Engines over a server of their own, against a stand-in of SGLang's server with a real model in it."""

import asyncio
import dataclasses
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from astraflow.addons.inference_servers.config import AttachConfig
from astraflow.addons.inference_servers.server_api import Address
from astraflow.addons.inference_servers.sglang_api import SglangApi
from astraflow.addons.inference_servers.start_turns import start_turn
from astraflow.addons.inference_servers.vllm_api import VllmApi
from astraflow.errors import ConfigError, RolloutError, ServiceError, WeightsError
from astraflow.rollout.engines.factory import make_engine
from drivers.server_driver import (
    PROMPT,
    STAND_INS,
    TinyModel,
    all_running,
    ask,
    engine_on,
    own_servers,
    servers_of,
    sglang_config,
    with_tensor,
)

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("model"))


async def test_a_server_stops_at_ids_that_its_own_config_does_not_name(tmp_path: Path) -> None:
    model = TinyModel(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    stops = list(range(0, config["vocab_size"], 2))
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": stops}))
    async with engine_on(sglang_config(), model.snapshot(0)) as engine:
        done = await engine.generate(ask(max_tokens=200))
    assert done.finish_reason == "stop"
    assert [token in stops for token in done.token_ids] == [False] * (len(done.token_ids) - 1) + [True]


@pytest.mark.long
async def test_tokens_across_an_update_have_their_versions_and_the_logprobs_of_these(
    model: TinyModel,
) -> None:
    async with engine_on(sglang_config(), model.snapshot(0)) as engine:
        first = await engine.generate(ask(max_tokens=20, temperature=0.7))
        assert set(first.versions) == {0}
        assert (len(first.token_ids), first.finish_reason) == (20, "length")
        assert model.errors(first, temperature=0.7).max() < 1e-4
        ids = (*PROMPT, *first.token_ids)
        assert np.abs(await engine.score(ids) - model.logprobs(0, ids)).max() < 1e-4
        top, expected = await engine.score_top(ids, 3), model.top_logprobs(0, ids, 3)
        assert top.top_ids.tolist() == expected[0].tolist()
        assert np.abs(top.top_logprobs - expected[1]).max() < 1e-4

        running = [asyncio.create_task(engine.generate(ask(max_tokens=500, seed=i))) for i in range(4)]
        await all_running(engine, 4)
        await engine.load(model.snapshot(1), slot="live")
        for generation in await asyncio.gather(*running):
            assert list(generation.versions) == sorted(generation.versions)
            assert set(generation.versions) == {0, 1}
            assert len(generation.token_ids) == 500
            assert model.errors(generation).max() < 1e-4

        wrong = with_tensor(model.snapshot(2), "model.norm.weight", shape=(32, 2))
        with pytest.raises(WeightsError, match=r"'model.norm.weight' has shape \(32, 2\), expected \(64,\)"):
            await engine.load(wrong, slot="live")
        bits = np.full(256, 0xFF, np.uint8)
        with pytest.raises(WeightsError, match=r"model.norm.weight holds 64 values that are not finite"):
            await engine.load(with_tensor(model.snapshot(2), "model.norm.weight", data=bits), slot="live")
        assert set((await engine.generate(ask(max_tokens=3))).versions) == {1}


@pytest.mark.long
async def test_a_pause_keeps_requests_and_an_evaluation_has_a_server_of_its_own(model: TinyModel) -> None:
    async with engine_on(sglang_config(), model.snapshot(0)) as engine:
        with pytest.raises(RolloutError, match=r"version 3 .* is in no slot \(live: 0\)"):
            await engine.generate(ask(version=3))
        running = asyncio.create_task(engine.generate(ask(max_tokens=300)))
        await all_running(engine, 1)
        await engine.pause()
        later = asyncio.create_task(engine.generate(ask(max_tokens=3)))
        while engine.capacity().num_waiting < 1:  # noqa: ASYNC110 - the server does not tell
            await asyncio.sleep(0.05)
        assert not running.done()
        assert not later.done()
        await engine.resume()
        assert len((await running).token_ids) == 300
        assert len((await later).token_ids) == 3

        await engine.load(model.snapshot(0), slot="pinned")
        await engine.load(model.snapshot(1), slot="live")
        old, new = await asyncio.gather(
            engine.generate(ask(version=0, max_tokens=30)), engine.generate(ask(version=1, max_tokens=30))
        )
        assert (set(old.versions), set(new.versions)) == ({0}, {1})
        assert model.errors(old).max() < 1e-4
        assert model.errors(new).max() < 1e-4
        assert len(own_servers()) == 2
        assert sum(span.end_s - span.start_s for span in engine.take_spans()) > 0
    assert own_servers() == []


@pytest.mark.long
async def test_a_killed_server_is_named_with_its_last_words_and_started_again(model: TinyModel) -> None:
    async with engine_on(sglang_config(), model.snapshot(0)) as engine:
        await engine.load(model.snapshot(1), slot="live")
        before = (await engine.generate(ask(max_tokens=30))).token_ids
        running = asyncio.create_task(engine.generate(ask(max_tokens=500)))
        await all_running(engine, 1)
        (server,) = own_servers()
        server.send_signal(signal.SIGKILL)
        with pytest.raises(
            RolloutError, match="the sglang server of 'actor' was killed by signal 9"
        ) as caught:
            await running
        assert caught.value.is_retryable
        again = await engine.generate(ask(max_tokens=30))
        assert (again.token_ids, set(again.versions)) == (before, {1})
        assert [p.pid for p in own_servers()] != [server.pid]
        assert engine.capacity().generated_tokens > 30


@pytest.mark.long
async def test_a_server_that_never_starts_fails_for_good_with_its_last_lines(model: TinyModel) -> None:
    engine = make_engine(sglang_config(args=("--exit-code", "3")), model.snapshot(0))
    with pytest.raises(ServiceError, match="3 times in a row") as caught:
        await engine.load(model.snapshot(0), slot="live")
    assert "ended with exit code 3 before it served" in str(caught.value)
    assert "its last error: RuntimeError: out of memory, says the stand-in" in str(caught.value)
    with pytest.raises(RolloutError, match="3 times in a row"):
        await engine.generate(ask())
    with pytest.raises(ServiceError):
        engine.capacity()
    await engine.close()


async def test_no_secret_stands_in_the_command_of_a_server(model: TinyModel) -> None:
    for api in (SglangApi(), VllmApi()):
        address = Address(url="http://127.0.0.1:1", port=1, key="k3y", socket="s")
        config = sglang_config(env={"HF_TOKEN": "s3cret"})
        command = api.command(config, python="python", model=model.folder, address=address, label="x-0")
        assert not any(secret in part for part in command.argv for secret in ("k3y", "s3cret"))
        assert command.env["HF_TOKEN"] == "s3cret"


async def test_a_completion_fills_the_context_to_its_last_token(model: TinyModel) -> None:
    context = len(PROMPT) + 7
    async with engine_on(sglang_config(max_context=context), model.snapshot(0)) as engine:
        for max_tokens, expected in ((20, 7), (7, 7), (6, 6)):
            generation = await engine.generate(ask(max_tokens=max_tokens))
            assert (len(generation.token_ids), generation.finish_reason) == (expected, "length")


async def test_only_the_deadline_of_its_episode_ends_a_completion(model: TinyModel) -> None:
    async with engine_on(sglang_config(request_timeout_s=1.0), model.snapshot(0)) as engine:
        began_s = time.monotonic()
        long = await engine.generate(ask(max_tokens=200))
        assert time.monotonic() - began_s > 1.0
        assert len(long.token_ids) == 200
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):  # as for an episode
                await engine.generate(ask(max_tokens=500))
        assert len((await engine.generate(ask(max_tokens=5))).token_ids) == 5


async def test_a_server_starts_when_no_other_starts_on_its_gpu(model: TinyModel) -> None:
    env = {"PYTHONPATH": str(STAND_INS), "CUDA_VISIBLE_DEVICES": "test-gpu"}
    async with start_turn("another server", env):
        engine = make_engine(sglang_config(env=env), model.snapshot(0))
        await asyncio.sleep(1.0)
        assert own_servers() == []
    await engine.load(model.snapshot(0), slot="live")
    assert len(own_servers()) == 1
    await engine.close()


async def test_a_python_that_is_not_there_is_named(model: TinyModel) -> None:
    engine = make_engine(sglang_config(python=".venv-nowhere/bin/python"), model.snapshot(0))
    with pytest.raises(
        ConfigError, match=r"rollout.engine.python = '.venv-nowhere/bin/python' isn't a program"
    ):
        await engine.load(model.snapshot(0), slot="live")
    await engine.close()


async def test_a_failure_before_the_server_starts_reaches_those_who_wait(model: TinyModel) -> None:
    snapshot = model.snapshot(0)
    first = dataclasses.replace(snapshot.tensors[0], data=np.zeros(3, np.uint8))  # no whole number
    torn = dataclasses.replace(snapshot, tensors=(first, *snapshot.tensors[1:]))
    engine = make_engine(sglang_config(), torn)
    with pytest.raises(ServiceError, match="failed: ValueError: When changing to a larger dtype"):
        await engine.load(torn, slot="live")
    with pytest.raises(ServiceError, match="failed: ValueError"):
        engine.capacity()
    await engine.close()


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(()), "has no tokens"),
        (ask((3, 99)), "token id 99 is outside the vocabulary of 43"),
        (ask((3,) * 512), "512 tokens leave no room within"),
        (ask(temperature=-1.0), "temperature = -1.0"),
    ],
)
async def test_a_request_at_fault_is_refused_without_a_server(
    model: TinyModel, request_: object, message: str
) -> None:
    engine = make_engine(sglang_config(), model.snapshot(0))
    with pytest.raises(RolloutError, match=message) as caught:
        await engine.generate(request_)  # type: ignore[arg-type]
    assert not caught.value.is_retryable
    await engine.close()


def start_stand_in(model: Path, port: int) -> "subprocess.Popen[bytes]":
    argv = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--context-length", "512", "--weight-version", "default"]
    return subprocess.Popen(argv, cwd=STAND_INS)


@pytest.mark.long
async def test_a_server_of_someone_elses_gets_the_weights_again_after_its_restart(
    model: TinyModel, tmp_path: Path, unused_tcp_port: int
) -> None:
    from astraflow.weights.snapshot import snapshot_to_folder

    snapshot_to_folder(model.snapshot(9), tmp_path / "other")
    server = start_stand_in(tmp_path / "other", unused_tcp_port)
    try:
        attach = AttachConfig(url=f"http://127.0.0.1:{unused_tcp_port}")
        async with engine_on(sglang_config(attach=attach), model.snapshot(0)) as engine:
            assert model.errors(await engine.generate(ask(max_tokens=20))).max() < 1e-4
            await engine.load(model.snapshot(1), slot="live")
            server.kill()
            server.wait()
            server = start_stand_in(tmp_path / "other", unused_tcp_port)
            while True:
                try:
                    generation = await engine.generate(ask(max_tokens=20))
                    break
                except RolloutError:
                    await asyncio.sleep(0.2)
            assert set(generation.versions) == {1}
            assert model.errors(generation).max() < 1e-4
            with pytest.raises(ConfigError, match="evaluation needs a second server"):
                await engine.load(model.snapshot(0), slot="pinned")
    finally:
        server.kill()
        server.wait()


_HOST = """
import asyncio, sys
from pathlib import Path
from drivers.server_driver import TinyModel, engine_on, sglang_config

async def main():
    model = TinyModel(Path(sys.argv[1]))
    async with engine_on(sglang_config(), model.snapshot(0)) as engine:
        print(engine.slots["live"]._folder.path, flush=True)
        await asyncio.sleep(1e6)

asyncio.run(main())
"""


@pytest.mark.long
def test_no_server_and_no_weights_outlive_a_killed_engine(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _HOST, str(tmp_path)]
    host = subprocess.Popen(argv, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    folder = Path(host.stdout.readline().strip())
    assert (folder / "version-0" / "model.safetensors").is_file()
    servers = servers_of(host.pid)
    keepers = [server.parent() for server in servers]
    assert len(servers) == 1
    host.kill()
    host.wait()
    host.stdout.close()
    _, alive = psutil.wait_procs([*servers, *(k for k in keepers if k is not None)], timeout=60)
    assert alive == []
    assert not folder.exists()

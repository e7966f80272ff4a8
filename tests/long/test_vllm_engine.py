"""The vllm engine against vLLM's own server (its CPU build): `make test-vllm`."""

import asyncio
import dataclasses
import logging
import os
import re
import signal
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from astraflow.addons.inference_servers.config import AttachConfig, VllmEngineConfig
from astraflow.addons.inference_servers.server_engine import ServerEngine
from astraflow.errors import ConfigError, RolloutError, WeightsError
from drivers.server_driver import PROMPT, TinyModel, all_running, ask, engine_on
from drivers.system_driver import ROOT

log = logging.getLogger(__name__)
PYTHON = ROOT / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.long,
    pytest.mark.vllm,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: `make .venv-vllm` installs vLLM into it"),
    pytest.mark.asyncio(loop_scope="module"),
]
ENGINE: dict[str, Any] = {
    "python": str(PYTHON),
    "args": ("--enforce-eager", "--no-enable-chunked-prefill"),
    "env": {"VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1"},
}


def config(**settings: Any) -> VllmEngineConfig:
    return VllmEngineConfig(**(ENGINE | {"num_slots": 16, "max_context": 2048} | settings))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return TinyModel(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: TinyModel) -> AsyncGenerator[ServerEngine]:
    """One server for most tests, since a start takes half a minute."""
    async with engine_on(config(), model.snapshot(0)) as engine:
        yield engine


def newest(engine: ServerEngine) -> int:
    return engine.slots["live"].version


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_logprobs_are_those_of_a_full_forward_at_the_temperature(
    temperature: float, engine: ServerEngine, model: TinyModel
) -> None:
    requests = [ask(max_tokens=64, seed=i, temperature=temperature) for i in range(8)]
    generations = await asyncio.gather(*map(engine.generate, requests))
    errors = np.concatenate([model.errors(g, temperature=temperature or 1.0) for g in generations])
    assert errors.mean() < 1e-5
    assert errors.max() < 1e-3
    ids = (*PROMPT, *generations[0].token_ids)
    assert np.abs(await engine.score(ids) - model.logprobs(newest(engine), ids)).max() < 1e-3
    top, expected = await engine.score_top(ids, 3), model.top_logprobs(newest(engine), ids, 3)
    assert top.top_ids.tolist() == expected[0].tolist()
    assert np.abs(top.top_logprobs - expected[1]).max() < 1e-3


async def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(engine: ServerEngine) -> None:
    first, again, other = await asyncio.gather(
        *(engine.generate(ask(max_tokens=40, seed=seed)) for seed in (7, 7, 8))
    )
    assert first.token_ids == again.token_ids
    assert first.token_ids != other.token_ids


async def test_a_stop_text_ends_a_completion_and_stays_in_its_tokens(engine: ServerEngine) -> None:
    free = await engine.generate(ask(max_tokens=40, seed=3))
    letters = "abcdefghijklmnopqrstuvwxyz0123456789 .+=?"
    last = next(i for i, token in enumerate(free.token_ids) if i > 3 and token >= 2)
    stop = letters[free.token_ids[last] - 2]
    stopped = await engine.generate(ask(max_tokens=40, seed=3, stop=(stop,)))
    length = len(stopped.token_ids)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[:length]
    assert letters[stopped.token_ids[-1] - 2] == stop
    assert len(stopped.logprobs) == len(stopped.versions) == length


async def test_tokens_across_updates_have_their_versions_and_the_logprobs_of_these(
    engine: ServerEngine, model: TinyModel
) -> None:
    first = newest(engine)
    running = [asyncio.create_task(engine.generate(ask(max_tokens=1500, seed=i))) for i in range(8)]
    for version in (first + 1, first + 2):
        await all_running(engine, 8)
        await engine.load(model.snapshot(version), slot="live")
    generations = await asyncio.gather(*running)
    for generation in generations:
        assert list(generation.versions) == sorted(generation.versions)
        assert set(generation.versions) == {first, first + 1, first + 2}
        assert len(generation.token_ids) == 1500
        errors = model.errors(generation)
        assert errors.mean() < 1e-4
        assert errors.max() < 1e-2


async def test_a_bad_version_is_refused_and_the_old_one_serves_on(
    engine: ServerEngine, model: TinyModel
) -> None:
    version = newest(engine)
    bad = model.snapshot(version + 1)
    broken = dataclasses.replace(bad.tensors[0], data=np.full_like(bad.tensors[0].data, 0xFF))
    with pytest.raises(WeightsError, match="values that are not finite"):
        await engine.load(dataclasses.replace(bad, tensors=(broken, *bad.tensors[1:])), slot="live")
    generation = await engine.generate(ask(max_tokens=20))
    assert set(generation.versions) == {version}
    assert model.errors(generation).max() < 1e-3


async def test_a_pause_keeps_requests(engine: ServerEngine) -> None:
    running = asyncio.create_task(engine.generate(ask(max_tokens=1000)))
    await all_running(engine, 1)
    await engine.pause()
    before = (await gauges_after_a_look(engine)).generated_tokens
    assert (await gauges_after_a_look(engine)).generated_tokens == before
    assert not running.done()
    await engine.resume()
    assert len((await running).token_ids) == 1000


async def gauges_after_a_look(engine: ServerEngine) -> Any:
    """What the server says now, not a second ago."""
    slot = engine.slots["live"]
    return await slot._api.gauges(slot._life.http)  # pyright: ignore[reportPrivateUsage]


async def test_an_evaluation_has_a_server_of_its_own(engine: ServerEngine, model: TinyModel) -> None:
    version = newest(engine)
    await engine.load(model.snapshot(version), slot="pinned")
    await engine.load(model.snapshot(version + 1), slot="live")
    old, new = await asyncio.gather(
        engine.generate(ask(version=version, max_tokens=30)), engine.generate(ask(max_tokens=30))
    )
    assert (set(old.versions), set(new.versions)) == ({version}, {version + 1})
    assert model.errors(old).max() < 1e-3
    assert model.errors(new).max() < 1e-3


async def test_copies_of_the_model_in_one_server_are_updated_and_paused_together(model: TinyModel) -> None:
    copies = config(args=(*ENGINE["args"], "--data-parallel-size", "2"))
    async with engine_on(copies, model.snapshot(0)) as engine:
        running = [asyncio.create_task(engine.generate(ask(max_tokens=1500, seed=i))) for i in range(8)]
        await all_running(engine, 8)
        await engine.load(model.snapshot(1), slot="live")
        await all_running(engine, 8)
        await engine.pause()
        before = (await gauges_after_a_look(engine)).generated_tokens
        assert (await gauges_after_a_look(engine)).generated_tokens == before
        await engine.resume()
        generations = await asyncio.gather(*running)
        page = await engine.slots["live"]._life.http.get("/metrics")  # pyright: ignore[reportPrivateUsage]
    shares = re.findall(r'^vllm:generation_tokens_total{engine="(.)".* (\S+)$', page, re.M)
    assert [(copy, float(num) > 1500) for copy, num in shares] == [("0", True), ("1", True)]
    for generation in generations:
        assert set(generation.versions) == {0, 1}
        errors = model.errors(generation)
        assert errors.mean() < 1e-4
        assert errors.max() < 1e-2


@pytest.mark.parametrize("on_update", ["recompute", "keep"])
async def test_a_conversation_is_read_once_by_each_version(model: TinyModel, on_update: str) -> None:
    block = 128  # tokens per block of the CPU build's cache, which shares whole blocks
    rng = np.random.default_rng(0)
    settings = {"on_update": on_update, "args": (*ENGINE["args"], "--block-size", str(block))}
    async with engine_on(config(**settings), model.snapshot(0)) as engine:
        prompt = PROMPT
        length = num_hit = num_asked = 0
        for turn in range(16):
            version = turn * 3 // 16
            if version != newest(engine):
                await engine.load(model.snapshot(version), slot="live")
                length = 0  # what this version has read of the conversation
            elif turn % 4 == 3:
                await engine.pause()  # loses nothing
                await engine.resume()
            asked, hit = await prefix_cache(engine)
            generation = await engine.generate(ask(prompt, max_tokens=50, seed=turn))
            assert set(generation.versions) == {version}
            assert model.errors(generation, prompt).max() < 1e-3
            assert all(stream.data == bytes(50) for stream in generation.streams)
            now_asked, now_hit = await prefix_cache(engine)
            assert (now_asked - asked, now_hit - hit) == (len(prompt), length // block * block)
            num_asked, num_hit = num_asked + now_asked - asked, num_hit + now_hit - hit
            length = len(prompt) + len(generation.token_ids) - 1  # the last token was sampled, but not read
            more = rng.integers(2, 30, 60).tolist()
            prompt = (*prompt, *generation.token_ids, *more)
        log.info("%s: %d of %d prompt tokens were in the cache", on_update, num_hit, num_asked)
        assert num_hit > num_asked / 2


async def prefix_cache(engine: ServerEngine) -> tuple[float, float]:
    """Prompt tokens so far, and how many of them the server found in its cache."""
    page = await engine.slots["live"]._life.http.get("/metrics")  # pyright: ignore[reportPrivateUsage]
    queries, hits = (
        float(re.findall(rf"^vllm:prefix_cache_{name}_total\{{.*}} (\S+)$", page, re.M)[0])
        for name in ("queries", "hits")
    )
    return queries, hits


async def test_a_killed_server_is_named_with_its_last_lines_and_started_again(model: TinyModel) -> None:
    async with engine_on(config(), model.snapshot(0)) as engine:
        await engine.load(model.snapshot(1), slot="live")
        server = engine.slots["live"]._life._process  # pyright: ignore[reportPrivateUsage]
        assert server is not None
        running = asyncio.create_task(engine.generate(ask(max_tokens=2000)))
        await all_running(engine, 1)
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises(RolloutError, match=r"'actor' was killed by signal 9.*its last lines"):
            await running
        again = await engine.generate(ask(max_tokens=30))
        assert set(again.versions) == {1}
        assert model.errors(again).max() < 1e-3


async def test_tied_embeddings_are_refused_on_a_cpu_before_they_go_wrong(tmp_path: Path) -> None:
    tied = TinyModel(tmp_path / "tied", is_tied=True)
    async with engine_on(config(), tied.snapshot(0)) as engine:
        with pytest.raises(ConfigError, match="keeps the old output head"):
            await engine.load(tied.snapshot(1), slot="live")
        generation = await engine.generate(ask(max_tokens=20))
        assert set(generation.versions) == {0}
        assert tied.errors(generation).max() < 1e-3


async def test_a_server_that_runs_already_is_given_the_weights(model: TinyModel) -> None:
    async with engine_on(config(), model.snapshot(5)) as owner:
        socket = owner.slots["live"]._life.http._socket  # pyright: ignore[reportPrivateUsage]
        relay = await asyncio.start_server(lambda r, w: forward(r, w, socket), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{relay.sockets[0].getsockname()[1]}"
        async with engine_on(config(attach=AttachConfig(url=url)), model.snapshot(0)) as engine:
            assert model.errors(await engine.generate(ask(max_tokens=20))).max() < 1e-3
            await engine.load(model.snapshot(1), slot="live")
            assert model.errors(await engine.generate(ask(max_tokens=20))).max() < 1e-3
        with pytest.raises(RolloutError, match="which this engine did not load"):
            await owner.generate(ask(max_tokens=5))
        relay.close()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, socket: str) -> None:
    """One connection to a server's socket, by a port."""

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
        target.close()

    source, target = await asyncio.open_unix_connection(socket)
    await asyncio.gather(pump(reader, target), pump(source, writer), return_exceptions=True)

"""Deltas over real sockets: cut connections, killed publishers, chains."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astraflow.errors import UnavailableError
from astraflow.service.client import ServiceClient
from astraflow.service.server import HttpServer
from astraflow.types import Manifest
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.config import WeightsConfig
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver

PROCESS = """
import sys
from pathlib import Path
from astraflow.service.process import run_service
from astraflow.weights.config import WeightsConfig
from astraflow.weights.publisher import run_publisher

config = WeightsConfig(chunk_bytes=65536, delta=True, full_every=5, port=int(sys.argv[2]))

async def main(stop):
    await run_publisher(Path(sys.argv[1]), config, stop, on_ready=lambda url: print(url, flush=True))

sys.exit(run_service(main, name="publisher"))
"""


def make_version(words: np.ndarray) -> list[HostTensor]:
    half = words.size // 2 // 32 * 32
    return [
        HostTensor("a", (half,), "bfloat16", words[:half].view(np.uint8)),
        HostTensor("b", (words.size - half,), "float16", words[half:].view(np.uint8)),
    ]


def stepped(words: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return words + (rng.random(words.size) < 0.01).astype(np.uint16)


def content(snapshot: WeightSnapshot) -> bytes:
    return b"".join(t.data.tobytes() for t in snapshot.tensors)


class Cuts:
    """Breaks off a chunk's answer in the middle, at random."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.random = random.Random(0)
        self.num_cuts = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/v1/chunks/") or self.random.random() < 0.6:
            await self.app(scope, receive, send)
            return
        self.num_cuts += 1

        async def send_half(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({**message, "body": message["body"][: len(message["body"]) // 2], "more_body": True})
            raise ConnectionResetError("cut on purpose")

        await self.app(scope, receive, send_half)


async def test_deltas_arrive_over_connections_that_are_cut(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 16, 300_000, dtype=np.uint16)
    config = WeightsConfig(chunk_bytes=65536, delta=True, full_every=4)
    publisher = Publisher(tmp_path / "weights", config)
    cuts = Cuts(publisher)
    server = HttpServer(cuts, host="127.0.0.1", port=0, name="publisher")
    publisher.public_url = await server.start()
    service = ServiceClient(publisher.public_url)
    client = PublisherClient(service, publisher.store.incoming, delta=True)
    follower, late = Receiver(tmp_path / "a"), Receiver(tmp_path / "b")
    for version in range(8):
        manifest = await client.publish("actor", version, make_version(words), {})
        assert content(await follower.fetch(manifest)) == words.tobytes()
        if version in {2, 7}:
            assert content(await late.fetch(manifest)) == words.tobytes()
        words = stepped(words, rng)
    assert cuts.num_cuts > 5
    assert (follower.num_fallbacks, late.num_fallbacks) == (0, 0)
    full_bytes = words.nbytes
    assert follower.fetched_bytes < 1.3 * full_bytes
    assert late.fetched_bytes < 1.3 * full_bytes
    await follower.close()
    await late.close()
    await service.close()
    await server.stop()
    publisher.store.close()


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[str]"]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=10)


@pytest.mark.timeout(60)
async def test_a_publisher_that_is_killed_again_and_again_serves_no_wrong_version(
    tmp_path: Path, processes: list["subprocess.Popen[str]"]
) -> None:
    """Each version is published and fetched while the publisher is killed at a random point and restarted."""
    rng, chance = np.random.default_rng(0), random.Random(0)
    words = rng.integers(0, 1 << 16, 150_000, dtype=np.uint16)

    def start(port: int) -> str:
        argv = [sys.executable, "-c", PROCESS, str(tmp_path / "weights"), str(port)]
        processes.append(subprocess.Popen(argv, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        return processes[-1].stdout.readline().strip()

    def restart() -> None:
        processes[-1].send_signal(signal.SIGKILL)
        processes[-1].wait()
        assert start(port) == url

    url = await asyncio.to_thread(start, 0)
    port = int(url.rpartition(":")[2])
    service = ServiceClient(url, patience_s=30)
    client = PublisherClient(service, tmp_path / "weights" / "incoming", delta=True)
    receiver = Receiver(tmp_path / "cache")
    kinds: set[str] = set()

    async def transfer(version: int) -> Manifest:
        manifest = await client.publish("actor", version, make_version(words), {})
        assert content(await receiver.fetch(manifest)) == words.tobytes()
        return manifest

    for version in range(8):
        work = asyncio.create_task(transfer(version))
        if version % 2:
            await asyncio.wait({work}, timeout=chance.uniform(0, 0.03))
            await asyncio.to_thread(restart)
        try:
            kinds.add((await work).kind)
        except UnavailableError:
            kinds.add((await transfer(version)).kind)
        words = stepped(words, rng)
    assert kinds == {"full", "delta"}
    await receiver.close()
    await service.close()

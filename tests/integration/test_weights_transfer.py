"""Weight transfer over real sockets, with a publisher that is a process and is killed."""

import asyncio
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
from astraflow.types import Manifest, PublisherHealth
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.config import WeightsConfig
from astraflow.weights.publisher import Publisher, run_publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.readers import HttpReader
from astraflow.weights.receiver import Receiver

CONFIG = WeightsConfig(chunk_bytes=1024 * 1024)

PROCESS = """
import asyncio, sys
from pathlib import Path
from astraflow.service.process import run_service
from astraflow.weights.config import WeightsConfig
from astraflow.weights.publisher import run_publisher

config = WeightsConfig(chunk_bytes=1024 * 1024)

async def main(stop):
    await run_publisher(Path(sys.argv[1]), config, stop, on_ready=lambda url: print(url, flush=True))

sys.exit(run_service(main, name="publisher"))
"""


class PublisherProcess:
    """A publisher that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> str:
        argv = [sys.executable, "-c", PROCESS, str(self._folder)]
        self._process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        process.send_signal(number)
        process.communicate(timeout=10)
        return process.returncode


@pytest.fixture
def process(tmp_path: Path) -> Iterator[PublisherProcess]:
    publisher = PublisherProcess(tmp_path / "weights")
    yield publisher
    publisher.end()


def make_version(seed: int, num_bytes: int = 6_000_000) -> list[HostTensor]:
    random = np.random.default_rng(seed)
    size = num_bytes // 4
    return [
        HostTensor(f"t{i}", (size // 2,), "bfloat16", np.frombuffer(random.bytes(size), np.uint8))
        for i in range(4)
    ]


def is_equal(snapshot: WeightSnapshot, tensors: list[HostTensor]) -> bool:
    pairs = zip(snapshot.tensors, tensors, strict=True)
    return all(np.array_equal(a.data, b.data) and a.shape == b.shape for a, b in pairs)


async def test_a_killed_publisher_comes_back_where_it_was(process: PublisherProcess, tmp_path: Path) -> None:
    url = process.start()
    service = ServiceClient(url, patience_s=10)
    client = PublisherClient(service, tmp_path / "weights" / "incoming")
    receiver = Receiver(tmp_path / "cache")
    first = await client.publish("actor", 0, make_version(0), {})
    process.end()
    fetching = asyncio.create_task(receiver.fetch(first))
    assert await asyncio.to_thread(process.start) == url
    assert is_equal(await fetching, make_version(0))
    second = await client.publish("actor", 1, make_version(1), {})
    assert is_equal(await receiver.fetch(second), make_version(1))
    assert process.end(signal.SIGTERM) == 0
    await service.close()
    await receiver.close()


async def test_a_publish_survives_the_publishers_restart(process: PublisherProcess, tmp_path: Path) -> None:
    url = process.start()
    service = ServiceClient(url, patience_s=10)
    client = PublisherClient(service, tmp_path / "weights" / "incoming")
    process.end()
    publishing = asyncio.create_task(client.publish("actor", 0, make_version(0), {}))
    await asyncio.to_thread(process.start)
    manifest = await publishing
    health = await service.call("GET", "/v1/health", PublisherHealth)
    assert health.num_bytes == manifest.num_bytes
    await service.close()


class CutsConnections:
    """An app in front of another that breaks off the first `num_cuts` chunk answers in the middle."""

    def __init__(self, app: ASGIApp, num_cuts: int) -> None:
        self.app = app
        self.num_cuts = num_cuts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.num_cuts == 0 or not scope["path"].startswith("/v1/chunks/"):
            await self.app(scope, receive, send)
            return
        self.num_cuts -= 1

        async def send_half(message: Message) -> None:
            if message["type"] != "http.response.body":
                await send(message)
                return
            await send({**message, "body": message["body"][: len(message["body"]) // 2], "more_body": True})
            raise ConnectionResetError("cut on purpose")

        await self.app(scope, receive, send_half)


def impatient_receiver(folder: Path, patience_s: float) -> tuple[Receiver, HttpReader]:
    http = HttpReader(lambda url: ServiceClient(url, patience_s=patience_s))
    return Receiver(folder, readers={"http": http}, range_bytes=256 * 1024), http


async def published(folder: Path, num_cuts: int) -> tuple[HttpServer, CutsConnections, Publisher, Manifest]:
    publisher = Publisher(folder / "weights", CONFIG)
    app = CutsConnections(publisher, num_cuts)
    server = HttpServer(app, host="127.0.0.1", port=0, name="publisher")
    publisher.public_url = await server.start()
    service = ServiceClient(publisher.public_url)
    manifest = await PublisherClient(service, publisher.store.incoming).publish(
        "actor", 0, make_version(0), {}
    )
    await service.close()
    return server, app, publisher, manifest


async def test_connections_that_are_cut_in_the_middle_are_taken_up_again(tmp_path: Path) -> None:
    server, app, publisher, manifest = await published(tmp_path, num_cuts=5)
    receiver, http = impatient_receiver(tmp_path / "cache", patience_s=10)
    assert is_equal(await receiver.fetch(manifest), make_version(0))
    assert app.num_cuts == 0
    await http.close()
    await server.stop()
    publisher.store.close()


async def test_a_publisher_that_goes_in_mid_transfer_is_an_error_and_then_a_resume(tmp_path: Path) -> None:
    server, app, publisher, manifest = await published(tmp_path, num_cuts=0)
    receiver, http = impatient_receiver(tmp_path / "cache", patience_s=0.1)
    assert is_equal(await receiver.fetch(manifest), make_version(0))
    app.num_cuts = 1_000_000
    with pytest.raises(UnavailableError, match=f"chunk .*{publisher.public_url}"):
        await receiver.fetch(manifest)
    app.num_cuts = 0
    assert is_equal(await receiver.fetch(manifest), make_version(0))
    await http.close()
    await server.stop()
    publisher.store.close()


async def test_many_receivers_fetch_while_the_next_version_is_published(tmp_path: Path) -> None:
    server, _, publisher, manifest = await published(tmp_path, num_cuts=0)
    service = ServiceClient(publisher.public_url)
    receivers = [Receiver(tmp_path / f"cache{i % 3}") for i in range(12)]
    publishing = PublisherClient(service, publisher.store.incoming).publish("actor", 1, make_version(1), {})
    *snapshots, newest = await asyncio.gather(*(r.fetch(manifest) for r in receivers), publishing)
    assert all(isinstance(s, WeightSnapshot) and is_equal(s, make_version(0)) for s in snapshots)
    assert isinstance(newest, Manifest)
    assert is_equal(await receivers[0].fetch(newest), make_version(1))
    for receiver in receivers:
        await receiver.close()
    await service.close()
    await server.stop()
    publisher.store.close()


async def test_the_port_is_kept_over_a_restart_if_it_is_free(tmp_path: Path) -> None:
    urls: list[str] = []
    for _ in range(2):
        stop = asyncio.Event()

        def ready(url: str, stop: asyncio.Event = stop) -> None:
            urls.append(url)
            stop.set()

        await run_publisher(tmp_path / "weights", CONFIG, stop, on_ready=ready)
    assert urls[0] == urls[1]
    squatter = HttpServer(
        Publisher(tmp_path / "other", CONFIG),
        host="127.0.0.1",
        port=int(urls[0].rpartition(":")[2]),
        name="squatter",
    )
    await squatter.start()
    stop = asyncio.Event()

    def ready_elsewhere(url: str) -> None:
        urls.append(url)
        stop.set()

    await run_publisher(tmp_path / "weights", CONFIG, stop, on_ready=ready_elsewhere)
    assert urls[2] != urls[0]
    await squatter.stop()


def test_importing_weights_loads_no_torch() -> None:
    code = (
        "import sys, astraflow.weights.publisher, astraflow.weights.receiver, astraflow.weights.snapshot, "
        "astraflow.weights.publisher_client, astraflow.metrics; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

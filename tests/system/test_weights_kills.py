"""A few transfers of the long chaos test, and a stream over a link that is slow and breaks."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pytest

from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.service.server import HttpServer
from astraflow.types import SourceLink
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import SEGMENT_BYTES
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from drivers.transfer_driver import CHUNK_BYTES, BadLink, Chaos, digest_of, first_weights, stepped

pytestmark = [pytest.mark.system, pytest.mark.xdist_group("timed"), pytest.mark.timeout(600)]


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES, SEGMENT_BYTES])
async def test_transfers_under_kill_9_install_what_was_published(tmp_path: Path, chunk_bytes: int) -> None:
    chaos = Chaos(tmp_path, seed=7, num_transfers=8, chunk_bytes=chunk_bytes)
    await chaos.run()
    assert chaos.problems == []
    assert chaos.installed == 16
    assert chaos.killed >= 4


async def test_deltas_keep_up_over_20_mbit_with_200_ms_and_cuts(tmp_path: Path) -> None:
    """8 MB a version at 2.5 MB/s would take 3.2 s in full; deltas of 1 % keep to a version a second."""
    config = WeightsConfig(chunk_bytes=1_000_000, delta=True, full_every=100)
    publisher = Publisher(tmp_path / "weights", config)
    server = HttpServer(publisher, host="127.0.0.1", port=0, name="publisher")
    publisher.public_url = await server.start()
    service = ServiceClient("http://publisher", transport=MemoryTransport(publisher))
    client = PublisherClient(service, publisher.store.incoming, delta=True)
    host, port = urlsplit(publisher.public_url).hostname or "", urlsplit(publisher.public_url).port or 0
    link = BadLink(host, port, bytes_per_s=2.5e6, one_way_s=0.1, cut_every_s=5.0)
    receiver = Receiver(tmp_path / "cache", range_bytes=250_000)
    lags: list[float] = []
    weights = first_weights(0, 8_000_000)
    loop = asyncio.get_running_loop()
    async with link.opened() as url:
        for version in range(12):
            manifest = await client.publish("actor", version, weights, {})
            published_s = loop.time()
            far = msgspec.structs.replace(manifest, sources=(SourceLink(kind="http", url=url),))
            snapshot = await receiver.fetch(far)
            assert digest_of(list(snapshot.tensors)) == manifest.digest == digest_of(weights)
            lags.append(loop.time() - published_s)
            del snapshot
            weights = stepped(weights, version)
            await asyncio.sleep(max(0.0, 1.0 - lags[-1]))
        assert link.num_cuts >= 2
    assert sorted(lags[1:])[len(lags) // 2] < 1.5
    assert receiver.num_fallbacks == 0
    await receiver.close()
    await service.close()
    await server.stop(grace_s=0.05)
    publisher.store.close()

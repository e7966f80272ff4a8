"""A publisher and receivers of which some serve each other, over real sockets."""

import contextlib
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from astraflow.service.client import ServiceClient
from astraflow.service.server import HttpServer
from astraflow.types import Manifest, PublisherHealth, SourceLink
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.weights.config import WeightsConfig
from astraflow.weights.peers.peer import Spool, serve_spool
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver

CHUNK = 64 * 1024
PATIENCE_S = 60.0
"""Longer than any machine is busy with something else."""


def weights(num_chunks: int = 16, seed: int = 0) -> list[HostTensor]:
    data = np.random.default_rng(seed).integers(0, 256, num_chunks * CHUNK, np.uint8)
    return [HostTensor("w", (data.size // 2,), "bfloat16", data)]


def assert_equal(snapshot: WeightSnapshot, tensors: list[HostTensor]) -> None:
    assert [t.data.tobytes() for t in snapshot.tensors] == [t.data.tobytes() for t in tensors]


@dataclass
class Swarmed:
    """A publisher and receivers of which some serve."""

    client: PublisherClient
    service: ServiceClient
    receivers: list[Receiver]
    links: list[SourceLink]

    def known(self, manifest: Manifest, *more: SourceLink) -> Manifest:
        return msgspec.structs.replace(manifest, sources=(*manifest.sources, *self.links, *more))

    async def sent_bytes(self) -> int:
        return (await self.service.call("GET", "/v1/health", PublisherHealth)).sent_bytes


@contextlib.asynccontextmanager
async def swarm(
    folder: Path, *, num_peers: int, num_others: int = 0, delta: bool = False, patience_s: float = PATIENCE_S
) -> AsyncGenerator[Swarmed]:
    """Nobody is passed over as slow within `patience_s`, so that ranks alone settle who sends what."""
    config = WeightsConfig(chunk_bytes=CHUNK, delta=delta, max_upload_mb_s=8.0)
    publisher = Publisher(folder / "weights", config)
    server = HttpServer(publisher, host="127.0.0.1", port=0, name="publisher")
    async with AsyncExitStack() as stack:
        stack.callback(publisher.store.close)
        publisher.public_url = await server.start()
        stack.push_async_callback(server.stop, grace_s=0.05)
        service = ServiceClient(publisher.public_url)
        stack.push_async_callback(service.close)
        rig = Swarmed(PublisherClient(service, publisher.store.incoming, delta=True), service, [], [])
        for idx in range(num_peers + num_others):
            spool = Spool(folder / f"cache-{idx}" / "chunks") if idx < num_peers else None
            if spool is not None:
                await stack.enter_async_context(serve_spool(spool, "127.0.0.1"))
                rig.links.append(SourceLink(kind="http", url=spool.url, labels={"peer": f"p{idx}"}))
            receiver = Receiver(
                folder / f"cache-{idx}", spool=spool, deadline_s=100, peer_patience_s=patience_s
            )
            stack.push_async_callback(receiver.close)
            rig.receivers.append(receiver)
        yield rig

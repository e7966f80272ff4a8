"""How long a version takes to reach many receivers, in virtual time: exact, whatever the machine does."""

import asyncio
import heapq
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.types import ASGIApp

from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.types import Manifest, SourceLink
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.config import WeightsConfig
from astraflow.weights.peers.peer import PeerServer, Spool
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from astraflow.weights.serving import UploadLimit

T = TypeVar("T")
CHUNK = 16 * 1024
UPLOAD = 64 * 1024.0
PUBLISHER = "memory://publisher"


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock jumps to the next timer when nothing else is left to do; threads run in place."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def run_in_executor(self, executor: object, func: Callable[..., T], *args: object) -> Any:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as err:  # noqa: BLE001 - a future carries whatever the function raised
            future.set_exception(err)
        return future

    def _run_once(self) -> None:
        timers: list[Any] = self._scheduled
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        if not self._ready and timers:
            self._now_s = max(self._now_s, timers[0]._when)
        super()._run_once()


def virtually(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


async def spread(folder: Path, count: int, *, peers: bool, num_chunks: int = 64) -> tuple[float, float]:
    """Seconds until `count` receivers have a version, and how many copies the publisher sent; every upload
    is capped alike."""
    config = WeightsConfig(chunk_bytes=CHUNK, max_upload_mb_s=UPLOAD / 1e6)
    publisher = Publisher(folder / "weights", config, PUBLISHER)
    apps: dict[str, ASGIApp] = {PUBLISHER: publisher}
    service = ServiceClient(PUBLISHER, transport=MemoryTransport(publisher))
    data = np.random.default_rng(0).integers(0, 256, num_chunks * CHUNK, np.uint8)
    tensors = [HostTensor("w", (data.size // 2,), "bfloat16", data)]
    manifest = await PublisherClient(service, publisher.store.incoming).publish("actor", 0, tensors, {})
    receivers: list[Receiver] = []
    links: list[SourceLink] = []
    for idx in range(count):
        spool = Spool(folder / str(idx) / "chunks") if peers else None
        if spool is not None:
            spool.url = f"memory://peer-{idx}"
            apps[spool.url] = PeerServer(spool, limit=UploadLimit(UPLOAD))
            links.append(SourceLink(kind="http", url=spool.url, labels={"peer": str(idx)}))
        receivers.append(
            Receiver(folder / str(idx), spool=spool, transport=lambda url: MemoryTransport(apps[url]))
        )
    known: Manifest = msgspec.structs.replace(manifest, sources=(*manifest.sources, *links))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    for snapshot in await asyncio.gather(*(receiver.fetch(known) for receiver in receivers)):
        assert snapshot.tensors[0].data.tobytes() == data.tobytes()
    seconds = loop.time() - began_s
    assert sum(receiver.swarm.num_bad for receiver in receivers) == 0
    for receiver in receivers:
        await receiver.close()
    copies = publisher.limit.sent_bytes / data.nbytes
    await service.close()
    publisher.store.close()
    return seconds, copies


def test_eight_receivers_take_less_than_twice_as_long_as_one(tmp_path: Path) -> None:
    one, _ = virtually(spread(tmp_path / "one", 1, peers=True))
    eight, copies = virtually(spread(tmp_path / "eight", 8, peers=True))
    alone, alone_copies = virtually(spread(tmp_path / "alone", 8, peers=False))
    assert eight < 2 * one
    assert copies < 1.1
    assert alone > 7.5 * one
    assert alone_copies == 8

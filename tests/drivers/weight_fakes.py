"""Fakes and builders for tests of weight transfer."""

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np

from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import ITEM_BYTES
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.readers import ChunkReader, HttpReader
from astraflow.weights.receiver import Receiver

URL = "http://publisher"


def make_host_tensor(
    name: str = "w", shape: tuple[int, ...] = (8,), dtype: str = "float32", seed: int = 0
) -> HostTensor:
    """A tensor of random bytes: any bit pattern, NaN payloads among them."""
    num_bytes = int(np.prod(shape)) * ITEM_BYTES[dtype]
    return HostTensor(name, shape, dtype, np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8))


def make_weights(num_tensors: int = 5, seed: int = 0) -> list[HostTensor]:
    """Tensors of several dtypes and odd sizes, about 3 KB each."""
    dtypes = ["bfloat16", "float32", "float16"]
    return [
        make_host_tensor(f"layer.{i}", (11, 70 + i), dtypes[i % 3], seed=100 * seed + i)
        for i in range(num_tensors)
    ]


def trained(weights: Sequence[HostTensor], seed: int, density: float = 0.01) -> list[HostTensor]:
    """The weights after a step: some elements' lowest byte is one more."""
    random = np.random.default_rng(seed)
    result: list[HostTensor] = []
    for tensor in weights:
        data = tensor.data.copy()
        data[:: ITEM_BYTES[tensor.dtype]] += random.random(data.size // ITEM_BYTES[tensor.dtype]) < density
        result.append(HostTensor(tensor.name, tensor.shape, tensor.dtype, data))
    return result


class ScriptedReader:
    """Reads through another reader; `script` sees each answer and may change it or raise."""

    def __init__(self, inner: ChunkReader) -> None:
        self.inner = inner
        self.reads: list[tuple[str, str, int, int]] = []
        self.script: Callable[[str, int, bytes], bytes] = lambda url, count, data: data

    async def read(self, url: str, chunk_hash: str, *, start: int, end: int) -> bytes:
        self.reads.append((url, chunk_hash, start, end))
        count = len(self.reads)
        return self.script(url, count, await self.inner.read(url, chunk_hash, start=start, end=end))


class WeightRig:
    """A publisher, its client and a receiver in one process; any URL leads to the publisher."""

    def __init__(
        self, folder: Path, config: WeightsConfig, *, deadline_s: float = 10.0, memory_bytes: int = 1 << 40
    ) -> None:
        self.folder = folder
        self.now_s = 0.0
        self.publisher = Publisher(folder / "weights", config, URL)
        self.service = ServiceClient(URL, transport=MemoryTransport(self.publisher), patience_s=0.2)
        self.client = PublisherClient(self.service, self.publisher.store.incoming, delta=config.delta)
        self.http = HttpReader(
            lambda url: ServiceClient(url, transport=MemoryTransport(self.publisher), patience_s=0.2)
        )
        self.reader = ScriptedReader(self.http)
        self.receiver = Receiver(
            folder / "cache",
            readers={"http": self.reader},
            finders={"http": self.http},
            num_parallel=2,
            range_bytes=1500,
            deadline_s=deadline_s,
            clock=lambda: self.now_s,
            memory_bytes=lambda: memory_bytes,
        )

    def model_files(self) -> dict[str, Path]:
        """Two small files as a model folder has them."""
        folder = self.folder / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text('{"model_type": "qwen3"}')
        (folder / "merges.txt").write_text("")
        return {path.name: path for path in folder.iterdir()}


@contextlib.asynccontextmanager
async def weight_rig(
    folder: Path,
    *,
    keep: int = 4,
    chunk_bytes: int = 4096,
    deadline_s: float = 10.0,
    delta: bool = False,
    full_every: int = 16,
    memory_bytes: int = 1 << 40,
) -> AsyncIterator[WeightRig]:
    """A rig that is closed at the end."""
    config = WeightsConfig(keep=keep, chunk_bytes=chunk_bytes, delta=delta, full_every=full_every)
    rig = WeightRig(folder, config, deadline_s=deadline_s, memory_bytes=memory_bytes)
    try:
        yield rig
    finally:
        await rig.receiver.close()
        rig.publisher.store.close()

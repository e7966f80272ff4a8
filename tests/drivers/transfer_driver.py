"""Real publishers and receivers as processes that are killed, and a link that is slow and breaks."""

import asyncio
import contextlib
import json
import random
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from astraflow import wire
from astraflow.errors import UnavailableError, WeightsError
from astraflow.service.client import ServiceClient
from astraflow.service.process import run_service
from astraflow.types import Manifest, SourceLink
from astraflow.types.host_tensors import HostTensor
from astraflow.weights import manifest
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import pack
from astraflow.weights.peers.peer import Spool, serve_spool
from astraflow.weights.publisher import run_publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver

CHUNK_BYTES = 32 * 1024


def digest_of(tensors: list[HostTensor]) -> str:
    """What a manifest says of these tensors, recomputed from their bytes."""
    return manifest.digest_of(pack(tensors))


def first_weights(seed: int, num_bytes: int = 600_000) -> list[HostTensor]:
    """bfloat16 of any bit pattern."""
    data = np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)
    half = num_bytes // 4 * 2
    return [
        HostTensor("a", (half // 2,), "bfloat16", data[:half]),
        HostTensor("b", ((num_bytes - half) // 2,), "bfloat16", data[half:]),
    ]


# --- processes ------------------------------------------------------------------------------------


@dataclass
class Child:
    """This file in another role; it prints a line when it is up, and reads what it is to do."""

    arguments: list[str]
    ready: str = ""
    process: asyncio.subprocess.Process | None = None
    num_kills: int = 0
    up: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> str:
        """Starts it and waits until it is up."""
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, __file__, *self.arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        self.ready = await self.line()
        self.up.set()
        return self.ready

    async def line(self) -> str:
        """Its next line; empty if it died."""
        if self.process is None:
            return ""
        assert self.process.stdout is not None
        return (await self.process.stdout.readline()).decode().strip()

    async def tell(self, text: str) -> None:
        """A line for it; lost if it is dead."""
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            self.process.stdin.write(text.encode() + b"\n")
            await self.process.stdin.drain()

    async def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.up.clear()
        process, self.process = self.process, None
        if process is None:
            return
        self.num_kills += 1
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        await process.wait()


@dataclass
class Chaos:
    """Transfers of one stream while processes are killed at random moments; see `run`."""

    folder: Path
    seed: int
    num_transfers: int
    num_receivers: int = 2
    chunk_bytes: int = CHUNK_BYTES
    """Chunks of whole segments are handed over as files, and all versions are then full."""
    installed: int = 0
    """Versions that a receiver reported as installed, all of them bit-equal."""
    killed: int = 0
    problems: list[str] = field(default_factory=list[str])

    async def run(self) -> None:
        """Publishes version after version; each receiver is told of each, and either process may be killed at
        a random moment of it. A killed receiver starts from nothing."""
        rng = random.Random(self.seed)
        publisher = Child(["publisher", str(self.folder / "weights"), str(self.chunk_bytes)])
        receivers = [Child(["receiver", str(self.folder / f"cache-{i}")]) for i in range(self.num_receivers)]
        children = [publisher, *receivers]
        service: ServiceClient | None = None
        try:
            await asyncio.gather(*(child.start() for child in children))
            service = ServiceClient(publisher.ready, patience_s=60.0)
            incoming = self.folder / "weights" / "incoming"
            is_small = self.chunk_bytes < manifest.SEGMENT_BYTES
            client = PublisherClient(service, incoming, delta=is_small, chunk_bytes=self.chunk_bytes)
            weights = first_weights(self.seed, 600_000 if is_small else 2_000_000)
            for version in range(self.num_transfers):
                await self._transfer(version, weights, children, (rng, client))
                weights = stepped(weights, self.seed * 100_000 + version)
        finally:
            if service is not None:
                await service.close()
            self.killed = sum(child.num_kills for child in children)
            for child in children:
                await child.kill()

    async def _transfer(
        self,
        version: int,
        weights: list[HostTensor],
        children: list[Child],
        trainer: tuple[random.Random, PublisherClient],
    ) -> None:
        _, *receivers = children
        rng, client = trainer
        victim = rng.choice([*children, None])
        moment_s = rng.uniform(0.0, 0.08)
        killing = asyncio.create_task(self._kill(victim, moment_s))
        manifest = await client.publish("actor", version, weights, {})
        await client.forget("actor", [version])
        peers = tuple(
            SourceLink(kind="http", url=child.ready, labels={"peer": child.arguments[1]})
            for child in receivers
        )
        manifest = msgspec.structs.replace(manifest, sources=(*manifest.sources, *peers))
        expected = digest_of(weights)
        if manifest.digest != expected:
            self.problems.append(f"version {version} was published as {manifest.digest}, is {expected}")
        await asyncio.gather(*(self._install(child, manifest, expected) for child in receivers))
        await killing

    async def _kill(self, victim: Child | None, moment_s: float) -> None:
        await asyncio.sleep(moment_s)
        if victim is not None:
            await victim.kill()
            ready = victim.ready
            await victim.start()
            if victim.arguments[0] == "publisher" and victim.ready != ready:
                self.problems.append(f"the publisher moved from {ready} to {victim.ready}")

    async def _install(self, child: Child, manifest: Manifest, expected: str) -> None:
        """Tells the receiver of the version until it says that it installed it."""
        while True:
            await child.up.wait()
            await child.tell(wire.encode(manifest, wire.JSON).decode())
            text = await child.line()
            if not text:
                continue
            report = json.loads(text)
            if report["version"] != manifest.version or report["digest"] != expected:
                self.problems.append(f"installed {report}, expected {manifest.version} {expected}")
            self.installed += 1
            return


def stepped(weights: list[HostTensor], seed: int, density: float = 0.01) -> list[HostTensor]:
    """The weights after a step: some elements one ulp up."""
    rng = np.random.default_rng(seed)
    result: list[HostTensor] = []
    for tensor in weights:
        words = tensor.data.view(np.uint16).copy()
        words += (rng.random(words.size) < density).astype(np.uint16)
        result.append(HostTensor(tensor.name, tensor.shape, tensor.dtype, words.view(np.uint8)))
    return result


# --- a bad link -----------------------------------------------------------------------------------


@dataclass
class BadLink:
    """A TCP proxy: a rate for what comes back, a delay each way, and every connection cut now and then."""

    host: str
    port: int
    bytes_per_s: float
    one_way_s: float
    cut_every_s: float
    num_cuts: int = 0
    _free_at_s: float = 0.0
    _writers: set[asyncio.StreamWriter] = field(default_factory=set[asyncio.StreamWriter])

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """Its URL."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 16)
        cutting = asyncio.create_task(self._cut())
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            cutting.cancel()
            server.close()
            self._abort()
            await asyncio.sleep(0.05)

    async def _cut(self) -> None:
        while True:
            await asyncio.sleep(self.cut_every_s)
            self.num_cuts += bool(self._writers)
            self._abort()

    def _abort(self) -> None:
        for writer in [*self._writers]:
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pair = {writer}
        self._writers.add(writer)
        try:
            await asyncio.sleep(self.one_way_s)
            up_reader, up_writer = await asyncio.open_connection(self.host, self.port)
            pair.add(up_writer)
            self._writers.add(up_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(reader, up_writer, is_paced=False))
                group.create_task(self._carry(up_reader, writer, is_paced=True))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            self._writers -= pair
            for end in pair:
                end.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_paced: bool
    ) -> None:
        """Bytes leave in order, each `one_way_s` after the link had room for it."""
        loop = asyncio.get_running_loop()
        while data := await reader.read(16_384):
            now_s = loop.time()
            if is_paced:
                self._free_at_s = max(self._free_at_s, now_s) + len(data) / self.bytes_per_s
                if (ahead_s := self._free_at_s - now_s) > 0.01:
                    await asyncio.sleep(ahead_s)
            loop.call_later(self.one_way_s, _write, writer, data)
        raise ConnectionResetError("the other end closed")


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)


# --- roles ----------------------------------------------------------------------------------------


def say(text: str) -> None:
    """A line for whoever started this process."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def publish(stop: asyncio.Event, folder: Path) -> None:
    """A publisher of deltas."""
    config = WeightsConfig(chunk_bytes=int(sys.argv[3]), delta=True, keep=2, full_every=6)
    await run_publisher(folder, config, stop, on_ready=say)


async def receive(stop: asyncio.Event, folder: Path) -> None:
    """A receiver that reads manifests from its input, and says what it installed."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    spool = Spool(folder / "chunks")
    async with serve_spool(spool, "127.0.0.1"):
        receiver = Receiver(folder, spool=spool, range_bytes=8192)
        say(spool.url)
        while text := await lines.readline():
            manifest = wire.decode(text, Manifest, wire.JSON)
            while True:
                try:
                    snapshot = await receiver.fetch(manifest)
                    break
                except (UnavailableError, WeightsError):
                    await asyncio.sleep(0.05)
            tensors = [HostTensor(t.name, t.shape, t.dtype, t.data.copy()) for t in snapshot.tensors]
            del snapshot
            say(json.dumps({"version": manifest.version, "digest": digest_of(tensors)}))
        await receiver.close()


if __name__ == "__main__":
    role, path = sys.argv[1], Path(sys.argv[2])
    main = publish if role == "publisher" else receive
    sys.exit(run_service(lambda stop: main(stop, path), name=role))

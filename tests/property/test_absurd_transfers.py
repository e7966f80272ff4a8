"""Absurd and nearly right values on every route of a publisher and of a peer end nothing.

As `test_absurd_values` does with the dataflow: bodies are made from the items' types, each parameter and
header takes what is absurd. Nothing answers 500 or holds up the event loop, and what is refused changes
nothing; afterwards a version is published and fetched.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from astraflow import wire
from astraflow.service.client import MemoryTransport, ServiceClient
from astraflow.types import Chunk, ErrorReply, Forget, HandOver, Item
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import digest_of, hash_bytes
from astraflow.weights.peers.peer import PeerServer, Spool
from astraflow.weights.publisher import Publisher
from astraflow.weights.publisher_client import PublisherClient
from astraflow.weights.receiver import Receiver
from astraflow.weights.serving import UploadLimit
from drivers.absurd_driver import NAMES, NUMBERS, bodies, encoded
from drivers.weight_fakes import URL, make_weights

MAX_BLOCK_S = 1.0
"""Longest block of the event loop, in CPU time, because a busy machine is not the publisher's fault."""
RANGES = (
    "", "bytes=", "bytes=-", "bytes=0-0", "bytes=5-1", "bytes=-1", "bytes=0-", "bytes=0-0,1-1", "lines=0-1",
    f"bytes={'9' * 5000}-", f"bytes=0-{'9' * 5000}", f"bytes=-{'9' * 5000}", f"bytes={2**64}-{2**64 + 1}",
    "bytes=\xb2-\xb3", "bytes=+1-+2", "bytes=1_0-2_0", "bytes= 1-2", "\x00",
)  # fmt: skip


class Served:
    """An app under fire."""

    def __init__(self, app: Publisher | PeerServer) -> None:
        self.transport = MemoryTransport(app)
        self.num_sent = self.num_accepted = 0

    async def send(self, method: str, target: str, about: str, *, body: bytes = b"", **fields: str) -> int:
        headers = {"accept": wire.JSON, **{name.replace("_", "-"): text for name, text in fields.items()}}
        started_s = time.thread_time()
        async with asyncio.timeout(30.0):
            reply = await self.transport.request(method, target, headers=headers, body=body, timeout_s=30.0)
        took_s = time.thread_time() - started_s
        where = f"{method} {target[:80]}: {about}"
        assert reply.status < 500, f"{where}: {reply.body[:300]!r}"
        assert took_s < MAX_BLOCK_S, f"{where} took {took_s:.2f} s"
        self.num_sent += 1
        self.num_accepted += reply.status < 400
        if reply.status >= 400 and reply.media_type == wire.JSON:
            error = wire.decode(reply.body, ErrorReply, wire.JSON)
            assert error.code, where
            assert 0 < len(error.message) < 10_000, where
        return reply.status


class Arena:
    """A publisher with a version, whose folder is looked at, and a peer with one of its chunks."""

    def __init__(self, folder: Path) -> None:
        self.publisher = Publisher(folder / "weights", WeightsConfig(chunk_bytes=4096, delta=True), URL)
        self.served = Served(self.publisher)
        self.service = ServiceClient(URL, transport=self.served.transport)
        self.client = PublisherClient(self.service, self.publisher.store.incoming)
        self.spool = Spool(folder / "spool")
        self.peer = Served(PeerServer(self.spool, limit=UploadLimit(0.0)))
        self.chunk = Chunk(hash="", num_bytes=0)
        self._folder = folder

    async def start(self) -> None:
        manifest = await self.client.publish("actor", 0, make_weights(), {})
        self.chunk = manifest.chunks[0]
        self.spool.expect("actor", 0, manifest.chunks)
        await self.spool.put(self.chunk, memoryview(bytes(self.chunk.num_bytes)))
        self.spool.give_up(manifest.chunks)

    def files(self) -> set[Path]:
        """Chunks and manifests, outside of which nothing is ever written."""
        return {path for path in self._folder.rglob("*") if "incoming" not in path.parts and path.is_file()}

    async def goes_on(self) -> None:
        """A version is published and fetched."""
        weights = make_weights(seed=1)
        manifest = await self.client.publish("actor", 900, weights, {})
        receiver = Receiver(self._folder / "cache", transport=lambda url: self.served.transport)
        snapshot = await receiver.fetch(manifest)
        assert [t.data.tobytes() for t in snapshot.tensors] == [t.data.tobytes() for t in weights]
        await receiver.close()


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[tuple[asyncio.Runner, Arena]]:
    """Checks at the end that the publisher goes on."""
    with asyncio.Runner() as runner:
        fight = Arena(tmp_path)
        runner.run(fight.start())
        yield runner, fight
        runner.run(fight.goes_on())
        fight.publisher.store.close()


def known_hand_over(incoming: Path) -> dict[str, Any]:
    """One tensor of 16 bytes and a file of 2, in the incoming folder as a trainer leaves them."""
    content = bytes(16)
    digest = digest_of(np.zeros(16, np.uint8))
    (incoming / "actor").mkdir(exist_ok=True)
    (incoming / "actor" / "x").write_bytes(content + b"{}")
    tensor = {"name": "w", "shape": [8], "dtype": "bfloat16", "offset": 0, "num_bytes": 16}
    return {
        "policy": "actor", "version": 5, "path": "actor/x", "delta": None, "tensors": [tensor],
        "digest": digest, "files": [{"name": "config.json", "chunk": [hash_bytes(b"{}"), 2]}],
        "is_first": True,
    }  # fmt: skip


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", [HandOver, Forget], ids=lambda kind: str(kind.__name__))
def test_no_field_of_a_body_ends_a_publisher(arena: tuple[asyncio.Runner, Arena], kind: type[Item]) -> None:
    runner, fight = arena
    incoming = fight.publisher.store.incoming
    target = "/v1/publish" if kind is HandOver else "/v1/forget"
    known = known_hand_over(incoming) if kind is HandOver else {"policy": "actor"}

    async def all_of_them() -> None:
        for about, media_type, body in bodies(kind, known):
            known_hand_over(incoming)
            before = fight.files()
            status = await fight.served.send("POST", target, about, body=body, content_type=media_type)
            if status >= 400:
                assert fight.files() == before, about

    accepted = fight.served.num_accepted
    runner.run(all_of_them())
    assert fight.served.num_accepted > accepted, "not even sound bodies are accepted"
    assert all(version >= 0 for known in fight.publisher.store.versions().values() for version in known)


def nearly_right(incoming: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Hand-overs that agree with themselves and not with what lies there."""
    whole = {**known_hand_over(incoming), "version": 77}
    only_delta = {**whole, "path": "", "is_first": False, "files": []}
    for path in ("", ".", "..", "actor", "/dev/zero", "actor/x\x00", "x" * 4000, "actor/../../lock"):
        yield f"path {path[:20]!r}", {**whole, "path": path}
        yield f"delta {path[:20]!r}", {**only_delta, "delta": {"path": path, "base": 5}}
    huge = {"name": "w", "shape": [2**41], "dtype": "bfloat16", "offset": 0, "num_bytes": 2**42}
    yield "a huge tensor", {**whole, "tensors": [huge]}
    yield "a huge file", {**whole, "files": [{"name": "config.json", "chunk": ["", 2**42]}]}
    yield "many tensors", {**whole, "tensors": whole["tensors"] * 20_000}


@pytest.mark.timeout(120)
def test_a_hand_over_that_fits_no_file_is_refused(arena: tuple[asyncio.Runner, Arena]) -> None:
    runner, fight = arena
    incoming = fight.publisher.store.incoming
    sound = next(encoded(known_hand_over(incoming)))

    async def all_of_them() -> None:
        publish = ("POST", "/v1/publish")
        assert await fight.served.send(*publish, "sound", body=sound[1], content_type=sound[0]) == 200
        for about, whole in nearly_right(incoming):
            for media_type, body in encoded(whole):
                known_hand_over(incoming)
                before = fight.files()
                status = await fight.served.send(*publish, about, body=body, content_type=media_type)
                assert status >= 400, about
                assert fight.files() == before, about

    runner.run(all_of_them())


@pytest.mark.timeout(120)
def test_no_parameter_ends_a_publisher(arena: tuple[asyncio.Runner, Arena]) -> None:
    runner, fight = arena
    before = fight.files()

    async def all_of_them() -> None:
        for name in (*NAMES, *NUMBERS):
            await fight.served.send("GET", f"/v1/manifests/actor/{name}", "version")
            await fight.served.send("GET", f"/v1/manifests/{name}/0", "policy")
            await fight.served.send("GET", f"/v1/chunks/{name}", "hash")
        for text in RANGES:
            await fight.served.send("GET", f"/v1/chunks/{fight.chunk.hash}", f"range {text[:20]}", range=text)
            await fight.served.send("GET", "/v1/health", "accept", accept=text)
        assert await fight.served.send("GET", "/v1/manifests/actor/0", "sound") == 200

    runner.run(all_of_them())
    assert fight.files() == before


@pytest.mark.timeout(120)
def test_no_parameter_ends_a_peer(arena: tuple[asyncio.Runner, Arena]) -> None:
    runner, fight = arena
    before = fight.files()

    async def all_of_them() -> None:
        for text in (*NAMES, *NUMBERS):
            await fight.peer.send("GET", f"/v1/chunks/{text}", "hash")
            sound = {"policy": "actor", "version": "0", "wait_s": "0"}
            for place in ("policy", "version", "wait_s", "unknown"):
                query = "&".join(f"{k}={quote(v)}" for k, v in {**sound, place: text}.items())
                for chunk_hash in (fight.chunk.hash, "absent"):
                    await fight.peer.send("GET", f"/v1/chunks/{chunk_hash}/state?{query}", place)
        for text in RANGES:
            await fight.peer.send("GET", f"/v1/chunks/{fight.chunk.hash}", f"range {text[:20]}", range=text)

    runner.run(all_of_them())
    assert fight.files() == before


@pytest.mark.timeout(30)
@pytest.mark.parametrize("wait_s", ["nan", "inf", "-inf", "1e400", "-1"])
def test_a_peer_never_holds_an_answer_for_ever(arena: tuple[asyncio.Runner, Arena], wait_s: str) -> None:
    runner, fight = arena
    fight.spool.expect("actor", 1, [Chunk(hash="coming", num_bytes=1)])

    async def asked() -> int:
        query = f"policy=actor&version=1&wait_s={wait_s}"
        return await fight.peer.send("GET", f"/v1/chunks/coming/state?{query}", wait_s)

    assert runner.run(asked()) in {200, 400}


async def test_a_version_of_5000_digits_is_not_found(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        fight = Arena(tmp_path)
        stack.callback(fight.publisher.store.close)
        for digits in ("9" * 5000, "9" * 16, "\u0663", "-1", "1.0"):
            assert await fight.served.send("GET", f"/v1/manifests/actor/{digits}", digits[:20]) == 404

"""Receivers that serve each other, over real sockets, from a publisher that counts what it sends."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from astraflow.errors import RefusedError, UnavailableError
from astraflow.service.client import ServiceClient
from astraflow.service.server import HttpServer
from astraflow.types import ChunkState, SourceLink
from astraflow.weights.config import WeightsConfig
from astraflow.weights.manifest import build_manifest
from astraflow.weights.peers.peer import Spool, peer_ticket, serve_spool
from astraflow.weights.publisher import Publisher
from astraflow.weights.receiver import Receiver
from drivers.swarm_driver import CHUNK, assert_equal, swarm, weights
from drivers.weight_fakes import trained

pytestmark = pytest.mark.timeout(120)


@contextlib.asynccontextmanager
async def liar(*, is_silent: bool = False) -> AsyncIterator[SourceLink]:
    """A peer that has every chunk, and gives zeros for it, or that never answers."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if is_silent:
            await asyncio.Event().wait()
        body = msgspec.msgpack.encode(ChunkState(state="here"))
        media, status = b"application/msgpack", 200
        headers = dict(scope["headers"])
        if b"range" in headers:
            first, last = headers[b"range"].removeprefix(b"bytes=").split(b"-")
            body, status = bytes(int(last) - int(first) + 1), 206
            media = b"application/octet-stream"
        fields = [(b"content-type", media), (b"content-length", str(len(body)).encode())]
        if status == 206:
            fields.append((b"content-range", b"bytes " + headers[b"range"][6:] + b"/999999"))
        await send({"type": "http.response.start", "status": status, "headers": fields})
        await send({"type": "http.response.body", "body": body})

    server = HttpServer(app, host="127.0.0.1", port=0, name="liar")
    try:
        yield SourceLink(kind="http", url=await server.start(), labels={"peer": "liar"})
    finally:
        await server.stop(grace_s=0.05)


async def test_the_publisher_sends_about_one_copy_to_many_peers(tmp_path: Path) -> None:
    async with swarm(tmp_path, num_peers=5, num_others=1) as rig:
        tensors = weights()
        manifest = rig.known(await rig.client.publish("actor", 0, tensors, {}))
        for snapshot in await asyncio.gather(*(r.fetch(manifest) for r in rig.receivers)):
            assert_equal(snapshot, tensors)
        assert await rig.sent_bytes() < 1.1 * tensors[0].data.nbytes  # without peers it is 6
        assert sum(r.downloads.peer_bytes for r in rig.receivers) > 4.9 * tensors[0].data.nbytes
        assert [r.swarm.num_bad for r in rig.receivers] == [0] * 6


async def test_a_delta_spreads_over_peers_too_and_a_late_one_gets_all(tmp_path: Path) -> None:
    async with swarm(tmp_path, num_peers=4, delta=True) as rig:
        first, second = weights(), trained(weights(), 1)
        early = rig.receivers[:3]
        base = rig.known(await rig.client.publish("actor", 0, first, {}))
        await asyncio.gather(*(r.fetch(base) for r in early))
        before = await rig.sent_bytes()
        manifest = rig.known(await rig.client.publish("actor", 1, second, {}))
        assert manifest.kind == "delta"
        from_peers = sum(r.downloads.peer_bytes for r in rig.receivers)
        for receiver in rig.receivers:
            assert_equal(await receiver.fetch(manifest), second)
        # Who comes before the last ones may have to fetch from the publisher; the late one never.
        assert sum(r.downloads.peer_bytes for r in rig.receivers) > from_peers
        assert await rig.sent_bytes() - before < len(rig.receivers) * manifest.num_bytes


async def test_a_peer_with_wrong_bytes_is_passed_over(tmp_path: Path) -> None:
    async with swarm(tmp_path, num_peers=2) as rig, liar() as link:
        for version in range(2):
            tensors = weights(num_chunks=64, seed=version)  # of so many, one is first asked of the liar
            manifest = rig.known(await rig.client.publish("actor", version, tensors, {}), link)
            for snapshot in await asyncio.gather(*(r.fetch(manifest) for r in rig.receivers)):
                assert_equal(snapshot, tensors)
            bad = [r.swarm.num_bad for r in rig.receivers]
            # By one receiver at least, who ranks below one of its chunks, and not again for the next version.
            assert sum(bad) >= 1 >= max(bad)


async def test_peers_that_are_gone_or_absent_cost_a_moment(tmp_path: Path) -> None:
    gone = SourceLink(kind="http", url="http://127.0.0.1:9", labels={"peer": "gone"})
    async with swarm(tmp_path, num_peers=2, patience_s=0.2) as rig:
        tensors = weights(num_chunks=64)  # of so many, one is first asked of the peer that is gone
        manifest = rig.known(await rig.client.publish("actor", 0, tensors, {}), gone)
        assert_equal(await rig.receivers[0].fetch(manifest), tensors)
        assert rig.receivers[0].swarm.num_bad >= 1


async def test_peers_stand_in_for_a_publisher_that_is_gone(tmp_path: Path) -> None:
    async with swarm(tmp_path, num_peers=2) as rig:
        tensors = weights()
        manifest = rig.known(await rig.client.publish("actor", 0, tensors, {}))
        await rig.receivers[0].fetch(manifest)
        lost = msgspec.structs.replace(manifest, sources=tuple(rig.links))
        assert_equal(await rig.receivers[1].fetch(lost), tensors)


async def test_a_receiver_that_serves_nothing_uses_peers(tmp_path: Path) -> None:
    async with swarm(tmp_path, num_peers=1, num_others=1) as rig:
        tensors = weights()
        manifest = rig.known(await rig.client.publish("actor", 0, tensors, {}))
        await rig.receivers[0].fetch(manifest)
        before = await rig.sent_bytes()
        assert_equal(await rig.receivers[1].fetch(manifest), tensors)
        assert await rig.sent_bytes() == before


async def test_a_silent_peer_is_given_up(tmp_path: Path) -> None:
    async with swarm(tmp_path, num_peers=1, patience_s=0.2) as rig, liar(is_silent=True) as link:
        tensors = weights(num_chunks=4)
        manifest = rig.known(await rig.client.publish("actor", 0, tensors, {}), link)
        assert_equal(await rig.receivers[0].fetch(manifest), tensors)


async def test_a_peer_is_shown_a_ticket_and_never_the_token(tmp_path: Path) -> None:
    """The ticket opens chunks of peers, and neither the publisher nor the dataflow."""
    seen: list[str] = []

    async def spy(request: Request) -> Response:
        seen.append(request.headers.get("authorization", ""))
        return Response(status_code=404)

    server = HttpServer(Starlette(routes=[Route("/{path:path}", spy)]), host="127.0.0.1", port=0, name="spy")
    publisher = Publisher(tmp_path / "weights", WeightsConfig(), tokens={"secret": "worker"})
    publishing = HttpServer(publisher, host="127.0.0.1", port=0, name="publisher")
    spool = Spool(tmp_path / "spool")
    async with AsyncExitStack() as stack:
        stack.callback(publisher.store.close)
        stack.push_async_callback(publishing.stop, grace_s=0.05)
        stack.push_async_callback(server.stop, grace_s=0.05)
        url, spied = await publishing.start(), await server.start()
        await stack.enter_async_context(serve_spool(spool, "127.0.0.1", token="secret"))
        receiver = Receiver(tmp_path / "cache", token="secret", peer_patience_s=0.1)
        stack.push_async_callback(receiver.close)
        manifest = msgspec.structs.replace(
            build_manifest("actor", 0, weights(1), chunk_bytes=CHUNK),
            sources=(SourceLink(kind="http", url=spied, labels={"peer": "spy"}),),
        )
        with pytest.raises(UnavailableError):
            await receiver.fetch(manifest)
        ticket = peer_ticket("secret")
        assert set(seen) == {f"Bearer {ticket}"}
        for where, token, status in (
            (spool.url, ticket, 404),
            (spool.url, "secret", 401),
            (url, ticket, 401),
        ):
            client = ServiceClient(where, token=token)
            stack.push_async_callback(client.close)
            with pytest.raises(RefusedError) as refused:
                await client.fetch(f"/v1/chunks/{'0' * 32}", start=0, end=1)
            assert refused.value.status == status

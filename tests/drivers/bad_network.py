"""An HTTP proxy in front of a dataflow and a publisher, with weather: slow, cut, or down for seconds.

Rollout services that join through it fetch their weights through it too: the addresses in the manifests that
pass are replaced by its own. It keeps what the dataflow acknowledged, whether or not the answer got through.
"""

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import web

from astraflow import wire
from astraflow.types import EpisodeResults, Receipts, VersionsReply

__all__ = ["BadNetwork"]

_WEATHER = ("clear", "clear", "slow", "flaky", "down")
"""Drawn anew every few seconds."""
_LOSS = 0.3
"""Share of the requests in flaky weather that are cut: half of them on the way back."""
_HEADERS = ("Authorization", "Accept", "Content-Type", "Range")
_UPSTREAM_S = 200.0


@dataclass
class BadNetwork:
    """Use: `async with BadNetwork(url, seed=1).opened() as joined_url: ...`."""

    url: str
    """URL of the dataflow."""
    seed: int
    weather: str = "clear"
    num_requests: int = 0
    num_cuts: int = 0
    num_slowed: int = 0
    accepted: dict[tuple[str, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    """(group, episode) -> leases whose result the dataflow acknowledged as accepted."""
    workers: set[str] = field(default_factory=set[str])
    """Names of the services whose results were acknowledged."""
    _ports: dict[str, str] = field(default_factory=dict[str, str])
    """Address of a publisher -> the proxy's for it."""
    _open: dict[int, web.BaseRequest] = field(default_factory=dict[int, web.BaseRequest])

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[str]:
        """Its URL, which stands for the dataflow's."""
        self._rng = random.Random(self.seed)
        async with contextlib.AsyncExitStack() as stack:
            self._stack = stack
            self._session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
            own = await self._listen(self.url)
            changing = asyncio.create_task(self._change(), name="weather")
            try:
                yield own
            finally:
                changing.cancel()
                self._abort_all()

    async def _listen(self, target: str) -> str:
        async def handler(request: web.BaseRequest) -> web.StreamResponse:
            return await self._pass_on(request, target)

        runner = web.ServerRunner(web.Server(handler, handler_cancellation=True), shutdown_timeout=1.0)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _change(self) -> None:
        while True:
            self.weather = self._rng.choice(_WEATHER)
            if self.weather == "down":
                self._abort_all()
            await asyncio.sleep(self._rng.uniform(2.0, 6.0))

    def _abort_all(self) -> None:
        for request in [*self._open.values()]:
            self._cut(request)

    def _cut(self, request: web.BaseRequest) -> web.StreamResponse:
        self.num_cuts += 1
        if request.transport is not None:
            request.transport.abort()
        return web.Response()

    async def _pass_on(self, request: web.BaseRequest, target: str) -> web.StreamResponse:
        self.num_requests += 1
        self._open[id(request)] = request
        try:
            body = await request.read()
            fate = self._rng.random() if self.weather == "flaky" else 1.0
            if self.weather == "down" or fate < _LOSS / 2:
                return self._cut(request)
            if self.weather == "slow":
                self.num_slowed += 1
                await asyncio.sleep(self._rng.uniform(0.05, 0.5) + len(body) / 500_000)
            status, media_type, answer = await self._call(request, target, body)
            if self.weather == "down" or fate < _LOSS:
                return self._cut(request)
            if self.weather == "slow":
                await asyncio.sleep(len(answer) / 500_000)
            return web.Response(status=status, body=answer, headers={"Content-Type": media_type})
        except (aiohttp.ClientError, TimeoutError):  # the other side died
            return self._cut(request)
        finally:
            del self._open[id(request)]

    async def _call(self, request: web.BaseRequest, target: str, body: bytes) -> tuple[int, str, bytes]:
        headers = {name: request.headers[name] for name in _HEADERS if name in request.headers}
        timeout = aiohttp.ClientTimeout(total=_UPSTREAM_S)
        async with self._session.request(
            request.method, target + request.path_qs, data=body or None, headers=headers, timeout=timeout
        ) as reply:
            answer, media_type = await reply.read(), reply.content_type
        if reply.status == 200 and target == self.url:
            answer = await self._noted(request.path, body, answer, media_type)
        return reply.status, media_type, answer

    async def _noted(self, path: str, body: bytes, answer: bytes, media_type: str) -> bytes:
        """What is passed on of an answer of the dataflow."""
        if path == "/v1/episodes":
            self.workers.add(wire.decode(body, EpisodeResults).worker_id.partition(".")[0])
            for receipt in wire.decode(answer, Receipts, media_type).receipts:
                if receipt.status == "accepted":
                    group, episode, _ = receipt.lease_id.split(".")
                    self.accepted[group, episode].add(receipt.lease_id)
        elif path.endswith("/versions"):
            reply = wire.decode(answer, VersionsReply, media_type)
            manifests = [
                msgspec.structs.replace(
                    manifest,
                    sources=tuple(
                        [msgspec.structs.replace(s, url=await self._own(s.url)) for s in manifest.sources]
                    ),
                )
                for manifest in reply.manifests
            ]
            return wire.encode(msgspec.structs.replace(reply, manifests=tuple(manifests)), media_type)
        return answer

    async def _own(self, url: str) -> str:
        """The proxy's address for a publisher's."""
        if url not in self._ports:
            self._ports[url] = await self._listen(url)
        return self._ports[url]

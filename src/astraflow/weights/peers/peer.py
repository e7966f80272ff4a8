"""The serving half of a peer: a rollout service serves the chunks that it has to other rollout services.

    receiver --- expect(wanted) / put(chunk) ---> Spool (files, by hash) ---> PeerServer ---> other receivers

A chunk is served once it is complete and its hash is verified, so that nothing unverified spreads. A receiver
that asks for a chunk in transfer waits at the state route. The spool keeps the most recent chunks, up to a
bound, and is emptied by a restart.
"""

import asyncio
import contextlib
import hmac
import shutil
import socket
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from astraflow.errors import ConfigError, WireError
from astraflow.service.loopback import is_loopback
from astraflow.service.messages import item_response
from astraflow.service.server import HttpServer, TokenAuth
from astraflow.service.web_guard import WebRules
from astraflow.types import Chunk, ChunkState
from astraflow.weights.addresses import listens_everywhere
from astraflow.weights.serving import (
    UploadLimit,
    chunk_response,
    parse_version,
    require_role,
    with_error_responses,
)
from astraflow.weights.stores.chunk_store import write_durably

__all__ = ["PeerServer", "Spool", "State", "parse_address", "peer_ticket", "serve_spool"]

State = Literal["here", "coming", "absent"]
"""State of a chunk at a peer."""

_MAX_WAIT_S = 10.0
"""Longest wait for a chunk at the state route, after which the receiver asks again."""
_GRACE_S = 2.0
"""How long a receiver may wait for a version that this peer has not begun to fetch. It is short, because all
services learn of a version at about the same time."""


def peer_ticket(token: str) -> str:
    """The token that rollout services of a run show each other to fetch chunks. It is derived from the
    worker's token without revealing it. Empty for a run without tokens."""
    return hmac.digest(token.encode(), b"astraflow peer 1", "sha256").hex() if token else ""


class Spool:
    """The newest chunk files of one receiver, up to twice the bytes of its largest transfer.

    One event loop owns it.

    Example: `spool.expect("actor", 3, chunks)`, then `await spool.put(chunk, view)` for each that arrived,
    and `spool.give_up(chunks)` when the transfer has ended or failed.
    """

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.url = ""
        """URL at which the spool is served; empty while it is not."""
        self._folder = folder
        self._sizes: dict[str, int] = {}
        """Bytes of the chunks that are here, by hash, in order of arrival."""
        self._expected: set[str] = set()
        """Hashes of the chunks in transfer."""
        self._begun: dict[str, int] = {}
        """Newest version that this receiver has begun to fetch, by policy."""
        self._most_bytes = 0
        self._changed = asyncio.Event()

    def path(self, chunk_hash: str) -> Path:
        """The file of a chunk. Only for hashes that `size` knows."""
        return self._folder / chunk_hash

    def size(self, chunk_hash: str) -> int | None:
        """Bytes of a chunk that is here whole; None for any other."""
        return self._sizes.get(chunk_hash)

    def expect(self, policy: str, version: int, chunks: Iterable[Chunk]) -> None:
        """Records that a transfer of these chunks begins."""
        wanted = tuple(chunks)
        self._begun[policy] = max(version, self._begun.get(policy, -1))
        self._expected.update(chunk.hash for chunk in wanted)
        self._most_bytes = max(self._most_bytes, sum(chunk.num_bytes for chunk in wanted))
        self._wake()

    async def put(self, chunk: Chunk, view: memoryview) -> None:
        """Stores a verified chunk. If that fails, other receivers only lose a source."""
        if chunk.hash not in self._sizes:
            with contextlib.suppress(OSError):
                await asyncio.to_thread(write_durably, self.path(chunk.hash), view, lambda _: None)
                self._sizes[chunk.hash] = chunk.num_bytes
        self._expected.discard(chunk.hash)
        self._evict()
        self._wake()

    def give_up(self, chunks: Iterable[Chunk]) -> None:
        """Records that the transfer has ended, so that chunks which are not here will not arrive."""
        self._expected.difference_update(chunk.hash for chunk in chunks)
        self._wake()

    async def state(self, chunk_hash: str, policy: str, version: int, wait_s: float) -> State:
        """The state of a chunk, once it is here, once it can no longer arrive, or after `wait_s`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            if chunk_hash in self._sizes:
                return "here"
            is_coming = chunk_hash in self._expected
            may_come = is_coming or self._begun.get(policy, -1) < version
            until_s = began_s + (wait_s if is_coming else min(wait_s, _GRACE_S))
            if not may_come or loop.time() >= until_s:
                return "coming" if is_coming else "absent"
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _evict(self) -> None:
        total = sum(self._sizes.values())
        for chunk_hash in [*self._sizes]:
            if total <= 2 * self._most_bytes:
                return
            total -= self._sizes.pop(chunk_hash)
            self.path(chunk_hash).unlink(missing_ok=True)


class PeerServer:
    """ASGI app that serves a spool. Callers must show the `ticket`, if there is one."""

    def __init__(self, spool: Spool, *, limit: UploadLimit, ticket: str = "") -> None:
        self.limit = limit
        self._spool = spool
        routes = [
            Route("/v1/chunks/{hash}", with_error_responses(self._chunk), methods=["GET"]),
            Route("/v1/chunks/{hash}/state", with_error_responses(self._state), methods=["GET"]),
        ]
        tokens = {ticket: "peer"} if ticket else {}
        self._app = Starlette(routes=routes, middleware=[Middleware(TokenAuth, tokens=tokens)])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        await self._app(scope, receive, send)

    async def _chunk(self, request: Request) -> Response:
        require_role(request, "peer")
        name = str(request.path_params["hash"])
        return await chunk_response(request, self._spool.path(name), self._spool.size(name), self.limit)

    async def _state(self, request: Request) -> Response:
        require_role(request, "peer")
        query = request.query_params
        policy = query.get("policy")
        version = parse_version(query.get("version", ""))
        wait_s = _parse_wait(query.get("wait_s", ""))
        if policy is None or version is None or wait_s is None:
            raise WireError(
                "the state of a chunk needs policy, version (0 or more) and wait_s (seconds, 0 or more)"
            )
        state = await self._spool.state(str(request.path_params["hash"]), policy, version, wait_s)
        return item_response(ChunkState(state=state), request)


@contextlib.asynccontextmanager
async def serve_spool(
    spool: Spool, address: str, *, token: str = "", max_upload_mb_s: float = 0.0
) -> AsyncGenerator[PeerServer]:
    """Serves a spool at `address` (`host` or `host:port`) while the context is open, and sets `spool.url`.

    Callers must show the ticket derived from `token`, the token of this service.

    Raises: ConfigError if the address cannot be bound, cannot be called by others, or is open to other
    machines without a token.
    """
    host, port = parse_address(address)
    host = await _numeric_address(host)
    if not token and not is_loopback(host):
        raise ConfigError(f"peer address {address!r} is open to other machines, so it needs a token")
    app = PeerServer(spool, limit=UploadLimit(max_upload_mb_s * 1e6), ticket=peer_ticket(token))
    rules = WebRules(needs_token=bool(token))
    server = HttpServer(app, host=host, port=port, name="peer", rules=rules)
    spool.url = await server.start()
    try:
        yield app
    finally:
        spool.url = ""
        await server.stop(grace_s=0.2)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host`, `host:port` or `[host]:port`. Port 0 means any free one.

    Raises: ConfigError if the text has another form, or others could not call the host.
    """
    try:
        parts = urlsplit(f"//{address}")
        host = parts.hostname or ""
        port = parts.port or 0
    except ValueError as err:
        raise ConfigError(f"peer address {address!r}: {err}; expected HOST or HOST:PORT") from err
    if not host or parts.netloc != address or listens_everywhere(host):
        raise ConfigError(
            f"peer address {address!r}: expected HOST or HOST:PORT, an address of this machine that other "
            "services can call"
        )
    return host, port


def _parse_wait(text: str) -> float | None:
    """Seconds, at most `_MAX_WAIT_S`; None if the text is not a duration. NaN would mean an endless wait."""
    try:
        wait_s = float(text)
    except ValueError:
        return None
    return min(wait_s, _MAX_WAIT_S) if wait_s >= 0.0 else None


async def _numeric_address(host: str) -> str:
    """The numeric address of a host name of this machine. Elsewhere, the name could mean another machine.

    Raises: ConfigError if the name has no address.
    """
    try:
        addresses = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as err:
        raise ConfigError(f"peer address {host!r}: {err}; expected an address of this machine") from err
    return str(addresses[0][4][0])

"""The publisher: a process that owns the chunk files of its policies and serves them.

    trainer  --- file in incoming/, POST /v1/publish ---> cut, hash, make durable ---> Manifest
    receiver --- GET /v1/chunks/HASH (Range) -----------> bytes; many at once, while a publish runs

A version is immutable: publishing the same content again gives the same manifest, and other content under a
known number is refused. If the trainer is killed at any moment, every retained version stays downloadable; a
publisher that is killed at any moment restarts over its folder. Paths from the trainer must lie inside
`incoming/`.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from astraflow.errors import ConfigError, RefusedError, UnavailableError, WireError
from astraflow.service.messages import item_response, read_item
from astraflow.service.server import HttpServer, TokenAuth
from astraflow.service.web_guard import WebRules
from astraflow.types import (
    Forget,
    HandOver,
    Manifest,
    PublisherHealth,
    ServedVersions,
    SourceLink,
)
from astraflow.weights.addresses import choose_announced_host, url_host
from astraflow.weights.config import WeightsConfig
from astraflow.weights.intake import is_same, take_over
from astraflow.weights.manifest import check_policy_name
from astraflow.weights.serving import (
    UploadLimit,
    chunk_response,
    parse_version,
    require_role,
    with_error_responses,
)
from astraflow.weights.stores.chunk_store import ChunkStore
from astraflow.weights.stores.object_stores import Mirror

__all__ = ["Publisher", "run_publisher"]

_log = logging.getLogger(__name__)

_MAX_CONTROL_BYTES = 16 * 1024 * 1024
"""A tensor table of 100,000 tensors is about 10 MB."""


class Publisher:
    """ASGI app over one folder; an `HttpServer` or a `MemoryTransport` drives it.

    Example::

        publisher = Publisher(run / "weights" / "actor", WeightsConfig(), tokens={"secret": "trainer"})
        publisher.public_url = await HttpServer(publisher, host="127.0.0.1", port=0, name="publisher").start()

    `public_url` is the source that manifests name. The publisher owns the folder until `store.close`.

    Raises: ConfigError if another publisher holds the folder.
    """

    def __init__(
        self,
        folder: Path,
        config: WeightsConfig,
        public_url: str = "",
        *,
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.public_url = public_url
        self._config = config
        self.limit = UploadLimit(config.max_upload_mb_s * 1e6)
        self._mirror = Mirror(config.store) if config.store else None
        self.store = ChunkStore(folder, keep=max(config.keep, config.full_every if config.delta else 1))
        self._turns: dict[str, asyncio.Lock] = {}
        """One lock per policy: its versions are published and forgotten one at a time."""
        routes = [
            Route("/v1/health", with_error_responses(self._health), methods=["GET"]),
            Route("/v1/chunks/{hash}", with_error_responses(self._chunk), methods=["GET"]),
            Route("/v1/manifests/{policy}/{version}", with_error_responses(self._manifest), methods=["GET"]),
            Route("/v1/publish", with_error_responses(self._publish), methods=["POST"]),
            Route("/v1/forget", with_error_responses(self._forget), methods=["POST"]),
        ]
        self._app = Starlette(routes=routes, middleware=[Middleware(TokenAuth, tokens=dict(tokens or {}))])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        await self._app(scope, receive, send)

    async def _health(self, request: Request) -> Response:
        num_chunks, num_bytes = self.store.usage()
        versions = tuple(ServedVersions(policy=p, versions=v) for p, v in self.store.versions().items())
        health = PublisherHealth(
            versions=versions,
            num_chunks=num_chunks,
            num_bytes=num_bytes,
            sent_bytes=self.limit.sent_bytes,
        )
        return item_response(health, request)

    async def _manifest(self, request: Request) -> Response:
        require_role(request, "worker", "trainer")
        policy = str(request.path_params["policy"])
        named = str(request.path_params["version"])
        version = parse_version(named)
        manifest = self.store.manifest(policy, version) if version is not None else None
        if manifest is None:
            known = self.store.versions().get(policy, ())
            raise RefusedError(
                f"{policy[:80]!r} version {named[:80]} is not here; versions: {list(known)}",
                code="unknown_version",
                status=404,
            )
        return item_response(msgspec.structs.replace(manifest, sources=self._sources()), request)

    async def _chunk(self, request: Request) -> Response:
        require_role(request, "worker", "trainer")
        chunk_hash = str(request.path_params["hash"])
        return await chunk_response(
            request, self.store.path(chunk_hash), self.store.size(chunk_hash), self.limit
        )

    async def _publish(self, request: Request) -> Response:
        require_role(request, "trainer")
        hand_over = await read_item(request, HandOver, limit=_MAX_CONTROL_BYTES)
        check_policy_name(hand_over.policy)
        if hand_over.version < 0:
            raise WireError(f"{hand_over.policy!r} version {hand_over.version}: versions count from 0")
        async with self._turns.setdefault(hand_over.policy, asyncio.Lock()):
            known = self.store.manifest(hand_over.policy, hand_over.version)
            has_other_content = known is not None and not is_same(known, hand_over)
            newest = max(self.store.versions().get(hand_over.policy, (-1,)))
            may_replace = hand_over.is_first and hand_over.version == newest
            if known is not None and has_other_content and not may_replace:
                raise RefusedError(
                    f"{hand_over.policy!r} version {hand_over.version} is published with other "
                    f"content ({known.digest}, not {hand_over.digest}); take the next number",
                    code="version_conflict",
                )
            # The first version of a session may replace one that the session before it never announced. It
            # also replaces an equal delta, because a session begins with a full version.
            if known is None or (hand_over.is_first and (has_other_content or known.kind == "delta")):
                known = await asyncio.to_thread(take_over, self.store, hand_over, self._config)
            sources = await self._upload(known)
        return item_response(msgspec.structs.replace(known, sources=sources), request)

    async def _upload(self, manifest: Manifest) -> tuple[SourceLink, ...]:
        """Copies a version into the store, if there is one, and returns the sources that have it.

        A store that fails is left out, with a warning. If the store is the only source, the error is raised.
        """
        if self._mirror is None:
            return self._sources()
        try:
            await self._mirror.upload(manifest, self.store)
        except UnavailableError as err:
            if self._config.is_store_only:
                raise
            _log.warning("%s; receivers can get the version from the publisher only", err)
            return self._sources()[:1]  # the publisher, which comes before the store
        return self._sources()

    async def _forget(self, request: Request) -> Response:
        require_role(request, "trainer")
        forget = await read_item(request, Forget, limit=_MAX_CONTROL_BYTES)
        async with self._turns.setdefault(check_policy_name(forget.policy), asyncio.Lock()):
            before = self.store.hashes()
            gone = await asyncio.to_thread(self.store.retain, forget.policy, forget.needed)
            if self._mirror is not None:
                try:
                    await self._mirror.forget(forget.policy, gone, before - self.store.hashes())
                except OSError as err:
                    _log.warning("%s: old versions stay in the store: %s", forget.policy, err)
        if gone:
            _log.info("%s: forgot versions %s", forget.policy, list(gone))
        return Response(status_code=204)

    def _sources(self) -> tuple[SourceLink, ...]:
        own = SourceLink(kind="http", url=self.public_url)
        if self._mirror is None:
            return (own,)
        return (self._mirror.link,) if self._config.is_store_only else (own, self._mirror.link)


async def run_publisher(
    folder: Path,
    config: WeightsConfig,
    stop: asyncio.Event,
    *,
    tokens: Mapping[str, str] | None = None,
    tls: tuple[str, str] | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves `folder` until `stop`; the main function of a publisher's process. `on_ready` gets the URL.

    `tls`, the files of a certificate and its key, turns on HTTPS. With port 0, a restarted publisher takes
    the port that it had before if that is free, so that the sources in manifests stay valid.

    Raises: ConfigError if the address cannot be bound, or cannot be called by others.
    """
    host = choose_announced_host(config.host, config.advertise)
    publisher = Publisher(folder, config, tokens=tokens)
    memory = folder / "port"
    remembered = int(memory.read_text()) if config.port == 0 and memory.exists() else config.port
    rules = WebRules(needs_token=bool(tokens))
    server = HttpServer(publisher, host=config.host, port=remembered, name="publisher", tls=tls, rules=rules)
    try:
        try:
            url = await server.start()
        except ConfigError:
            if remembered == config.port:
                raise
            _log.warning("port %d, which the publisher had before, is taken; choosing another", remembered)
            server = HttpServer(publisher, host=config.host, port=0, name="publisher", tls=tls, rules=rules)
            url = await server.start()
        scheme = url.partition(":")[0]
        port = url.rpartition(":")[2]
        url = publisher.public_url = f"{scheme}://{url_host(host)}:{port}"
        memory.write_text(port)
        on_ready(url)
        await stop.wait()
        await server.stop()
    finally:
        publisher.store.close()

"""How a service of AstraFlow runs, listens and is called.

Server side: `run_service` owns a process's life (signals, death of the parent, logging), `HttpServer` serves
an ASGI app inside the running loop, `read_item`, `item_response`, `error_response` convert between requests
and items, `TokenAuth` checks bearer tokens. Client side: `ServiceClient` calls routes with typed items over a
`Transport`: HTTP, or `MemoryTransport` for the same app in the same process.

Retries live in the client only: connection failures, 5xx and 429 are tried again, with backoff and no sooner
than the answer's Retry-After says, until the client's patience ends; other refusals are not.
"""
# size: both sides of one HTTP convention, which would drift apart in two files

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import hmac
import logging
import os
import random
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, cast, overload
from urllib.parse import urlencode

import aiohttp
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astraflow import wire
from astraflow.connections import ConnectionLimits, Connections, raise_file_limit
from astraflow.errors import (
    ConfigError,
    DataError,
    Error,
    FencedError,
    JournalError,
    RefusedError,
    UnavailableError,
    VersionMismatchError,
    WeightsError,
    WireError,
)
from astraflow.types import ErrorReply, Item
from astraflow.vital import taking_ends, vital
from astraflow.web_guard import WebGuard, WebRules
from astraflow.worker_ids import shown_target

__all__ = [
    "LIFE_FD_VARIABLE",
    "LIFE_SIGN_EVERY_S",
    "PARENT_FD_VARIABLE",
    "STACKS_SIGNAL",
    "HttpServer",
    "HttpTransport",
    "MemoryTransport",
    "Reply",
    "ServiceClient",
    "TokenAuth",
    "Transport",
    "error_response",
    "is_loopback",
    "item_response",
    "media_type_of",
    "read_item",
    "run_service",
    "settle_memory",
    "unsupported_media_type",
]

_log = logging.getLogger(__name__)
_ItemT = TypeVar("_ItemT", bound=Item)

PARENT_FD_VARIABLE = "ASTRAFLOW_PARENT_FD"
"""Environment variable with the read end of a pipe that closes when the launcher dies."""
LIFE_FD_VARIABLE = "ASTRAFLOW_LIFE_FD"
"""Environment variable with the write end of a pipe that takes a process's signs of life."""
LIFE_SIGN_EVERY_S = 1.0
STACKS_SIGNAL = signal.SIGUSR2
"""A service that gets it writes the stacks of all its threads to its log, even while its event loop hangs."""

_GC_THRESHOLD = 10_000
"""New containers between two collections of the youngest: a service makes hundreds for each request."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""As glibc's malloc.h numbers them."""
_MAX_KEPT_BUFFER_BYTES, _MAX_KEPT_BYTES = 32 * 1024 * 1024, 128 * 1024 * 1024
"""Freed buffers up to the first size (glibc's limit) are used again; so much free memory is kept at most."""
_BODY_PATIENCE_S = 20.0
_SLOWEST_BYTES_PER_S = 100_000
"""A link of 1 Mbit/s still carries a body."""
_MEDIA_TYPES = (wire.MSGPACK, wire.JSON)
_NEVER_S = 86_400
_LAST_MOMENT_S = 10.0
"""A service that has lost its launcher, or a task that it needs, has this long to end in order."""
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0


# --- calling a service ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reply:
    """What a transport brings back."""

    status: int
    media_type: str
    body: bytes
    retry_after_s: float = 0.0
    """How long the service asks the caller to wait before it tries again."""


class Transport(Protocol):
    """Carries one request; raises ConnectionError or TimeoutError when no answer came."""

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Reply: ...

    async def close(self) -> None: ...


class HttpTransport:
    """HTTP/1.1 with kept-alive connections. Opened at the first request, in the loop that makes it."""

    def __init__(
        self,
        base_url: str,
        *,
        num_connections: int = 64,
        ca_file: str = "",
        max_reply_bytes: int = wire.MAX_BODY_BYTES,
    ) -> None:
        """`ca_file`: PEM file by which an `https` service is checked; empty: what OpenSSL trusts, which the
        variable SSL_CERT_FILE may name. A longer answer than `max_reply_bytes` is cut off, and fails."""
        self._base_url = base_url.rstrip("/")
        self._num_connections = num_connections
        self._ca_file = ca_file
        self._max_reply_bytes = max_reply_bytes
        self._session: aiohttp.ClientSession | None = None

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Reply:
        if self._session is None:
            is_tls = self._base_url.startswith("https://")
            trusted = _trusting(self._ca_file) if is_tls else True
            connector = aiohttp.TCPConnector(limit=self._num_connections, ssl=trusted)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method,
                self._base_url + target,
                data=body or None,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,  # a token, and what is asked, are for this address alone
            ) as answer:
                body = await self._body_of(answer)
                return Reply(answer.status, answer.content_type, body, _retry_after_s(answer.headers))
        except aiohttp.ClientError as err:
            raise ConnectionError(f"{type(err).__name__}: {err}") from err

    async def _body_of(self, answer: aiohttp.ClientResponse) -> bytes:
        """The whole body. Raises: ConnectionError if there is no end to it."""
        most = self._max_reply_bytes
        size = answer.content_length or 0
        if answer.content_length is not None and size <= most:
            return await answer.read()
        blocks: list[bytes] = []
        while size <= most:
            block = await answer.content.readany()
            if not block:
                return b"".join(blocks)
            size += len(block)
            blocks.append(block)
        answer.close()
        raise ConnectionError(f"the answer is longer than {most} bytes")

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None


class MemoryTransport:
    """Calls an ASGI app in the same process: same routes, same bytes, no socket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Reply:
        path, _, query = target.partition("?")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(k.lower().encode(), v.encode()) for k, v in headers.items()],
            "client": ("memory", 0),
            "server": ("memory", 0),
        }
        sent: list[Message] = []
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        never = asyncio.Event()

        async def receive() -> Message:
            if not requests:
                await never.wait()
            return requests.pop()

        async def send(message: Message) -> None:
            sent.append(message)

        async with asyncio.timeout(timeout_s):
            await self._app(scope, receive, send)
        start = next(m for m in sent if m["type"] == "http.response.start")
        names = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        chunks = [m.get("body", b"") for m in sent if m["type"] == "http.response.body"]
        media_type = names.get("content-type", "").split(";")[0]
        return Reply(start["status"], media_type, b"".join(chunks), _retry_after_s(names))

    async def close(self) -> None:
        return None


def _trusting(ca_file: str) -> ssl.SSLContext:
    """Checks services by a file of certificates. Raises: ConfigError if it cannot be read."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as err:
        raise ConfigError(
            f"the certificates in {ca_file} cannot be read: {err.strerror or err}; a PEM file is expected"
        ) from err


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """The header in seconds; 0 if it is not there, or is a date."""
    text = headers.get("Retry-After") or headers.get("retry-after") or ""
    return float(text) if text.isdecimal() else 0.0


class ServiceClient:
    """Calls one service with typed items.

    Example: `await ServiceClient("http://127.0.0.1:8000").call("GET", "/v1/status", StatusReply)`.
    Owns its transport; `close` it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        token: str = "",
        patience_s: float = 60.0,
        transport: Transport | None = None,
        ca_file: str = "",
    ) -> None:
        """`ca_file` as that of `HttpTransport`, which carries the calls unless `transport` does."""
        self.base_url = base_url
        self._patience_s = patience_s
        self._transport: Transport = transport or HttpTransport(base_url, ca_file=ca_file)
        self._headers = {"Accept": wire.MSGPACK}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._jitter = random.Random(os.getpid())

    @overload
    async def call(
        self,
        method: str,
        path: str,
        reply_type: type[_ItemT],
        *,
        body: Item | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = 35.0,
    ) -> _ItemT: ...

    @overload
    async def call(
        self,
        method: str,
        path: str,
        reply_type: None,
        *,
        body: Item | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = 35.0,
    ) -> None: ...

    async def call(
        self,
        method: str,
        path: str,
        reply_type: type[_ItemT] | None,
        *,
        body: Item | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = 35.0,
    ) -> _ItemT | None:
        """Sends `body`, returns the decoded answer.

        Raises: RefusedError, FencedError or WireError as the service answered; UnavailableError when it did
        not within the client's patience.
        """
        target = f"{path}?{urlencode(params)}" if params else path
        headers = {**self._headers, "Content-Type": wire.MSGPACK}
        payload = wire.encode(body) if body is not None else b""
        reply = await self._send(method, target, headers=headers, body=payload, timeout_s=timeout_s)
        if reply_type is None:
            return None
        return wire.decode(reply.body, reply_type, reply.media_type)

    async def fetch(self, path: str, *, start: int, end: int, timeout_s: float = 60.0) -> bytes:
        """Bytes `[start, end)` of a resource. Raises as `call`; WireError if the length is off."""
        headers = {**self._headers, "Range": f"bytes={start}-{end - 1}"}
        reply = await self._send("GET", path, headers=headers, body=b"", timeout_s=timeout_s)
        if len(reply.body) != end - start:
            got = len(reply.body)
            raise WireError(
                f"{self.base_url}{path}: {got} bytes for range {start}-{end - 1}, expected {end - start}"
            )
        return reply.body

    async def close(self) -> None:
        """Closes the connections."""
        await self._transport.close()

    async def _send(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Reply:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + self._patience_s
        backoff_s, tries = _FIRST_BACKOFF_S, 0
        while True:
            tries += 1
            try:
                reply = await self._transport.request(
                    method, target, headers=headers, body=body, timeout_s=timeout_s
                )
                problem = _decode_error(reply) if reply.status >= 500 or reply.status == 429 else None
            except (ConnectionError, TimeoutError, OSError) as err:
                reply, problem = None, err
            if reply is not None and problem is None:
                if reply.status >= 300:
                    raise _decode_error(reply)
                return reply
            wait_s = backoff_s * self._jitter.uniform(0.5, 1.0)
            if reply is not None:
                wait_s += reply.retry_after_s
            if loop.time() + max(backoff_s, wait_s) > give_up_at:
                if reply is not None and reply.status == 429 and problem is not None:
                    raise problem
                where = f"{method} {self.base_url}{shown_target(target)}"
                reason = str(problem) or type(problem).__name__
                raise UnavailableError(
                    f"{where}: no answer after {tries} tries in {self._patience_s:.0f} s; last: {reason}. "
                    "Is the service running and reachable?"
                ) from problem
            await asyncio.sleep(wait_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)


def _decode_error(reply: Reply) -> Error:
    if reply.status < 400:
        message = f"HTTP {reply.status}: it sends callers elsewhere, and redirects are not followed"
        return RefusedError(
            f"{message}; give the service's own address", code="redirect", status=reply.status
        )
    try:
        error = wire.decode(reply.body, ErrorReply, reply.media_type)
    except WireError:
        text = reply.body[:200].decode("utf-8", "replace")
        return RefusedError(f"HTTP {reply.status}: {text}", code="unknown", status=reply.status)
    if error.code == "fenced":
        return FencedError(error.message)
    if error.code == "protocol_version":
        return VersionMismatchError(error.message)
    if reply.status in {400, 413}:
        return WireError(error.message)
    return RefusedError(error.message, code=error.code, status=reply.status)


# --- answering -----------------------------------------------------------------------------------


async def read_item(
    request: Request,
    item_type: type[_ItemT],
    *,
    limit: int = wire.MAX_BODY_BYTES,
    patience_s: float = _BODY_PATIENCE_S,
) -> _ItemT:
    """The item in a request's body, by its Content-Type.

    A body must arrive within `patience_s`, plus the time that its bytes take at the slowest accepted rate: a
    client that sends byte by byte, or nothing, is refused.
    Raises: WireError if the body is too large or does not fit the type; RefusedError if it comes too slowly,
    or does not say that it is msgpack or JSON.
    """
    media_type = media_type_of(request)
    if media_type not in _MEDIA_TYPES:
        raise unsupported_media_type(media_type, *_MEDIA_TYPES)
    body = await _read_body(request, item_type.__name__, limit, patience_s)
    return wire.decode(body, item_type, media_type)


def media_type_of(request: Request) -> str:
    """The media type that a body is said to have, without its parameters; empty if none is named."""
    return _header(request, b"content-type").partition(";")[0].strip().lower()


def unsupported_media_type(given: str, *expected: str) -> RefusedError:
    """What is raised for a body of another media type. One without any is refused as well: a web page may
    send such bodies anywhere without being asked."""
    choices = " or ".join(expected)
    return RefusedError(
        f"Content-Type {given!r}: {choices} is expected", code="unsupported_media_type", status=415
    )


async def _read_body(request: Request, name: str, limit: int, patience_s: float) -> bytes:
    chunks: list[bytes] = []
    size = 0
    give_up_s = asyncio.get_running_loop().time() + patience_s
    try:
        async with asyncio.timeout_at(give_up_s) as deadline:
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise WireError(f"{name}: body over the limit of {limit} bytes")
                if chunks:
                    deadline.reschedule(give_up_s + size / _SLOWEST_BYTES_PER_S)
                chunks.append(chunk)
    except TimeoutError as err:
        raise RefusedError(
            f"{name}: {size} bytes of the body came within {patience_s:.0f} s; send it at once",
            code="slow_body",
            status=408,
        ) from err
    return b"".join(chunks)


def _header(request: Request, name: bytes) -> str:
    """The first value of a header, or an empty text."""
    for key, value in cast("list[tuple[bytes, bytes]]", request.scope["headers"]):
        if key == name:
            return value.decode("latin-1")
    return ""


class _ItemResponse(Response):
    """An encoded item, without the work that other bodies need."""

    def __init__(self, body: bytes, status: int, media_type: str) -> None:
        self.status_code, self.body, self.background = status, body, None
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", media_type.encode())]


def item_response(item: Item, request: Request, status: int = 200) -> Response:
    """An item as the answer, in the media type that the caller accepts (JSON unless it names msgpack)."""
    media_type = wire.MSGPACK if wire.MSGPACK in _header(request, b"accept") else wire.JSON
    return _ItemResponse(wire.encode(item, media_type), status, media_type)


def error_response(error: Error, request: Request) -> Response:
    """An error of ours as the answer: its status and code, and its message."""
    status, code = _status_and_code(error)
    return item_response(ErrorReply(code=code, message=str(error)), request, status)


def _status_and_code(error: Error) -> tuple[int, str]:
    if isinstance(error, RefusedError):
        return error.status, error.code
    if isinstance(error, VersionMismatchError):
        return 400, "protocol_version"
    if isinstance(error, JournalError):
        return 503, "journal"
    if isinstance(error, WireError):
        return (413, "too_large") if "over the limit" in str(error) else (400, "malformed")
    if isinstance(error, ConfigError | DataError | WeightsError):
        return 400, "invalid"
    return 503, "unavailable"


@dataclass(frozen=True)
class TokenAuth:
    """ASGI middleware: a bearer token names its role; without tokens everything is open (loopback only).

    `tokens` maps a token to a role; the role is left in `scope["role"]`. `open_paths` need no token.
    """

    app: ASGIApp
    tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    open_paths: frozenset[str] = frozenset({"/v1/health"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self.tokens or scope["path"] in self.open_paths:
            scope["role"] = "admin"
            await self.app(scope, receive, send)
            return
        headers = cast("list[tuple[bytes, bytes]]", scope["headers"])
        given = next((value for name, value in headers if name == b"authorization"), b"")
        role = self._role_of(given.removeprefix(b"Bearer "))
        if role is None:
            remedy = "missing or wrong token; pass --token-file, or set ASTRAFLOW_TOKEN"
            error = RefusedError(remedy, code="unauthorized", status=401)
            await error_response(error, Request(scope))(scope, receive, send)
            return
        scope["role"] = role
        await self.app(scope, receive, send)

    def _role_of(self, given: bytes) -> str | None:
        """The role of a token; every known token is compared, in constant time."""
        found: str | None = None
        for token, role in self.tokens.items():
            if hmac.compare_digest(token.encode(), given):
                found = role
        return found


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    return host in {"localhost", "::1"} or host.startswith("127.")


class HttpServer:
    """Serves an ASGI app inside the running loop. `start` binds before it returns.

    `tls`: files of a certificate and its key; None serves plain HTTP.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        port: int,
        name: str,
        tls: tuple[str, str] | None = None,
        limits: ConnectionLimits | None = None,
        rules: WebRules | None = None,
    ) -> None:
        """`rules`: what web pages, and callers by other names, may do; None: nothing."""
        self._host, self._port, self._name = host, port, name
        self._connections = Connections(limits or ConnectionLimits())
        self._scheme = "https" if tls else "http"
        self._tls = tls
        rules = rules or WebRules()
        rules = replace(rules, host_names=(*rules.host_names, host))
        config = uvicorn.Config(
            cast("Any", WebGuard(app, rules)),
            ssl_certfile=tls[0] if tls else None,
            ssl_keyfile=tls[1] if tls else None,
            http=self._connections.protocol,
            log_level="error",  # a warning for each malformed request would let anybody fill the disk
            access_log=False,
            lifespan="off",
            timeout_keep_alive=_NEVER_S,  # `Connections` closes what is idle
            ws="none",
            proxy_headers=False,
            server_header=False,
            date_header=False,
        )
        self._server = _QuietServer(config)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Binds and serves; returns the base URL.

        Raises: ConfigError if the port is taken, or certificate and key cannot be used.
        """
        if self._tls is not None:
            _check_tls(self._name, *self._tls)
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((self._host, self._port))
        except OSError as err:
            listener.close()
            raise ConfigError(
                f"{self._name}: cannot listen on {self._host}:{self._port}: {err.strerror}; choose another "
                "port, or 0 for a free one"
            ) from err
        listener.listen(2048)
        listener.setblocking(False)
        port = cast("tuple[str, int]", listener.getsockname())[1]
        self._connections.open()
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name=f"http:{self._name}")
        vital(self._task, f"the HTTP server of {self._name}", may_end=lambda: self._server.should_exit)
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{self._scheme}://{host}:{port}"

    async def stop(self, *, grace_s: float = 1.0) -> None:
        """Stops accepting, lets running answers finish for `grace_s`, then cuts them."""
        if self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = grace_s  # pyright: ignore[reportAttributeAccessIssue] (seconds)
        self._server.should_exit = True
        await asyncio.wait({self._task})  # had it failed, the service would know
        await self._connections.close()
        self._task = None


def _check_tls(name: str, cert: str, key: str) -> None:
    """Raises: ConfigError naming the file that is no certificate or no key of it."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key)
    except OSError as err:
        raise ConfigError(
            f"{name}: certificate {cert} with key {key} cannot be used: {err}; two PEM files that belong "
            "together are expected, the key without a password"
        ) from err


class _QuietServer(uvicorn.Server):
    """uvicorn without its own signal handlers: `run_service` owns the process's signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


# --- a service's process ------------------------------------------------------------------------


def run_service(main: Callable[[asyncio.Event], Awaitable[int | None]], *, name: str) -> int:
    """Runs `main(stop)` until it returns; `stop` is set by SIGTERM, SIGINT, the launcher's death, or when a
    `vital` task has ended.

    Returns the process's exit code: 0, what `main` returned, or 1 after an error of ours, which is logged.
    """
    logging.basicConfig(
        level=os.environ.get("ASTRAFLOW_LOG", "INFO"),
        format=f"%(asctime)s %(levelname)s {name} %(name)s: %(message)s",
        stream=sys.stderr,
    )
    for client in ("httpx", "httpx2"):  # of agents in this process: a line a request
        logging.getLogger(client).setLevel(logging.WARNING)
    raise_file_limit()
    try:
        faulthandler.register(STACKS_SIGNAL, all_threads=True)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_guarded(main, name))
    except Error as err:
        _log.error("%s stopped: %s", name, err)
        return 1


def settle_memory() -> None:
    """Spares the garbage collector everything that lives now, and keeps freed memory for what comes; call
    once a service's process is ready.

    The objects of imported libraries (half a million with transformers) live as long as the process; going
    through them over and over took a quarter of a rollout service's event loop. glibc gives a large buffer
    back as soon as it is free; the page faults of the next one made the fetch of a batch take twice the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 10, 10)
    try:
        set_option = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # another C library
    set_option(_M_MMAP_THRESHOLD, _MAX_KEPT_BUFFER_BYTES)
    set_option(_M_TRIM_THRESHOLD, _MAX_KEPT_BYTES)


async def _guarded(main: Callable[[asyncio.Event], Awaitable[int | None]], name: str) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    _watch_parent(loop, stop, name)
    _show_life(loop)
    failures: list[Error] = []

    def end(error: Error) -> None:
        _log.critical("%s", error)
        failures.append(error)
        stop.set()
        loop.call_later(_LAST_MOMENT_S, os._exit, 1)

    with taking_ends(end):
        code = await main(stop) or 0
    if failures:
        raise failures[0]
    return code


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, name: str) -> None:
    """Sets `stop` when the launcher's end of the pipe closes; `_LAST_MOMENT_S` later the process ends."""
    text = os.environ.get(PARENT_FD_VARIABLE, "")
    if not text:
        return
    fd = int(text)

    def parent_died() -> None:
        loop.remove_reader(fd)
        _log.warning("%s: the launcher is gone; stopping", name)
        stop.set()
        loop.call_later(_LAST_MOMENT_S, os._exit, 1)

    loop.add_reader(fd, parent_died)


def _show_life(loop: asyncio.AbstractEventLoop) -> None:
    """Writes a byte for the launcher each second from within the event loop: a process that is stopped, or
    whose loop hangs, falls silent."""
    text = os.environ.get(LIFE_FD_VARIABLE, "")
    if not text:
        return
    fd = int(text)
    os.set_blocking(fd, False)
    os.set_inheritable(fd, False)

    def show() -> None:
        # A full pipe means that the launcher does not read now; what it finds later is sign enough.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(fd, b".")
        loop.call_later(LIFE_SIGN_EVERY_S, show)

    loop.call_soon(show)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    if sys.platform == "win32":
        return asyncio.new_event_loop
    import uvloop

    return uvloop.new_event_loop

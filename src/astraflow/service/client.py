"""Calls a service with typed items: `ServiceClient`, over HTTP or in the same process.

A `Transport` carries one request. `HttpTransport` uses sockets; `MemoryTransport` calls an ASGI app in the
same process. Retries live in `ServiceClient` only: connection failures, 5xx and 429 are tried again, with
backoff and no sooner than the answer's Retry-After says, until the client's patience ends. Other refusals are
not tried again. Nor is an address that speaks `http` where the URL says `https` or the reverse, or whose
certificate is not trusted, unless it has answered before.
"""

import asyncio
import io
import logging
import os
import random
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, overload
from urllib.parse import urlencode, urlsplit

import aiohttp
from starlette.types import ASGIApp, Message, Scope

from astraflow import wire
from astraflow.errors import ConfigError, UnavailableError, WireError
from astraflow.service.messages import error_from_reply
from astraflow.service.worker_ids import shown_target
from astraflow.types import Item

__all__ = ["HttpTransport", "MemoryTransport", "Reply", "ServiceClient", "Transport"]

_ItemT = TypeVar("_ItemT", bound=Item)
_log = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
_TOO_MANY_REQUESTS = 429
_LARGE_BODY_BYTES = 1 << 20
"""A larger body is written in pieces, between which others get their turn in the event loop. aiohttp warns of
bytes beyond this size."""
_CONNECT_S = 10.0
"""Time for one try to connect. A host that drops packets would take up the whole time of a call otherwise."""
_QUIET_S = 1.0
"""How long a client that has never had an answer tries again without a word."""
_PROBE_S = 5.0
"""Time for a look at whether a service speaks HTTPS."""
_NOT_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"}
"""What OpenSSL calls an answer that is no TLS at all."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a transport brings back."""

    status: int
    media_type: str
    body: bytes
    retry_after_s: float = 0.0
    """How long the service asks the caller to wait before it tries again."""


class _StrangerError(ConnectionError):
    """Who listens at the address speaks another scheme, or is not trusted: another try would end the same
    way."""


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
        """`ca_file`: PEM file with the authorities that an `https` service is checked against. If it is
        empty, OpenSSL's own are used, which the variable SSL_CERT_FILE may name. An answer of more than
        `max_reply_bytes` is cut off, and the request fails."""
        self._base_url = base_url.rstrip("/")
        self._num_connections = num_connections
        self._ca_file = ca_file
        self._max_reply_bytes = max_reply_bytes
        self._session: aiohttp.ClientSession | None = None
        self._has_answered = False

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> Reply:
        if self._session is None:
            is_tls = self._base_url.startswith("https://")
            trusted = _trusting(self._ca_file) if is_tls else True
            connector = aiohttp.TCPConnector(limit=self._num_connections, ssl=trusted)
            self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                method,
                self._base_url + target,
                data=io.BytesIO(body) if len(body) > _LARGE_BODY_BYTES else body or None,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,  # the token and the body are for this address alone
            ) as answer:
                body = await self._body_of(answer)
                self._has_answered = True
                return Reply(answer.status, answer.content_type, body, _retry_after_s(answer.headers))
        except aiohttp.ClientError as err:
            if not self._has_answered and (why := await _why_strange(self._base_url, err)):
                raise _StrangerError(why) from err
            raise ConnectionError(f"{type(err).__name__}: {err}") from err

    async def _body_of(self, answer: aiohttp.ClientResponse) -> bytes:
        """The whole body. Raises: ConnectionError if it is longer than it may be."""
        limit = self._max_reply_bytes
        promised = answer.content_length
        if promised is not None and promised <= limit:
            return await answer.read()
        size = promised or 0
        blocks: list[bytes] = []
        while size <= limit:
            block = await answer.content.readany()
            if not block:
                return b"".join(blocks)
            size += len(block)
            blocks.append(block)
        answer.close()
        raise ConnectionError(f"the answer is longer than {limit} bytes")

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
    """Trusts the authorities in a PEM file. Raises: ConfigError if it cannot be read."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as err:
        raise ConfigError(
            f"the certificates in {ca_file} cannot be read: {err.strerror or err}; a PEM file is expected"
        ) from err


async def _why_strange(url: str, error: aiohttp.ClientError) -> str:
    """Why a first request to `url` failed and will fail again; empty if it need not."""
    address = urlsplit(url)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return (
            f"{url} shows a certificate that is not trusted here ({error.certificate_error}); name the file "
            "with the run's certificate by --ca-file or SSL_CERT_FILE, and call the run by a name that the "
            "certificate is for"
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        problem = error.os_error
        is_plain = isinstance(problem, ssl.SSLError) and problem.reason in _NOT_TLS
        return f"{url} does not speak HTTPS; call it http://{address.netloc}" if is_plain else ""
    was_cut_off = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    if address.scheme == "http" and was_cut_off and await _speaks_tls(address.hostname or "", address.port):
        return (
            f"{url} speaks HTTPS; call it https://{address.netloc}, with --ca-file if the run made its own "
            "certificate"
        )
    return ""


async def _speaks_tls(host: str, port: int | None) -> bool:
    """Whether a service at the address shakes hands as HTTPS does, with whatever certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, port or 80, ssl=context)
    except OSError:  # a TimeoutError is one
        return False
    writer.close()
    return True


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """The header Retry-After in seconds; 0 if it is missing or is a date."""
    text = headers.get("Retry-After") or headers.get("retry-after") or ""
    return float(text) if text.isdecimal() else 0.0


@dataclass(frozen=True, slots=True)
class _Setback:
    """A try that failed, after which another one may succeed."""

    problem: Exception
    asked_wait_s: float = 0.0
    """How long the service asked the caller to wait."""
    is_refusal: bool = False
    """The service is well and refused this caller."""


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
        """Without a `transport`, an `HttpTransport` with this `ca_file` carries the calls.

        `patience_s`: how long a call is tried again before it fails.
        """
        self.base_url = base_url
        self._patience_s = patience_s
        self._transport: Transport = transport or HttpTransport(base_url, ca_file=ca_file)
        self._headers = {"Accept": wire.MSGPACK}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._jitter = random.Random(os.getpid())
        self._is_silence_told = False
        """Also true once there was an answer."""

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
        """Sends `body` and returns the decoded answer.

        Raises: RefusedError, FencedError or WireError as the service answered; UnavailableError if it did not
        answer within the client's patience; ConfigError if the URL has the wrong scheme, or the certificate
        is not trusted.
        """
        target = f"{path}?{urlencode(params)}" if params else path
        headers = {**self._headers, "Content-Type": wire.MSGPACK}
        payload = wire.encode(body) if body is not None else b""
        reply = await self._send(method, target, headers=headers, body=payload, timeout_s=timeout_s)
        if reply_type is None:
            return None
        return wire.decode(reply.body, reply_type, reply.media_type)

    async def fetch(self, path: str, *, start: int, end: int, timeout_s: float = 60.0) -> bytes:
        """Bytes `[start, end)` of a resource.

        Raises: as `call`; WireError if the answer has another length.
        """
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
        began_s = loop.time()
        give_up_at = began_s + self._patience_s
        backoff_s = _FIRST_BACKOFF_S
        tries = 0
        while True:
            tries += 1
            outcome = await self._try(method, target, headers=headers, body=body, timeout_s=timeout_s)
            if isinstance(outcome, Reply):
                self._is_silence_told = True
                return outcome
            reason = str(outcome.problem) or type(outcome.problem).__name__
            wait_s = outcome.asked_wait_s + backoff_s * self._jitter.uniform(0.5, 1.0)
            if loop.time() + max(backoff_s, wait_s) > give_up_at:
                if outcome.is_refusal:
                    raise outcome.problem
                raise UnavailableError(
                    f"{method} {self.base_url}{shown_target(target)}: no answer after {tries} tries in "
                    f"{loop.time() - began_s:.0f} s; last: {reason}. Is the service running and reachable?"
                ) from outcome.problem
            if loop.time() - began_s >= _QUIET_S and not self._is_silence_told:
                self._is_silence_told = True
                left_s = give_up_at - loop.time()
                _log.warning(
                    "%s does not answer yet; trying for another %.0f s: %s", self.base_url, left_s, reason
                )
            await asyncio.sleep(wait_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

    async def _try(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> "Reply | _Setback":
        """One try. Raises: the error that the service answered, if another try would get the same."""
        try:
            reply = await self._transport.request(
                method, target, headers=headers, body=body, timeout_s=timeout_s
            )
        except _StrangerError as err:
            raise ConfigError(str(err)) from err
        except OSError as err:  # ConnectionError and TimeoutError are kinds of it
            return _Setback(err)
        if reply.status < 300:
            return reply
        url = f"{self.base_url}{shown_target(target)}"
        error = error_from_reply(reply.status, reply.body, reply.media_type, url=url)
        is_refusal = reply.status == _TOO_MANY_REQUESTS
        if reply.status < 500 and not is_refusal:
            raise error
        return _Setback(error, reply.retry_after_s, is_refusal=is_refusal)

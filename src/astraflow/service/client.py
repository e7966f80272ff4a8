"""Calls a service with typed items (`ServiceClient`), over HTTP or in the same process.

A `Transport` carries one request. `HttpTransport` uses sockets; `MemoryTransport` calls an ASGI app in the
same process. Only `ServiceClient` retries: connection failures, 5xx and 429 are retried with backoff, no
sooner than the response's Retry-After, until the client's patience ends. Other refusals are not retried. A
failure caused by a wrong scheme (`http` or `https`) or an untrusted certificate is not retried either, unless
the address has responded before.
"""

import asyncio
import io
import logging
import random
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar, overload
from urllib.parse import urlencode, urlsplit

import aiohttp
from starlette.types import ASGIApp, Message, Scope

from astraflow import wire
from astraflow.errors import ConfigError, TooLargeError, UnavailableError, WireError
from astraflow.service.messages import error_from_reply
from astraflow.service.worker_ids import public_target
from astraflow.types import Item

__all__ = ["HttpReply", "HttpTransport", "MemoryTransport", "ServiceClient", "Transport", "check_url"]

_ItemT = TypeVar("_ItemT", bound=Item)
_log = logging.getLogger(__name__)
_FIRST_BACKOFF_S = 0.05
_LONGEST_BACKOFF_S = 2.0
_TOO_MANY_REQUESTS = 429
_LARGE_BODY_BYTES = 1 << 20
"""A larger body is written in pieces, so that other tasks get their turn in the event loop. aiohttp warns
about larger bytes objects."""
_CONNECT_S = 10.0
"""Time limit of one connection attempt. Otherwise, a host that drops packets would use up a call's whole
time."""
_QUIET_S = 1.0
"""How long a client that has never received a response retries without logging."""
_PROBE_S = 5.0
"""Time limit for finding out whether a service speaks HTTPS."""
_NOT_TLS = {"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST"}
"""OpenSSL's reasons for a response that is not TLS."""


@dataclass(frozen=True, slots=True)
class HttpReply:
    """The response that a transport received."""

    status: int
    media_type: str
    body: bytes
    retry_after_s: float = 0.0
    """How long the service asks the caller to wait before a retry."""


class _WrongServerError(ConnectionError):
    """The server uses another scheme, or its certificate is not trusted: a retry would fail too."""


class Transport(Protocol):
    """Carries one request. Raises: ConnectionError or TimeoutError if there is no response; TooLargeError if
    it is too long."""

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> HttpReply: ...

    async def close(self) -> None: ...


class HttpTransport:
    """HTTP/1.1 with keep-alive connections, opened at the first request in its event loop."""

    def __init__(
        self,
        base_url: str,
        *,
        num_connections: int = 64,
        ca_file: str = "",
        max_reply_bytes: int = wire.MAX_BODY_BYTES,
    ) -> None:
        """`ca_file`: PEM file with the certificate authorities for `https`; empty means OpenSSL's own, which
        the variable SSL_CERT_FILE may name. A response of more than `max_reply_bytes` fails the request."""
        self._base_url = base_url.rstrip("/")
        self._num_connections = num_connections
        self._ca_file = ca_file
        self._max_reply_bytes = max_reply_bytes
        self._session: aiohttp.ClientSession | None = None
        self._has_answered = False

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> HttpReply:
        if self._session is None:
            is_tls = self._base_url.startswith("https://")
            trusted = _ssl_context(self._ca_file) if is_tls else True
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
                allow_redirects=False,  # the token and the body are meant only for this address
            ) as answer:
                body = await self._body_of(answer)
                self._has_answered = True
                return HttpReply(answer.status, answer.content_type, body, _retry_after_s(answer.headers))
        except aiohttp.ClientError as err:
            if not self._has_answered and (why := await _why_wrong_server(self._base_url, err)):
                raise _WrongServerError(why) from err
            raise ConnectionError(f"{type(err).__name__}: {err}") from err

    async def _body_of(self, answer: aiohttp.ClientResponse) -> bytes:
        """Reads the whole body. Raises: TooLargeError if it is too long."""
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
        raise TooLargeError(f"the response has more than {limit} bytes; request a smaller range")

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
    ) -> HttpReply:
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
        return HttpReply(start["status"], media_type, b"".join(chunks), _retry_after_s(names))

    async def close(self) -> None:
        return None


def _ssl_context(ca_file: str) -> ssl.SSLContext:
    """Makes a context that trusts the authorities in a PEM file. Raises: ConfigError if it cannot be read."""
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as err:
        raise ConfigError(
            f"the certificates in {ca_file} cannot be read: {err.strerror or err}; expected a PEM file"
        ) from err


async def _why_wrong_server(url: str, error: aiohttp.ClientError) -> str:
    """Explains why a first request to `url` failed and would fail again; empty if a retry may succeed."""
    address = urlsplit(url)
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return (
            f"{url} has a certificate that is not trusted here ({error.certificate_error}); pass the run's "
            "certificate file as --ca-file or SSL_CERT_FILE, and use a host name that the certificate covers"
        )
    if isinstance(error, aiohttp.ClientConnectorError):
        problem = error.os_error
        is_plain = isinstance(problem, ssl.SSLError) and problem.reason in _NOT_TLS
        return f"{url} does not speak HTTPS; use http://{address.netloc}" if is_plain else ""
    was_cut_off = isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError)
    if address.scheme == "http" and was_cut_off and await _speaks_tls(address.hostname or "", address.port):
        return (
            f"{url} speaks HTTPS; use https://{address.netloc}, with --ca-file if the run created its own "
            "certificate"
        )
    return ""


async def _speaks_tls(host: str, port: int | None) -> bool:
    """Checks whether a service at the address completes a TLS handshake, with any certificate."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(_PROBE_S):
            _, writer = await asyncio.open_connection(host, port or 80, ssl=context)
    except OSError:  # includes TimeoutError
        return False
    writer.close()
    return True


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Returns the value of the Retry-After header in seconds, or 0 if it is missing or is a date."""
    text = headers.get("Retry-After") or headers.get("retry-after") or ""
    return float(text) if text.isdecimal() else 0.0


@dataclass(frozen=True, slots=True)
class _FailedAttempt:
    """A failed attempt that may be retried."""

    problem: Exception
    asked_wait_s: float = 0.0
    """How long the service asked the caller to wait."""
    is_refusal: bool = False
    """The service is healthy and refused this caller."""


def check_url(url: str) -> None:
    """Raises: ConfigError if `url` isn't an http or https URL with a host."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigError(f"{url[:300]!r} is not the URL of a dataflow, such as http://gpu-1:8000")


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

        `patience_s`: how long a call is retried before it fails.
        """
        self.base_url = base_url
        self._patience_s = patience_s
        self._transport: Transport = transport or HttpTransport(base_url, ca_file=ca_file)
        self._headers = {"Accept": wire.MSGPACK}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        # Seeded by the operating system, so that clients that failed together don't retry together.
        self._jitter = random.Random()
        self._warns_of_silence = True
        """Whether a lack of responses is still to be logged; False after the first response."""

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
        """Sends `body` and returns the decoded response.

        Raises: RefusedError, FencedError or WireError if the service responded with that; UnavailableError if
        it did not respond within the client's patience; ConfigError if the URL has the wrong scheme or the
        certificate is not trusted.
        """
        target = f"{path}?{urlencode(params)}" if params else path
        headers = {**self._headers, "Content-Type": wire.MSGPACK}
        payload = wire.encode(body) if body is not None else b""
        reply = await self._send(method, target, headers=headers, body=payload, timeout_s=timeout_s)
        if reply_type is None:
            return None
        return wire.decode(reply.body, reply_type, reply.media_type)

    async def fetch(self, path: str, *, start: int, end: int, timeout_s: float = 60.0) -> bytes:
        """Returns bytes `[start, end)` of a resource.

        Raises: the same errors as `call`; WireError if the response has another length.
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
    ) -> HttpReply:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        give_up_at = began_s + self._patience_s
        backoff_s = _FIRST_BACKOFF_S
        tries = 0
        while True:
            tries += 1
            outcome = await self._try(method, target, headers=headers, body=body, timeout_s=timeout_s)
            if isinstance(outcome, HttpReply):
                self._warns_of_silence = False
                return outcome
            reason = str(outcome.problem) or type(outcome.problem).__name__
            wait_s = outcome.asked_wait_s + backoff_s * self._jitter.uniform(0.5, 1.0)
            if loop.time() + max(backoff_s, wait_s) > give_up_at:
                if outcome.is_refusal:
                    raise outcome.problem
                raise UnavailableError(
                    f"{method} {self.base_url}{public_target(target)}: failed after {tries} tries in "
                    f"{loop.time() - began_s:.0f} s; last: {reason}. Is the service running, "
                    "healthy, and reachable?"
                ) from outcome.problem
            if loop.time() - began_s >= _QUIET_S and self._warns_of_silence:
                self._warns_of_silence = False
                left_s = give_up_at - loop.time()
                _log.warning(
                    "%s is not available yet; trying for another %.0f s: %s", self.base_url, left_s, reason
                )
            await asyncio.sleep(wait_s)
            backoff_s = min(backoff_s * 2, _LONGEST_BACKOFF_S)

    async def _try(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> "HttpReply | _FailedAttempt":
        """Makes one attempt. Raises: the service's error, if a retry would get the same error."""
        try:
            reply = await self._transport.request(
                method, target, headers=headers, body=body, timeout_s=timeout_s
            )
        except _WrongServerError as err:
            raise ConfigError(str(err)) from err
        except TooLargeError as err:
            raise TooLargeError(f"{method} {self.base_url}{public_target(target)}: {err}") from err
        except OSError as err:  # includes ConnectionError and TimeoutError
            return _FailedAttempt(err)
        if reply.status < 300:
            return reply
        url = f"{self.base_url}{public_target(target)}"
        error = error_from_reply(reply.status, reply.body, reply.media_type, url=url)
        is_refusal = reply.status == _TOO_MANY_REQUESTS
        if reply.status < 500 and not is_refusal:
            raise error
        return _FailedAttempt(error, reply.retry_after_s, is_refusal=is_refusal)

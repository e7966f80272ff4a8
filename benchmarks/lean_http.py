"""A transport with a low CPU cost, for hundreds of emulated rollout services in one process.

aiohttp's client, which real services use, takes twice the CPU time of the server that it calls. Each of 500
real services would pay for that on its own machine. This transport has kept-alive HTTP/1.1 connections with
one request at a time on each, and reads responses with a Content-Length. It doesn't support redirects,
retries, or TLS.
"""

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import cast
from urllib.parse import urlsplit

from astraflow.service.client import HttpReply

__all__ = ["LeanTransport"]

_END = b"\r\n\r\n"


class _Connection(asyncio.Protocol):
    """One connection. `ask` sends a request, and resolves to status, media type, and body."""

    def __init__(self) -> None:
        self.is_open = False
        self._transport: asyncio.WriteTransport | None = None
        self._answer: asyncio.Future[HttpReply] | None = None
        self._chunks: list[bytes] = []
        self._head = b""
        self._num_missing = 0

    def ask(self, head: bytes, body: bytes) -> "asyncio.Future[HttpReply]":
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.writelines((head, body) if body else (head,))
        return self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)
        self.is_open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the connection broke off: {exc}"))

    def data_received(self, data: bytes) -> None:
        if not self._num_missing:
            self._head += data
            head, end, data = self._head.partition(_END)
            if not end:
                return
            self._head = head
            self._num_missing = int(_field(head, b"content-length") or 0)
        self._chunks.append(data)
        self._num_missing -= len(data)
        if self._num_missing <= 0:
            self._finish()

    def _finish(self) -> None:
        head = self._head
        body = b"".join(self._chunks)
        self._head = b""
        self._chunks = []
        self._num_missing = 0
        media_type = _field(head, b"content-type").partition(b";")[0].decode()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(HttpReply(int(head[9:12]), media_type, body))


def _field(head: bytes, name: bytes) -> bytes:
    """Returns the value of a header; empty if it is missing."""
    lower = head.lower()
    start = lower.find(b"\r\n" + name + b":")
    if start < 0:
        return b""
    start += len(name) + 3
    end = lower.find(b"\r\n", start)
    return head[start : end if end >= 0 else len(head)].strip()


class LeanTransport:
    """A replacement for `HttpTransport`. If all connections are in use, a request waits for one."""

    def __init__(self, base_url: str, *, num_connections: int) -> None:
        url = urlsplit(base_url)
        self._host = url.hostname
        self._port = url.port
        self._host_line = f"host: {url.netloc}\r\n"
        self._room = asyncio.Semaphore(num_connections)
        self._free: deque[_Connection] = deque()

    async def request(
        self, method: str, target: str, *, headers: Mapping[str, str], body: bytes, timeout_s: float
    ) -> HttpReply:
        """Sends one request. Raises: ConnectionError, TimeoutError."""
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        first = f"{method} {target} HTTP/1.1\r\n{self._host_line}{fields}content-length: {len(body)}\r\n\r\n"
        async with self._room:
            while self._free and not self._free[-1].is_open:
                self._free.pop()
            connection = self._free.pop() if self._free else await self._connected()
            async with asyncio.timeout(timeout_s):
                reply = await connection.ask(first.encode(), body)
            if connection.is_open:
                self._free.append(connection)
            return reply

    async def _connected(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port
        )
        return connection

    async def close(self) -> None:
        """Closes the free connections. No request may be waiting."""
        while self._free:
            self._free.pop().close()

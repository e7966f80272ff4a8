"""One HTTP/1.1 connection of an ASGI app, in place of uvicorn's own protocol, which takes twice the CPU time.

httptools parses; uvicorn listens, counts connections and shuts down. An answer that is whole goes out in one
write, and a body that came with its head lies in the scope (`wire.WHOLE_BODY`), so that nobody arms a timer
to wait for it. No WebSockets, upgrades, trailers or access log.

Requests of one connection are answered one after another. A body that the app does not read stops the reading
of the socket, and an answer that the caller does not take holds up `send`.
"""

import asyncio
import http
import logging
from collections import deque
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Scope
from uvicorn.server import ServerState

from astraflow import wire

__all__ = ["HttpProtocol"]

_log = logging.getLogger(__name__)

_MAX_UNREAD_BYTES = 1024 * 1024
"""Of a body, until the app reads it."""
_MAX_HEAD_BYTES = 64 * 1024
_MAX_JOINED_BYTES = 64 * 1024
"""A body up to this size is copied behind its head, which costs less than a second buffer."""
_IDLE_S = 75.0
"""A connection that does nothing is closed after this time, and before twice of it."""
_STATUS_LINES = {int(code): f"HTTP/1.1 {code:d} {code.phrase}\r\n".encode() for code in http.HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})


class HttpProtocol(asyncio.Protocol):
    """A connection. Each request is handed to the app in a task of its own, which uvicorn waits for."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """As uvicorn calls it."""
        self._app = cast("ASGIApp", config.loaded_app)
        self._loop = asyncio.get_running_loop()
        self._connections = cast("set[HttpProtocol]", server_state.connections)
        self._tasks = server_state.tasks
        self._parser = httptools.HttpRequestParser(self)
        # What follows a request that closes is dropped; without this it would be an error before the answer.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._shared: Scope = {}
        """What the scopes of all its requests have in common."""
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._is_in_head = False
        self._num_head_bytes = 0
        self._parsed: _Exchange | None = None
        """The request whose body comes."""
        self._current: _Exchange | None = None
        """The request that is being answered."""
        self._later: deque[_Exchange] = deque()
        self._is_reading = True
        self._is_closing = False
        self._has_moved = True
        """Whether anything happened since the last look for idle connections."""
        self._idle_timer = self._loop.call_later(_IDLE_S, self._close_if_idle)
        self._can_write: asyncio.Event | None = None
        """While the transport is full."""
        self.transport: asyncio.Transport

    # --- the transport's calls ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        self._shared = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "scheme": "https" if transport.get_extra_info("sslcontext") else "http",
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "root_path": "",
        }

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        self._idle_timer.cancel()
        for exchange in (self._current, *self._later):
            if exchange is not None:
                exchange.end()
        self._later.clear()
        self.resume_writing()
        del self._parser  # which refers to this

    def data_received(self, data: bytes) -> None:
        self._has_moved = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # answered as if it had not asked
        except httptools.HttpParserError as err:
            self._refuse(400, str(err))
        if self._is_in_head:
            self._num_head_bytes += len(data)
            if self._num_head_bytes > _MAX_HEAD_BYTES:
                self._refuse(431, f"a head of more than {_MAX_HEAD_BYTES} bytes")

    def pause_writing(self) -> None:
        self._can_write = asyncio.Event()

    def resume_writing(self) -> None:
        if self._can_write is not None:
            self._can_write.set()
            self._can_write = None

    def shutdown(self) -> None:
        """uvicorn stops: the answer that is under way is the last one."""
        self._is_closing = True
        if self._current is None:
            self.transport.close()

    # --- the parser's calls ---

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        self._is_in_head, self._num_head_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        parser, url = self._parser, self._url
        if url.startswith(b"/"):
            raw_path, _, query = url.partition(b"?")
        else:
            parts = httptools.parse_url(url)
            raw_path, query = parts.path or b"/", parts.query or b""
        path, version = raw_path.decode("ascii"), parser.get_http_version()
        scope: Scope = {
            **self._shared,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": self._headers,
        }
        keeps_alive = version != "1.0" and parser.should_keep_alive() and not parser.should_upgrade()
        exchange = _Exchange(self, scope, keeps_alive=keeps_alive)
        self._parsed = exchange
        if self._current is None:
            self._begin(exchange)
        else:
            self._later.append(exchange)
            self.pause_reading()

    def on_body(self, body: bytes) -> None:
        if self._parsed is not None:
            self._parsed.feed(body)

    def on_message_complete(self) -> None:
        if self._parsed is not None:
            self._parsed.feed_end()
            self._parsed = None

    # --- an exchange's calls ---

    def pause_reading(self) -> None:
        """Until `resume_reading`."""
        if self._is_reading:
            self._is_reading = False
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """While requests wait for their turn, no more are read."""
        if not self._is_reading and not self._later and not self.transport.is_closing():
            self._is_reading = True
            self.transport.resume_reading()

    async def written(self, *buffers: bytes) -> None:
        """Sends as soon as the transport takes more."""
        while (can_write := self._can_write) is not None:
            await can_write.wait()
        for buffer in buffers:
            self.transport.write(buffer)

    def answered(self, *, keeps_alive: bool) -> None:
        """The current request has its answer: it is the next one's turn."""
        self._current, self._has_moved = None, True
        if self._is_closing or not keeps_alive:
            self.transport.close()
        elif self._later:
            self._begin(self._later.popleft())
        self.resume_reading()

    # --- parts ---

    def _begin(self, exchange: "_Exchange") -> None:
        self._current = exchange
        task = self._loop.create_task(exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, status: int, reason: str) -> None:
        """Answers what is no request, and reads no more."""
        _log.warning("a request of %s is refused: %s", self._shared["client"], reason)
        self.transport.write(_STATUS_LINES[status] + b"content-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()

    def _close_if_idle(self) -> None:
        if self._current is None and not self._has_moved:
            self.transport.close()
        else:
            self._has_moved = False
            self._idle_timer = self._loop.call_later(_IDLE_S, self._close_if_idle)


class _Exchange:
    """One request and its answer."""

    def __init__(self, connection: HttpProtocol, scope: Scope, *, keeps_alive: bool) -> None:
        self._connection = connection
        self._scope = scope
        self._keeps_alive = keeps_alive
        self._chunks: list[bytes] = []
        self._num_unread = 0
        self._is_whole = False
        self._is_read = False
        """`receive` gave the end of the body."""
        self._is_over = False
        """It is answered, or the caller is gone."""
        self._moved: asyncio.Event | None = None
        """Who waits in `receive`."""
        self._head = b""
        """Of the answer, until it goes out."""
        self._has_started = self._is_chunked = False
        self._num_left: int | None = None
        """Bytes that the answer's body still lacks, if it announced its length."""

    # --- the connection's calls ---

    def feed(self, body: bytes) -> None:
        """A piece of the body; nobody wants it once the request is answered."""
        if self._is_over:
            return
        self._chunks.append(body)
        self._num_unread += len(body)
        if self._num_unread > _MAX_UNREAD_BYTES:
            self._connection.pause_reading()
        self._wake()

    def feed_end(self) -> None:
        """The body is whole."""
        self._is_whole = True
        self._wake()

    def end(self) -> None:
        """The caller is gone, or has its answer."""
        self._is_over = True
        self._wake()

    async def run(self, app: ASGIApp) -> None:
        """Lets the app answer; what it fails at is its own, and costs the caller this connection."""
        if self._is_whole:
            self._scope["extensions"] = {wire.WHOLE_BODY: b"".join(self._chunks)}
        try:
            await app(self._scope, self.receive, self.send)
        except Exception:  # noqa: BLE001 - an app's fault is its request's, not the server's
            _log.exception("%s %s failed", self._scope["method"], self._scope["path"])
        finally:
            if not self._is_over:
                if not self._has_started:
                    self._connection.transport.write(
                        _STATUS_LINES[500] + b"content-length: 0\r\nconnection: close\r\n\r\n"
                    )
                self._connection.transport.close()

    # --- the app's calls ---

    async def receive(self) -> Message:
        """What came of the body since the last call; after its end, that the caller is gone or answered."""
        while not (self._is_over or self._is_read or self._is_whole or self._chunks):
            await self._movement()
        if self._is_read or self._is_over:
            while not self._is_over:
                await self._movement()
            return {"type": "http.disconnect"}
        body = b"".join(self._chunks)
        self._chunks, self._num_unread, self._is_read = [], 0, self._is_whole
        self._connection.resume_reading()
        return {"type": "http.request", "body": body, "more_body": not self._is_whole}

    async def send(self, message: Message) -> None:
        """The head waits for the first piece of the body, as ASGI demands."""
        if self._is_over:
            return
        if message["type"] == "http.response.start":
            self._head = self._make_head(message["status"], message.get("headers", ()))
            return
        if not (self._head or self._has_started):
            raise RuntimeError(f"{message['type']} comes before http.response.start")
        more_body = message.get("more_body", False)
        head, body = self._head, self._framed(message.get("body", b""), more_body)
        self._head, self._has_started = b"", True
        if len(body) <= _MAX_JOINED_BYTES:
            await self._connection.written(b"".join((head, body)))
        else:
            await self._connection.written(head, body)
        if not more_body and not self._is_over:
            self.end()
            self._connection.answered(keeps_alive=self._keeps_alive)

    # --- parts ---

    def _wake(self) -> None:
        if self._moved is not None:
            self._moved.set()
            self._moved = None

    async def _movement(self) -> None:
        """Returns when more of the body came, or the exchange is over."""
        if self._moved is None:
            self._moved = asyncio.Event()
        if not self._is_whole and (b"expect", b"100-continue") in self._scope["headers"]:
            self._connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._scope["headers"].remove((b"expect", b"100-continue"))
        await self._moved.wait()

    def _make_head(self, status: int, headers: "list[tuple[bytes, bytes]]") -> bytes:
        """The answer's first lines. Raises: RuntimeError if a header holds a line break."""
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status]
        for given, value in headers:
            name = given.lower()
            if name == b"content-length":
                self._num_left = int(value)
            elif name == b"connection":
                self._keeps_alive = self._keeps_alive and b"close" not in value.lower()
                continue
            elif name == b"transfer-encoding":
                continue  # is ours to choose
            lines.append(b"%b: %b\r\n" % (name, value))
        if self._scope["method"] == "HEAD" or status in _WITHOUT_BODY:
            self._num_left = 0
        elif self._num_left is None and self._scope["http_version"] != "1.0":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked\r\n")
        if not self._keeps_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        head = b"".join(lines)
        if not head.count(b"\n") == head.count(b"\r") == len(lines):
            raise RuntimeError(f"a header of the answer holds a line break: {headers!r}")
        return head

    def _framed(self, body: bytes, more_body: bool) -> bytes:
        """A piece of the body as it goes out. Raises: RuntimeError if the announced length is not kept."""
        if self._is_chunked:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            return chunk if more_body else chunk + b"0\r\n\r\n"
        if self._num_left is not None:
            if self._scope["method"] == "HEAD":
                return b""
            self._num_left -= len(body)
            if self._num_left < 0 or (self._num_left and not more_body):
                raise RuntimeError(f"the answer's body is {-self._num_left} bytes longer than announced")
        return body


def _address(name: object) -> tuple[str, int] | None:
    """Host and port of a socket's end."""
    if not isinstance(name, tuple):
        return None
    host, port = cast("tuple[str, int]", name)[:2]
    return str(host), int(port)

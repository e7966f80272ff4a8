"""Limits a service's connections, and the time that callers may take for a request.

uvicorn serves the requests. It doesn't limit the time in which a head or a body arrives, the wait for a
caller that never reads its response, the size of a head, or the number of connections per address. Without
such limits, one idle machine could lock out all others. `GuardedConnection` is uvicorn's protocol, extended
to record when each phase of a request began. `Connections` checks all connections once per second, so
requests don't need their own timers. Recording costs 1 to 4 us of the 50 us that uvicorn takes for a small
request.

A connection that waits for its response (a long poll) is never cut off, and never closed to make room
for another one.
"""

import asyncio
import contextlib
import heapq
import sys
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from astraflow import wire
from astraflow.service.vital import vital
from astraflow.types import ErrorReply

__all__ = ["ConnectionLimits", "Connections", "GuardedConnection", "max_connections", "raise_file_limit"]

_CHECKED_PER_TICK = 2000
"""Number of connections beyond which the time between two checks grows with it."""
_CHECKED_TOGETHER = 200
"""Number of connections that are checked before other requests are served."""
_MAX_CONNECTIONS = 16_384
_SPARED_FILES = 256
"""Number of open files that a service needs itself, for its journal, weights and outgoing connections."""
_ANSWERED: Any = SimpleNamespace(response_started=True, response_complete=True, message_event=asyncio.Event())
"""Takes the place of an answered request's cycle."""
_NUM_EVICTED = 16
"""Number of idle connections that are closed together when there is no room. Closing several at once avoids
a search per new connection during a flood."""


def max_connections(max_files: int) -> int:
    """Returns the largest number of connections for a process that may have `max_files` open files.

    The rest is enough for the process's own files.
    """
    return min(_MAX_CONNECTIONS, max_files - min(_SPARED_FILES, max_files // 2))


def raise_file_limit() -> None:
    """Raises this process's limit of open files as far as its user may. A shell may allow only 256, which a
    few hundred services would use up."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        _MAX_CONNECTIONS + _SPARED_FILES
        if hard == resource.RLIM_INFINITY
        else min(hard, _MAX_CONNECTIONS + _SPARED_FILES)
    )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has its own, lower bound
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _own_limit() -> int:
    if sys.platform == "win32":
        return _MAX_CONNECTIONS
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max_connections(soft) if soft != resource.RLIM_INFINITY else _MAX_CONNECTIONS


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What one service accepts from its callers. Times are in seconds."""

    head_s: float = 10.0
    """Limit from the opening of a connection, or a request's first byte, to the end of the request's head."""
    max_head_bytes: int = 64 * 1024
    idle_s: float = 75.0
    """Limit between two requests."""
    body_s: float = 20.0
    """Limit for a body, in addition to the time that its bytes take at the slowest accepted rate."""
    slowest_bytes_per_s: float = 100_000.0
    """Slowest accepted rate of a body: a link of 1 Mbit/s is fast enough."""
    stall_s: float = 60.0
    """A response is abandoned if the caller has read nothing of it for this long."""
    num: int = field(default_factory=_own_limit)
    """Largest number of open connections."""
    tick_s: float = 1.0
    """Time between two checks of all connections."""

    @property
    def num_per_address(self) -> int:
        """Largest number of connections from another machine: half of all. Loopback may use all."""
        return max(1, self.num // 2)


class Connections:
    """All connections of one server. From `open` to `close`, it owns the task that checks them."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._by_address: dict[str, dict[GuardedConnection, None]] = {}
        self._num = 0
        self._watch: asyncio.Task[None] | None = None

    @property
    def protocol(self) -> type[asyncio.Protocol]:
        """The factory that uvicorn calls for each connection."""
        return cast("type[asyncio.Protocol]", partial(GuardedConnection, others=self))

    def open(self) -> None:
        """Starts watching the connections."""
        self._watch = asyncio.create_task(self._look(), name="connections")
        vital(self._watch, "the watch over connections", may_end=lambda: self._watch is None)

    async def close(self) -> None:
        """Stops watching."""
        watch = self._watch
        self._watch = None
        if watch is not None:
            watch.cancel()
            await asyncio.wait({watch})

    def admit(self, newcomer: "GuardedConnection") -> bool:
        """Counts a connection, and closes idle ones if there are too many. Returns False if there is no
        room."""
        limits = self.limits
        address = newcomer.address
        own = self._by_address.get(address, {})
        is_local = not address or address == "::1" or address.startswith("127.")
        if not is_local and len(own) >= limits.num_per_address and not self._evict(own):
            return False
        if self._num >= limits.num:
            # Among the addresses that have idle connections, the one with the most connections loses some.
            by_number = sorted(self._by_address.values(), key=len, reverse=True)
            if not any(map(self._evict, by_number)):
                return False
        self._by_address.setdefault(address, {})[newcomer] = None
        self._num += 1
        return True

    def forget(self, connection: "GuardedConnection") -> None:
        """Stops counting a connection that is closed or about to be."""
        own = self._by_address.get(connection.address, {})
        if connection in own:
            del own[connection]
            self._num -= 1
        if not own:
            self._by_address.pop(connection.address, None)

    def _evict(self, connections: "dict[GuardedConnection, None]") -> bool:
        idle = [connection for connection in connections if not connection.is_answering]
        # A connection that has been idle for long is the least likely to be used again.
        for connection in heapq.nsmallest(_NUM_EVICTED, idle, key=lambda each: each.since_s):
            self.forget(connection)
            connection.transport.close()
        return bool(idle)

    async def _look(self) -> None:
        """Checks all connections again and again, a part at a time, and less often if there are very many."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self.limits.tick_s * max(1.0, self._num / _CHECKED_PER_TICK))
            connections = [*chain.from_iterable(self._by_address.values())]
            for idx, connection in enumerate(connections):
                if not connection.transport.is_closing():
                    connection.cut_if_overdue(loop.time())
                if idx % _CHECKED_TOGETHER == 0:
                    await asyncio.sleep(0)


class GuardedConnection(HttpToolsProtocol):
    """uvicorn's connection, extended to record its current phase: idle, head, body or answering."""

    def __init__(self, *args: Any, others: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._others = others
        self._limits = others.limits
        self.address = ""
        """The caller's address."""
        self.since_s = self.loop.time()
        """When the current phase began."""
        self._is_in_head = False
        self._is_in_body = False
        self._num_bytes = 0
        """Bytes of the current head or body so far."""
        self._num_unread = 0
        """Bytes of responses that the caller has not read."""
        self._unread_since_s = 0.0
        """When that number last changed."""

    @property
    def is_answering(self) -> bool:
        """Whether the response to a request is incomplete."""
        # uvicorn declares `cycle` as never None, but it is None until the first request.
        cycle = cast("Any", self.cycle)
        return cycle is not None and not cycle.response_complete

    def cut_if_overdue(self, now_s: float) -> None:
        """Ends the connection if the caller is too slow."""
        if self._is_stalled(now_s):
            self.transport.abort()
            return
        if self.flow.read_paused:
            # The app is not reading at present, so missing bytes are not late.
            self.since_s = now_s
            self._num_bytes = 0
        if now_s - self.since_s <= self._patience_s():
            return
        # An error response must not be written into the middle of another response.
        if self._is_in_head and not self.is_answering:
            problem = "the head of the request took too long to arrive"
            self._refuse(b"408 Request Timeout", problem, code="slow_head")
        elif self._is_in_body and not self.cycle.response_started:
            took_s = now_s - self.since_s
            problem = (
                f"only {self._num_bytes} bytes of the body arrived within {took_s:.0f} s; send it faster"
            )
            self._refuse(b"408 Request Timeout", problem, code="slow_body")
        self.transport.close()

    def _patience_s(self) -> float:
        """Returns the number of seconds that the current phase may last."""
        limits = self._limits
        if self._is_in_head:
            return limits.head_s
        if self._is_in_body:
            return limits.body_s + self._num_bytes / limits.slowest_bytes_per_s
        if self.is_answering:
            return float("inf")
        has_asked = cast("Any", self.cycle) is not None
        return limits.idle_s if has_asked else limits.head_s

    def _is_stalled(self, now_s: float) -> bool:
        # The number changes whenever the caller reads or the app writes.
        num_unread = self.transport.get_write_buffer_size()
        if not num_unread or num_unread != self._num_unread:
            self._num_unread = num_unread
            self._unread_since_s = now_s
        return now_s - self._unread_since_s > self._limits.stall_s

    def _refuse(self, status: bytes, problem: str, *, code: str) -> None:
        """Responds before the request is complete, and closes the connection."""
        body = wire.encode(ErrorReply(code=code, message=problem), wire.JSON)
        self.transport.write(b"HTTP/1.1 %b\r\nconnection: close\r\n" % status)
        self.transport.write(b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body))
        self.transport.write(body)
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride] - as uvicorn has it
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        if not self._others.admit(self):
            problem = "all connections of this service are in use"
            self._refuse(b"503 Service Unavailable", problem, code="no_room")

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._num_bytes += len(data)
            if self._num_bytes > self._limits.max_head_bytes and not self.transport.is_closing():
                problem = f"the head of the request has more than {self._limits.max_head_bytes} bytes"
                self._refuse(b"431 Request Header Fields Too Large", problem, code="large_head")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin(is_in_head=True)

    def on_headers_complete(self) -> None:
        self._begin(is_in_body=True)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._begin()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        # The rest of the body, or the head of the next request, may still be arriving.
        if self._is_in_head or self._is_in_body or self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        # uvicorn keeps an answered request until the next one, and starts a timer. With 10,000 callers, that
        # makes the pauses of the garbage collector long.
        self._begin()
        self.flow.resume_reading()
        self.scope = self.headers = cast("Any", None)
        self.cycle = _ANSWERED

    def _begin(self, *, is_in_head: bool = False, is_in_body: bool = False) -> None:
        """Records that a new phase begins: the head, the body, or neither."""
        self._is_in_head = is_in_head
        self._is_in_body = is_in_body
        self.since_s = self.loop.time()
        self._num_bytes = 0

"""Makes a slow link of loopback connections: a TCP proxy with a delay each way, and a bandwidth that all
share."""

import asyncio
from collections import deque
from dataclasses import dataclass
from urllib.parse import urlsplit

__all__ = ["Link", "ShapedLink"]

_READ_BYTES = 65_536
_BURST_S = 0.005
"""Size of the token bucket. The timers of an event loop are not more precise than this."""


@dataclass(frozen=True)
class Link:
    """The properties of a link. The delay applies to each direction, so a round trip takes twice as long."""

    delay_s: float
    bits_per_s: float


class _Direction:
    """A token bucket for one direction of a link, shared by all its connections."""

    def __init__(self, link: Link) -> None:
        self._bytes_per_s = link.bits_per_s / 8
        self._free_at_s = 0.0

    async def take(self, num_bytes: int) -> None:
        """Waits until the link has room for this number of bytes."""
        loop = asyncio.get_running_loop()
        self._free_at_s = max(self._free_at_s, loop.time()) + num_bytes / self._bytes_per_s
        if (ahead_s := self._free_at_s - loop.time()) > _BURST_S:
            await asyncio.sleep(ahead_s)


class ShapedLink:
    """Example: `link = ShapedLink(Link(0.15, 50e6))`, then `url = await link.to("127.0.0.1", 8000)`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._up = _Direction(link)
        self._down = _Direction(link)
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def to(self, url: str) -> str:
        """Opens a way through this link to the server behind a base URL. Returns the way's own base URL."""
        host, port = urlsplit(url).hostname, urlsplit(url).port
        assert host
        assert port

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._join(reader, writer, host, port))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        self._servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Closes the link."""
        for server in self._servers:
            server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _join(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int
    ) -> None:
        await asyncio.sleep(2 * self._link.delay_s)  # the round trip of the handshake
        try:
            up_reader, up_writer = await asyncio.open_connection(host, port)
        except OSError:
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as group:
                self._carry(group, reader, up_writer, self._up)
                self._carry(group, up_reader, writer, self._down)
        except* OSError:
            pass
        finally:
            writer.transport.abort()
            up_writer.transport.abort()

    def _carry(
        self,
        group: asyncio.TaskGroup,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        way: _Direction,
    ) -> None:
        """Forwards bytes in order, each `delay_s` after the link had room for it. The end of the stream is
        also delayed."""
        under_way: deque[tuple[float, bytes]] = deque()
        arrived = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def take_in() -> None:
            data = b"-"
            while data:
                data = await reader.read(_READ_BYTES)
                await way.take(len(data))
                under_way.append((loop.time() + self._link.delay_s, data))
                arrived.set()

        async def give_out() -> None:
            while True:
                while not under_way:
                    arrived.clear()
                    await arrived.wait()
                due_s, data = under_way.popleft()
                await asyncio.sleep(due_s - loop.time())
                if not data:
                    raise ConnectionResetError("one end closed")
                writer.write(data)
                await writer.drain()

        group.create_task(take_in())
        group.create_task(give_out())

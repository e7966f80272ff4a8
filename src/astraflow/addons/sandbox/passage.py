"""The way out of a box: forwards connections from its one open port to a port of this machine.

    program --(the box's loopback)--> passage --(the machine's loopback)--> gateway

The listening socket belongs to the network of the box, so only processes of the box can connect to it.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import partial

from astraflow.service.readable import until_readable

__all__ = ["accepted", "passage"]

_log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
_MAX_CONNECTIONS = 128
"""Number of connections at the same time. Further connections wait."""
_CHUNK = 65_536
_PAUSE_S = 0.2
"""Pause after a connection that couldn't be accepted."""


@asynccontextmanager
async def passage(listener: socket.socket, port: int) -> AsyncGenerator[None]:
    """Forwards connections while the block runs, then closes them. The listener stays open."""
    listener.setblocking(False)
    serving = asyncio.create_task(_serve(listener, port))
    try:
        yield
    finally:
        serving.cancel()
        await asyncio.wait({serving})
    if not serving.cancelled():
        serving.result()


async def _serve(listener: socket.socket, port: int) -> None:
    free = asyncio.Semaphore(_MAX_CONNECTIONS)
    async with asyncio.TaskGroup() as connections:
        while True:
            await free.acquire()
            inside = await accepted(listener)
            passing = connections.create_task(_pass_on(inside, port))
            passing.add_done_callback(partial(_ended, inside, free))


async def accepted(listener: socket.socket) -> socket.socket:
    """Waits for the next connection and returns it.

    `loop.sock_accept` isn't used: if its caller is cancelled just as a connection arrives, it leaves this
    connection open, and nobody can close it.
    """
    while True:
        await until_readable(listener.fileno())
        try:
            return listener.accept()[0]
        except (BlockingIOError, ConnectionError):  # the client is already gone
            pass
        except OSError as err:  # for example, too many files are open
            _log.warning("cannot accept a connection from a box: %s", err)
            await asyncio.sleep(_PAUSE_S)


def _ended(inside: socket.socket, free: asyncio.Semaphore, _: asyncio.Task[None]) -> None:
    inside.close()  # a task that is cancelled before it begins hasn't closed it
    free.release()


async def _pass_on(inside: socket.socket, port: int) -> None:
    """Connects to the port and copies data in both directions until both connections have ended."""
    from_box, to_box = await asyncio.open_connection(sock=inside)
    async with _closing(to_box):
        try:
            from_port, to_port = await asyncio.open_connection(_LOOPBACK, port)
        except OSError:
            return
        async with _closing(to_port):
            await asyncio.gather(_copy(from_box, to_port), _copy(from_port, to_box))


@asynccontextmanager
async def _closing(connection: asyncio.StreamWriter) -> AsyncGenerator[None]:
    """Closes a connection once all written data is sent, or at once if the block is cancelled or fails."""
    try:
        yield
        connection.close()
        with contextlib.suppress(OSError):
            await connection.wait_closed()
    finally:
        connection.transport.abort()


async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    """Copies until the source ends or the sink is gone, then closes this direction of the sink."""
    with contextlib.suppress(OSError):
        while chunk := await source.read(_CHUNK):
            sink.write(chunk)
            await sink.drain()
    with contextlib.suppress(OSError):
        sink.write_eof()

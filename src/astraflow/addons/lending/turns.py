"""The turns of a service that shares its device: it asks the arbiter of the launcher for each of them.

Both sides exchange the messages of `baton.Message` over a Unix socket that keeps messages apart. The first
message is the service's name. The kernel closes the socket when the process ends, however it ends, so the
arbiter gives the device to the other tenant at once. If the arbiter is gone, a service keeps the device if it
has it, and doesn't get it otherwise.
"""

import asyncio
import logging
import socket
from pathlib import Path

from astraflow.addons.lending.baton import Message
from astraflow.errors import ServiceError
from astraflow.service.turns import Turns

__all__ = ["SharedTurns", "receive"]

_log = logging.getLogger(__name__)

_MESSAGE_BYTES = 1024
"""Largest size of a message."""


def receive(connection: socket.socket) -> str:
    """The next message; empty if the other side is gone."""
    try:
        return connection.recv(_MESSAGE_BYTES).decode()
    except OSError:
        return ""


class SharedTurns(Turns):
    """The turns of one tenant. Make it in a running event loop; it lives as long as the process."""

    def __init__(self, path: Path, name: str) -> None:
        """`path`: socket of the arbiter. `name`: of the service. Raises: ServiceError if nobody listens."""
        super().__init__()
        self._has_device = asyncio.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.connect(str(path))
            self._socket.send(name.encode())
        except OSError as err:
            self._socket.close()
            raise ServiceError(f"{name}: the arbiter of its device does not answer at {path}: {err}") from err
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    async def __aenter__(self) -> None:
        self.is_asked_back.clear()
        self._send(Message.WANT)
        try:
            await self._has_device.wait()
        except asyncio.CancelledError:  # the service ends
            self._send(Message.FREE)
            raise

    async def __aexit__(self, *error: object) -> None:
        self._has_device.clear()
        self._send(Message.FREE)

    def close(self) -> None:
        """Leaves the device to the other tenant. Does nothing the second time."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    def _send(self, message: Message) -> None:
        try:
            self._socket.send(message.encode())
        except OSError as err:
            _log.warning("the arbiter of the device is gone: %s", err)

    def _read(self) -> None:
        message = receive(self._socket)
        if message == Message.TAKE:
            self._has_device.set()
        elif message == Message.GIVE:
            self.is_asked_back.set()
        else:
            self.close()
            _log.warning("the arbiter of the device is gone; the device stays as it is")

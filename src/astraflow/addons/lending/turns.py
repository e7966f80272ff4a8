"""The turns of a service that shares its device: it asks the arbiter of the launcher for each of them.

Both sides exchange the messages of `baton.Message` over a Unix socket that keeps messages apart. The first
message is the service's name. The kernel closes the socket when the process ends, however it ends, so the
arbiter gives the device to the other tenant at once. If the arbiter is gone, a service keeps the device if it
has it, and doesn't get it otherwise.

    want -> (waits) -> take -> tenants enter -> begin -> ... -> tenants leave -> free

A turn for loading never begins: it counts as a part of the switch.

If no other service generates and all memory stays on the device, handing in episodes would gain nothing. The
rollout service then stays in its turn, and only pauses its engines while the trainer has the device.
"""

import asyncio
import inspect
import logging
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

from astraflow.addons.lending.baton import Message
from astraflow.addons.lending.shared_engine import SharedEngine
from astraflow.addons.lending.tenants import (
    PausingTenant,
    Tenant,
    make_engine_tenant,
    make_trainer_tenant,
)
from astraflow.errors import ServiceError
from astraflow.protocols import Engine, Learner
from astraflow.service.turns import MakeEngine, Turns
from astraflow.types.host_tensors import WeightSnapshot

__all__ = ["KEEP_VARIABLE", "PAUSE_VARIABLE", "SharedTurns", "receive"]

KEEP_VARIABLE = "ASTRAFLOW_DEVICE_KEEP"
"""Environment variable with the share of the device's memory that a service may keep between its turns."""

PAUSE_VARIABLE = "ASTRAFLOW_DEVICE_PAUSES"
"""Environment variable of a rollout service whose episodes nobody else can continue."""

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
    """The turns of one service. Make it in a running event loop; it lives as long as the process."""

    def __init__(self, path: Path, name: str) -> None:
        """`path`: socket of the arbiter. `name`: of the service. Raises: ServiceError if nobody listens."""
        super().__init__()
        self._keep_frac = float(os.environ.get(KEEP_VARIABLE, "1"))
        self._pauses = PAUSE_VARIABLE in os.environ and self._keeps_all
        """Whether the engines only pause, and keep their requests, while the trainer has the device."""
        self._tenants: list[Tenant] = []
        self._has_device = asyncio.Event()
        self._has_turn = asyncio.Event()
        """The service has the device, and all that it needs is there."""
        self._busy = asyncio.Lock()
        """Held while the memory of the device changes, apart from requests and steps."""
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
        await self._take()
        self._send(Message.BEGIN)

    async def __aexit__(self, *error: object) -> None:
        # After an error, the process ends. Its memory is free once the kernel has closed the socket.
        if not any(error):
            await self._free()
        elif self._keeps_all:
            self._send(Message.FREE)

    async def until_asked_back(self) -> None:
        """Returns when the turn must end. With pauses, only the end of the service ends it."""
        await self.is_asked_back.wait()
        while self._pauses:
            await self._free()
            await self._take()
            self._send(Message.BEGIN)
            await self.is_asked_back.wait()

    def to_load(self) -> AbstractAsyncContextManager[None]:
        """A turn in which a trainer loads or saves its model, unless there is always memory for that."""
        return nullcontext() if self._keeps_all else self._load_turn()

    def share_learner(self, learner: Learner) -> None:
        """Frees the learner's memory between turns. Raises: ConfigError if it can't."""
        if not self._keeps_all:
            self._tenants.append(make_trainer_tenant(learner, keep_frac=self._keep_frac))

    def share_engines(self, make_engine: MakeEngine) -> MakeEngine:
        """Makes engines during turns, and frees their memory between turns, or pauses them."""
        if self._keeps_all and not self._pauses:
            return make_engine
        return partial(self._make_engine, make_engine)

    def close(self) -> None:
        """Leaves the device to the other tenant. Does nothing the second time."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()

    @property
    def _keeps_all(self) -> bool:
        return self._keep_frac >= 1

    @asynccontextmanager
    async def _in_turn(self) -> AsyncGenerator[None]:
        """Waits for a turn, and keeps it from ending meanwhile."""
        while True:
            await self._has_turn.wait()
            async with self._busy:
                if self._has_turn.is_set():
                    yield
                    return

    @asynccontextmanager
    async def _load_turn(self) -> AsyncGenerator[None]:
        await self._take()
        try:
            yield
        finally:
            await self._free()

    async def _make_engine(self, make_engine: MakeEngine, snapshot: WeightSnapshot) -> Engine:
        async with self._in_turn():
            made = make_engine(snapshot)
            engine = await made if inspect.isawaitable(made) else made
            if self._pauses:
                self._tenants.append(PausingTenant(engine))
                return engine
            self._tenants.append(make_engine_tenant(engine, keep_frac=self._keep_frac))
        return SharedEngine(
            engine, has_turn=self._has_turn, in_turn=self._in_turn, is_ending=self.is_asked_back.is_set
        )

    async def _take(self) -> None:
        self.is_asked_back.clear()
        self._send(Message.WANT)
        try:
            await self._has_device.wait()
        except asyncio.CancelledError:  # the service ends
            self._send(Message.FREE)
            raise
        for tenant in self._tenants:
            await tenant.enter()
        self._has_turn.set()

    async def _free(self) -> None:
        async with self._busy:
            self._has_turn.clear()
            for tenant in self._tenants:
                await tenant.leave()
        self._has_device.clear()
        self._send(Message.FREE)

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

"""The turns of a service that shares its device: it asks the arbiter of the launcher for each of them.

Both sides exchange the messages of `BatonMessage` over a Unix socket that keeps messages apart. The first
message is the service's name. Each wish has a number, which its answers repeat, so a late answer isn't taken
for that to another wish. The kernel closes the socket when the process ends, however it ends, so the arbiter
gives the device to the other tenant at once.

If the arbiter is gone, a service keeps the device if it has it. A service that waits for the device ends with
the cause when the arbiter hangs up, talks nonsense, or is silent for a minute. It doesn't end while the
arbiter's process is stopped, which people do on purpose.

    want -> (waits) -> take -> tenants enter -> begin -> ... -> tenants leave -> free

A turn for loading never begins: it counts as a part of the switch.

If no other service generates and all memory stays on the device, handing in episodes would gain nothing. The
rollout service then stays in its turn, and only pauses its engines while the trainer has the device.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import socket
import struct
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

from astraflow.addons.lending.baton import BatonMessage
from astraflow.addons.lending.shared_engine import SharedEngine
from astraflow.addons.lending.tenants import (
    PausingTenant,
    Tenant,
    make_engine_tenant,
    make_trainer_tenant,
)
from astraflow.errors import ServiceError
from astraflow.processes.process_state import state_of
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
_CONNECT_S = 30.0
"""Time for the arbiter to accept the connection."""
_SILENT_S = 60.0
"""An arbiter that says nothing to a waiting service for this long counts as gone. It is asked four times."""


def receive(connection: socket.socket) -> str:
    """The next message; empty if the other side is gone."""
    try:
        return connection.recv(_MESSAGE_BYTES).decode(errors="replace")
    except OSError:
        return ""


def _peer_of(connection: socket.socket) -> int:
    """The id of the process that listens at the other end; 0 if the system doesn't say."""
    if not hasattr(socket, "SO_PEERCRED"):
        return 0
    return int(struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0])


class SharedTurns(Turns):
    """The turns of one service. Make it in a running event loop; it lives as long as the process."""

    def __init__(self, path: Path, name: str, *, silent_s: float = _SILENT_S) -> None:
        """`path`: socket of the arbiter. `name`: of the service. `silent_s`: how long the arbiter may be
        silent while the service waits. Raises: ServiceError if nobody listens."""
        super().__init__()
        self._path = path
        self._name = name
        self._silent_s = silent_s
        self._wish = 0
        """Number of the last wish for the device."""
        self._heard_s = 0.0
        """When the arbiter was last heard."""
        self._problem = ""
        """Why the arbiter can't give the device anymore; empty if it can."""
        self._is_decided = asyncio.Event()
        """The service has the device, or the arbiter is gone."""
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
        self._socket.settimeout(_CONNECT_S)
        try:
            self._socket.connect(str(path))
            # An arbiter that hung up already is noticed by the first wait.
            with contextlib.suppress(BrokenPipeError):
                self._socket.send(name.encode())
        except OSError as err:
            self._socket.close()
            raise ServiceError(f"{name}: the arbiter of its device does not answer at {path}: {err}") from err
        self._arbiter = _peer_of(self._socket)
        """Its process id; 0 if the system doesn't say."""
        self._socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    async def __aenter__(self) -> None:
        await self._take()
        self._send(BatonMessage.BEGIN)

    async def __aexit__(self, *error: object) -> None:
        # After an error, the process ends. Its memory is free once the kernel has closed the socket.
        if not any(error):
            await self._free()
        elif self._keeps_all:
            self._send(BatonMessage.FREE)

    async def until_asked_back(self) -> None:
        """Returns when the turn must end. With pauses, only the end of the service ends it."""
        await self.is_asked_back.wait()
        while self._pauses:
            await self._free()
            await self._take()
            self._send(BatonMessage.BEGIN)
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
        """Leaves the device to the other tenant, and ends waits for it. Does nothing the second time."""
        self._problem = self._problem or "is no longer connected"
        self._is_decided.set()
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
        self._has_device.clear()
        self._is_decided.clear()
        self._wish += 1
        self._send(BatonMessage.WANT)
        try:
            await self._until_it_has_the_device()
        except BaseException:  # the service ends
            self._send(BatonMessage.FREE)
            raise
        for tenant in self._tenants:
            await tenant.enter()
        self._has_turn.set()

    async def _until_it_has_the_device(self) -> None:
        """Raises: ServiceError if the arbiter is gone."""
        loop = asyncio.get_running_loop()
        self._heard_s = loop.time()
        while not (self._has_device.is_set() or self._problem):
            self._send(BatonMessage.HERE)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._silent_s / 4):
                    await self._is_decided.wait()
            if self._arbiter and state_of(self._arbiter) == "stopped":
                self._heard_s = loop.time()
            elif loop.time() - self._heard_s > self._silent_s:
                self._problem = f"has not answered for {self._silent_s:g} s"
        if not self._has_device.is_set():
            raise ServiceError(
                f"{self._name} waits for its device, but the arbiter of the device (process {self._arbiter}, "
                f"{self._path}) {self._problem}; the service has to start again"
            )

    async def _free(self) -> None:
        async with self._busy:
            self._has_turn.clear()
            for tenant in self._tenants:
                await tenant.leave()
        self._has_device.clear()
        self._send(BatonMessage.FREE)

    def _send(self, message: BatonMessage) -> None:
        try:
            self._socket.send(f"{message} {self._wish}".encode())
        except OSError as err:
            _log.warning("the arbiter of the device is gone: %s", err)

    def _read(self) -> None:
        message = receive(self._socket)
        self._heard_s = asyncio.get_running_loop().time()
        if message == f"{BatonMessage.TAKE} {self._wish}":
            self._has_device.set()
            self._is_decided.set()
        elif message == f"{BatonMessage.GIVE} {self._wish}":
            self.is_asked_back.set()
        elif message.partition(" ")[0] not in (BatonMessage.TAKE, BatonMessage.GIVE, BatonMessage.HERE):
            self._problem = f"said {message[:40]!r}, which is not a message" if message else "hung up"
            self._is_decided.set()
            self.close()
            _log.warning("the arbiter of the device %s; the device stays as it is", self._problem)

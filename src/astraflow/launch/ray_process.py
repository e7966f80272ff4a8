"""A process on a node of a Ray cluster, as the launcher sees it: through the actor that holds it."""

import asyncio
import contextlib
import importlib
import logging
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

from astraflow.launch.process_host import News
from astraflow.protocols import MACHINE_LOST, ProcessLife

__all__ = ["NodeOf", "RayProcess"]

_log = logging.getLogger(__name__)

_LATE_NEWS_S = 4.0
"""An actor that has told nothing for this long, four times as long as it takes, is named."""
_ASK_AGAIN_S = 1.0
"""Time between two questions to an actor that cannot be reached now."""
_ACTOR_GRACE_S = 2.0
"""Time for an actor to end its process, or to remove its files."""
_KILLED = -9


class NodeOf:
    """The node of an actor. Which one it is, is known once the actor has room."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._id = ""
        self.address = ""

    async def ask(self, actor: Any) -> None:
        """Waits until the actor has a node."""
        self._id, self.address = await actor.__ray_call__.remote(_node_here)

    def is_lost(self) -> bool:
        """Whether the cluster has given the node up."""
        return not any(node["NodeID"] == self._id and node["Alive"] for node in self._ray.nodes())


class RayProcess:
    """Implements `ProcessHandle` and `ShowsLife`. Follows its process from the moment it is made."""

    # size: what a handle is made of
    def __init__(self, ray: Any, actor: Any, node: NodeOf, *, pid: int, log_path: Path) -> None:
        self._ray = ray
        self._actor = actor
        self._node = node
        self._pid = pid
        self._log_path = log_path
        self._loop = asyncio.get_running_loop()
        self._life = ProcessLife()
        self._heard_s = self._loop.time()
        """When the actor has told something last."""
        self._told: set[asyncio.Future[None]] = set()
        """What the actor was told and has not done yet."""
        self._code: asyncio.Future[int] = self._loop.create_future()
        self._follower = asyncio.create_task(self._follow(), name=f"follow:{log_path.stem}")

    @property
    def pid(self) -> int:
        """Its process id on its node."""
        return self._pid

    async def wait(self) -> int:
        """Its exit code; `MACHINE_LOST` if its node is lost, and that of a kill if its actor was killed."""
        return await asyncio.shield(self._code)

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM)."""
        if not self._code.done():
            self._tell(self._actor.terminate.remote())

    def kill(self) -> None:
        """Kills it, or its actor if that does not do it."""
        if not self._code.done():
            self._tell(self._actor.kill.remote())
            self._loop.call_later(_ACTOR_GRACE_S, self._end, _KILLED)

    async def silence(self, longest_s: float) -> str:
        """As in the protocol. An actor that cannot tell has lost its node, which ends `wait`."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            what = await self._actor.silence.remote(longest_s)
            return f"on node {self._node.address}, {what}"
        return await self._loop.create_future()

    def life(self) -> ProcessLife:
        """What the actor has told last, or that it tells nothing."""
        late_s = self._loop.time() - self._heard_s
        if late_s > _LATE_NEWS_S:
            silent_s = (self._life.silent_s or 0.0) + late_s
            condition = f"its node {self._node.address} does not answer"
            return ProcessLife(silent_s, works=False, condition=condition)
        if self._life.condition:
            return replace(self._life, condition=f"on node {self._node.address}: {self._life.condition}")
        return self._life

    async def _follow(self) -> None:
        """Notes how the process ended; whatever goes wrong, `wait` returns."""
        code = _KILLED
        try:
            code = await self._last_news()
        finally:
            self._end(code)

    async def _last_news(self) -> int:
        """Takes news until there can be no more; returns the exit code."""
        errors = self._ray.exceptions
        self._write(f"--- on node {self._node.address}\n".encode())
        offset = 0
        while True:
            try:
                news: News = await self._actor.news.remote(offset)
            except errors.ActorUnavailableError:
                await asyncio.sleep(_ASK_AGAIN_S)  # the cluster will find out whether it is lost
                continue
            except errors.RayError as err:
                self._write(f"--- its actor is gone: {err}\n".encode())
                return MACHINE_LOST if self._node.is_lost() else _KILLED
            self._write(news.log)
            offset += len(news.log)
            self._life = news.life
            self._heard_s = self._loop.time()
            if news.code is not None:
                await self._clean()
                return news.code

    async def _clean(self) -> None:
        """Lets the actor remove its files."""
        with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
            async with asyncio.timeout(_ACTOR_GRACE_S):
                await self._actor.clean.remote()

    def _end(self, code: int) -> None:
        """Notes how it ended, and ends the actor. Does nothing if it has ended."""
        if self._code.done():
            return
        self._code.set_result(code)
        # Without a connection the actor has ended with it, and `kill` would start a cluster.
        if self._ray.is_initialized():
            self._ray.kill(self._actor)
        self._follower.cancel()

    def _write(self, log: bytes) -> None:
        """Into its log on this machine; a full disk must not lose the process."""
        try:
            with self._log_path.open("ab") as file:
                file.write(log)
        except OSError as err:
            _log.warning("%s cannot be written: %s", self._log_path, err)

    def _tell(self, answer: Awaitable[None]) -> None:
        async def told() -> None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                await answer

        task = asyncio.create_task(told())
        self._told.add(task)
        task.add_done_callback(self._told.discard)


def _node_here(host: object) -> tuple[str, str]:
    """Id and address of the node that this runs on. Ray calls it with the actor's object."""
    del host
    ray: Any = importlib.import_module("ray")
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

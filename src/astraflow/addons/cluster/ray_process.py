"""Handles of processes on nodes of a Ray cluster, each behind the actor that holds the process."""

import asyncio
import contextlib
import importlib
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from astraflow.addons.cluster.process_host import News
from astraflow.addons.cluster.remote_process import KILLED, RemoteProcess, Verb
from astraflow.protocols import MACHINE_LOST

__all__ = ["ActorNode", "RayProcess"]

_ASK_AGAIN_S = 1.0
"""Time between two calls of an actor that is temporarily unreachable."""
_CLEAN_S = 2.0
"""Time for an actor to remove its files."""


class ActorNode:
    """The node on which an actor runs. It is known once Ray has found room for the actor."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._id = ""
        self.address = ""

    async def wait_for(self, actor: Any) -> None:
        """Waits until the actor has a node."""
        self._id, self.address = await actor.__ray_call__.remote(_node_here)

    def is_lost(self) -> bool:
        """Checks whether the cluster considers the node dead."""
        return not any(node["NodeID"] == self._id and node["Alive"] for node in self._ray.nodes())


class RayProcess(RemoteProcess):
    """Implements `ProcessHandle` and `LifeReporter`."""

    # size: what a handle is made of
    def __init__(self, ray: Any, actor: Any, node: ActorNode, *, pid: int, log_path: Path) -> None:
        super().__init__(f"node {node.address}", pid=pid, log_path=log_path)
        self._ray = ray
        self._actor = actor
        self._node = node
        self._calls: set[asyncio.Future[None]] = set()
        """Calls of the actor that are under way. Without a reference, a task may be garbage-collected."""

    async def silence(self, longest_s: float) -> str:
        """See the protocol. If the actor can't report the silence, its node is lost, which ends `wait`."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            what = await self._actor.silence.remote(longest_s)
            return f"on {self._place}, {what}"
        return await self._loop.create_future()

    async def _follow_news(self) -> int:
        errors = self._ray.exceptions
        offset = 0
        while True:
            try:
                news: News = await self._actor.news.remote(offset)
            except errors.ActorUnavailableError:
                await asyncio.sleep(_ASK_AGAIN_S)  # Ray decides whether the actor is lost
                continue
            except errors.RayError as err:
                self._write(f"--- its actor is gone: {err}\n".encode())
                return MACHINE_LOST if self._node.is_lost() else KILLED
            self._write(news.log)
            offset += len(news.log)
            self._note_life(news.life)
            if news.code is not None:
                await self._clean()
                return news.code

    async def _clean(self) -> None:
        """Has the actor remove its files."""
        with contextlib.suppress(TimeoutError, self._ray.exceptions.RayError):
            async with asyncio.timeout(_CLEAN_S):
                await self._actor.clean.remote()

    def _signal(self, verb: Verb) -> None:
        methods = {"terminate": self._actor.terminate, "kill": self._actor.kill}
        task = asyncio.create_task(self._call(methods[verb].remote()))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _call(self, answer: Awaitable[None]) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):
            await answer

    def _release(self) -> None:
        # If the connection has ended, so has the actor, and `kill` would start a new cluster.
        if self._ray.is_initialized():
            self._ray.kill(self._actor)


def _node_here(host: object) -> tuple[str, str]:
    """Returns the id and the address of the node on which this runs. Ray calls it with the actor's object."""
    del host
    ray: Any = importlib.import_module("ray")
    return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

"""Keeps a rollout service registered with the dataflow, and registers it again if the dataflow forgets it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from astraflow.errors import RefusedError
from astraflow.service.worker_ids import handle_of
from astraflow.types import (
    EarlierProgress,
    EpisodeResults,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    ProgressReply,
    ProgressReport,
    PushTasks,
    PushTasksReply,
    Receipts,
    RegisterWorker,
    Registration,
    VersionsReply,
)

__all__ = ["Membership", "WorkerLink"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_UNKNOWN = "unknown_worker"
"""Error code for a service that the dataflow has dropped, or lost in a restart."""


class WorkerLink(Protocol):
    """How a rollout service calls the dataflow; `dataflow.client` implements it over HTTP or in memory.

    Each call is retried until the dataflow answers. It raises UnavailableError if no answer comes in time,
    and RefusedError if the dataflow refuses the request.
    """

    async def register(self, request: RegisterWorker) -> Registration: ...

    async def heartbeat(self, worker_id: str, beat: Heartbeat) -> HeartbeatReply: ...

    async def drain(self, worker_id: str) -> None: ...

    async def leases(self, request: LeaseRequest) -> LeaseReply: ...

    async def episodes(self, results: EpisodeResults) -> Receipts: ...

    async def tell_progress(self, worker_id: str, report: ProgressReport) -> ProgressReply: ...

    async def earlier_progress(self, worker_id: str, lease_id: str) -> EarlierProgress: ...

    async def push_tasks(self, tasks: PushTasks) -> PushTasksReply: ...

    async def versions(self, policy: str, *, after: int, wait_s: float = 25.0) -> VersionsReply: ...


class Membership:
    """Holds the registration, and makes requests with its id.

    Example: `await membership.call(lambda worker_id: link.drain(worker_id))`.
    """

    def __init__(self, link: WorkerLink, request: RegisterWorker) -> None:
        self._link = link
        self._request = request
        self._registration: Registration | None = None
        """None before the first registration, and while the service registers again."""
        self._lock = asyncio.Lock()
        self._heard_at_s = time.monotonic()

    @property
    def peer_url(self) -> str:
        """The URL at which the service offers weights to others; empty if it does not."""
        return self._request.peer_url

    @property
    def silence_s(self) -> float:
        """Seconds since the dataflow last answered."""
        return time.monotonic() - self._heard_at_s

    async def join(self) -> Registration:
        """Registers, unless the service is already registered.

        Raises: RefusedError, which names what does not match the run; UnavailableError if the dataflow does
        not answer.
        """
        async with self._lock:
            if self._registration is None:
                self._registration = await self._link.register(self._request)
                _log.info("registered as %s", handle_of(self._registration.worker_id))
            return self._registration

    async def call(self, request: Callable[[str], Awaitable[_T]]) -> _T:
        """Makes a request with the current id.

        If the dataflow does not know the id, the service registers again and repeats the request once.
        """
        registration = await self.join()
        try:
            reply = await request(registration.worker_id)
            self._heard_at_s = time.monotonic()
            return reply
        except RefusedError as err:
            if err.code != _UNKNOWN:
                raise
        _log.warning("the dataflow does not know %s; registering again", handle_of(registration.worker_id))
        if self._registration is registration:  # no other call has registered again meanwhile
            self._registration = None
        return await request((await self.join()).worker_id)

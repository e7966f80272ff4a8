"""Soft state of rollout services: heartbeats, lease deadlines, load. It is not journaled.

It is passive, and time is an argument: it says which leases and services are overdue and when to look again,
and `DataflowService` turns that into commands. After a restart every live lease and service gets a new
deadline.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field

from astraflow.types import Load, ServedVersions

__all__ = ["Liveness", "WorkerLife"]

_WORKER_GRACE = 1.5
"""A service is dropped after this many lease timeouts of silence, so its leases are overdue before."""
MAX_WORKERS = 10_000
"""Services that may be known at a time, so that nobody with a token can fill the memory by registering."""
_MAX_LEFT = 10_000
"""Services that drained and are still remembered."""


@dataclass(slots=True)
class WorkerLife:
    """What is known of one rollout service. `id` is its handle, without the secret."""

    id: str
    name: str
    engine: str
    hosts: tuple[str, ...]
    last_seen_s: float
    load: Load = field(default_factory=Load)
    served: tuple[ServedVersions, ...] = ()
    """From its last request for leases or heartbeat, whichever is newer."""
    peer_url: str = ""
    """Where it serves the weights that it has; empty if it does not."""
    is_draining: bool = False
    was_told_the_end: bool = False
    """An answer to it said that the run is over."""
    newest_ask: object | None = None
    """Its newest request for leases."""


class Liveness:
    """Deadlines of leases and services, by the loop's clock."""

    def __init__(self, lease_timeout_s: float, *, max_workers: int = MAX_WORKERS) -> None:
        self.max_workers = max_workers
        self.timeout_s = lease_timeout_s
        self._workers: dict[str, WorkerLife] = {}
        self._leases: dict[str, float] = {}
        """Lease -> deadline."""
        self._left: dict[str, None] = {}
        """Services that drained, in the order in which they left."""
        self.farewells_moved = asyncio.Event()
        """Set when `all_know_the_end` may have changed."""

    # --- services ---

    def add(self, worker: WorkerLife) -> None:
        """Adds a service that joined, or that was there before a restart."""
        self._workers[worker.id] = worker

    def drop(self, worker_id: str) -> None:
        """Removes a service that vanished or left. One that drained is remembered for its last heartbeats."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None and worker.is_draining:
            self._left[worker_id] = None
        if len(self._left) > _MAX_LEFT:
            del self._left[next(iter(self._left))]
        self.farewells_moved.set()

    def worker(self, worker_id: str) -> WorkerLife | None:
        """The service, if it is known and has not left."""
        return self._workers.get(worker_id)

    def has_left(self, worker_id: str) -> bool:
        """Whether a service of this id drained and left since the last restart."""
        return worker_id in self._left

    @property
    def is_full(self) -> bool:
        """Whether one more service can join only in the place of another."""
        return len(self._workers) >= self.max_workers

    def most_silent(self) -> WorkerLife:
        """The service that was heard of longest ago."""
        return min(self._workers.values(), key=lambda worker: worker.last_seen_s)

    def workers(self) -> tuple[WorkerLife, ...]:
        """All services, in the order in which they joined."""
        return tuple(self._workers.values())

    def tell_the_end(self, worker_id: str) -> None:
        """Notes that the service is being told that the run is over."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.was_told_the_end = True
            self.farewells_moved.set()

    @property
    def all_know_the_end(self) -> bool:
        """Whether no service is left that must still hear that the run is over."""
        return all(worker.was_told_the_end for worker in self._workers.values())

    # --- deadlines ---

    def grant(self, lease_ids: Iterable[str], now_s: float) -> None:
        """Starts the deadlines of leases that are new, or were alive before a restart."""
        for lease_id in lease_ids:
            self._leases[lease_id] = now_s + self.timeout_s

    def end(self, lease_ids: Iterable[str]) -> None:
        """Ends the deadlines of leases that have a result, or were issued again."""
        for lease_id in lease_ids:
            self._leases.pop(lease_id, None)

    def seen(self, worker_id: str, now_s: float) -> None:
        """Notes a request of the service."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.last_seen_s = now_s

    def beat(self, worker_id: str, lease_ids: Iterable[str], load: Load, now_s: float) -> None:
        """Notes a heartbeat: the service is working on these leases."""
        worker = self._workers[worker_id]
        worker.last_seen_s = now_s
        worker.load = load
        worker.served = load.versions or worker.served
        self.grant((lease_id for lease_id in lease_ids if lease_id in self._leases), now_s)

    def overdue_leases(self, now_s: float) -> tuple[str, ...]:
        """Leases that have had no heartbeat for the timeout."""
        return tuple(lease_id for lease_id, deadline in self._leases.items() if deadline <= now_s)

    def overdue_workers(self, now_s: float) -> tuple[str, ...]:
        """Services silent for longer than the grace."""
        grace_s = self.timeout_s * _WORKER_GRACE
        workers = self._workers.values()
        return tuple(worker.id for worker in workers if worker.last_seen_s + grace_s <= now_s)

    def next_deadline_s(self) -> float:
        """When something may be overdue next; infinity if nothing is watched."""
        workers = [worker.last_seen_s + self.timeout_s * _WORKER_GRACE for worker in self._workers.values()]
        return min((*self._leases.values(), *workers), default=float("inf"))

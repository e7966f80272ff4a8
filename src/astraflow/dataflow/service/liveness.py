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

_MISSED_BEATS = 2
"""A service that has missed more heartbeats than this is silent."""
_WORKER_GRACE = 1.5
"""A service is dropped after this many lease timeouts of silence, so its leases are overdue before."""
_LATE_BEAT_S = 1.0
"""How late the last heartbeat may be."""
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
    address: str = ""
    """The network address that it joined from; empty if it is not known."""
    is_draining: bool = False
    is_noted_silent: bool = False
    """Its silence was reported by `newly_silent`, and it has not been heard since."""
    was_told_the_end: bool = False
    """An answer to it said that the run is over."""
    newest_ask: object | None = None
    """Its newest request for leases."""


class Liveness:
    """Deadlines of leases and services, by the loop's clock."""

    def __init__(
        self, lease_timeout_s: float, *, heartbeat_s: float = 2.0, max_workers: int = MAX_WORKERS
    ) -> None:
        self.max_workers = max_workers
        self.silent_after_s = _MISSED_BEATS * heartbeat_s + _LATE_BEAT_S
        """A service is silent after this time without a sign of life."""
        self.timeout_s = lease_timeout_s
        self._heartbeat_s = heartbeat_s
        self._workers: dict[str, WorkerLife] = {}
        self._newest: dict[tuple[str, str], str] = {}
        """(name, address) -> the service that joined last under this name from there. Address "": from
        anywhere; that replaces services from before a restart, whose addresses are not known."""
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
        if worker.address:
            self._newest[worker.name, worker.address] = worker.id
            self._newest[worker.name, ""] = worker.id

    def drop(self, worker_id: str) -> None:
        """Removes a service that vanished or left. One that drained is remembered for its last heartbeats."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None:
            for key in ((worker.name, worker.address), (worker.name, "")):
                if self._newest.get(key) == worker_id:
                    del self._newest[key]
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

    def silent(self, now_s: float) -> tuple[WorkerLife, ...]:
        """Services that have missed their heartbeats."""
        return tuple(w for w in self._workers.values() if w.last_seen_s + self.silent_after_s <= now_s)

    def newly_silent(self, now_s: float) -> tuple[WorkerLife, ...]:
        """Services whose silence has not been reported since they were heard last."""
        found = tuple(worker for worker in self.silent(now_s) if not worker.is_noted_silent)
        for worker in found:
            worker.is_noted_silent = True
        return found

    def next_silence_s(self) -> float:
        """When to look for silent services next; infinity if nothing is watched.

        It is one heartbeat after the first one's silence: services that stop together fall silent one by one
        during that time, and are found together.
        """
        heard = [worker.last_seen_s for worker in self._workers.values() if not worker.is_noted_silent]
        return min(heard, default=float("inf")) + self.silent_after_s + self._heartbeat_s

    def _grace_s(self, worker: WorkerLife) -> float:
        """How long a service may be silent before it is dropped.

        A service that was killed joins again under the same name, from the same address. The earlier one is
        then dropped as soon as it is silent, so that its leases go out again, and nobody sees it twice.
        """
        newest = self._newest.get((worker.name, worker.address), worker.id)
        is_replaced = newest != worker.id
        grace_s = self.timeout_s * _WORKER_GRACE
        return min(self.silent_after_s, grace_s) if is_replaced else grace_s

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
            worker.is_noted_silent = False

    def beat(self, worker_id: str, lease_ids: Iterable[str], load: Load, now_s: float) -> None:
        """Notes a heartbeat: the service is working on these leases."""
        self.seen(worker_id, now_s)
        worker = self._workers[worker_id]
        worker.load = load
        worker.served = load.versions or worker.served
        self.grant((lease_id for lease_id in lease_ids if lease_id in self._leases), now_s)

    def overdue_leases(self, now_s: float) -> tuple[str, ...]:
        """Leases that have had no heartbeat for the timeout."""
        return tuple(lease_id for lease_id, deadline in self._leases.items() if deadline <= now_s)

    def overdue_workers(self, now_s: float) -> tuple[str, ...]:
        """Services silent for longer than their grace."""
        workers = self._workers.values()
        return tuple(w.id for w in workers if w.last_seen_s + self._grace_s(w) <= now_s)

    def next_deadline_s(self) -> float:
        """When to look for what is overdue next; infinity if nothing is watched.

        As in `next_silence_s`, services are looked for one heartbeat late, and so are found together.
        """
        late_s = self._heartbeat_s
        workers = [worker.last_seen_s + self._grace_s(worker) + late_s for worker in self._workers.values()]
        return min((*self._leases.values(), *workers), default=float("inf"))

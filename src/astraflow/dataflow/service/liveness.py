"""Soft state of rollout services: heartbeats, lease deadlines, load. It is not journaled.

Passive: time is an argument. It says which leases and services are overdue, and when to check again;
`DataflowService` turns that into commands. After a restart, every live lease and service gets a new deadline.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile

from astraflow.types import Load, ServedVersions

__all__ = ["Liveness", "WorkerLife"]

_MISSED_BEATS = 2
"""A service is silent after it has missed more heartbeats than this."""
_WORKER_GRACE = 1.5
"""A service is dropped after this many lease timeouts of silence. By then its leases have expired."""
_LATE_BEAT_S = 1.0
"""Delay that a heartbeat may have."""
_BEATS_PER_S = 500.0
"""With more services than send this many heartbeats per second, those that join get a longer interval."""
_BEATS_PER_LEASE = 4.0
"""Fewest heartbeats within a lease's timeout."""
_MAX_LEFT = 100_000
"""Most drained services that are still remembered."""


@dataclass(slots=True)
class WorkerLife:
    """What is known of one rollout service. `id` is its handle, without the secret."""

    id: str
    name: str
    engine: str
    hosts: tuple[str, ...]
    last_seen_s: float
    heartbeat_s: float = 0.0
    """Interval of its heartbeats, as it was told when it joined."""
    load: Load = field(default_factory=Load)
    served: tuple[ServedVersions, ...] = ()
    """From its last request for leases or heartbeat, whichever is newer."""
    peer_url: str = ""
    """Where it serves its weights to other services; empty if it doesn't."""
    address: str = ""
    """The network address from which it joined; empty if unknown."""
    is_replaced: bool = False
    """Whether a service with the same name and address has joined since."""
    is_draining: bool = False
    is_noted_silent: bool = False
    """Whether `newly_silent` has reported its current silence."""
    was_told_the_end: bool = False
    """Whether a reply told it that the run is over."""
    newest_request: object | None = None
    """Its newest request for leases."""


class Liveness:
    """Deadlines of leases and services, on the event loop's clock."""

    def __init__(self, lease_timeout_s: float, *, heartbeat_s: float = 2.0) -> None:
        self.max_workers = 100_000
        """Most services that can be registered at a time, so that nobody with a token can fill the memory."""
        self.timeout_s = lease_timeout_s
        self._heartbeat_s = min(heartbeat_s, lease_timeout_s / _BEATS_PER_LEASE)
        self._workers: dict[str, WorkerLife] = {}
        self._replaceable: dict[tuple[str, str], list[WorkerLife]] = {}
        """(name, address) -> services that the next one with this name and address replaces."""
        self._leases = OrderedDict[str, float]()
        """Lease -> deadline, the earliest first: all of them have the same timeout."""
        self._left: dict[str, None] = {}
        """Drained services, in the order in which they left."""
        self.farewells_changed = asyncio.Event()
        """Set when `all_know_the_end` may have changed."""

    def add(self, worker: WorkerLife) -> bool:
        """Adds a service that joined, or that the journal knows from before a restart.

        Returns whether it replaces another one. A service that was killed joins again with the same name and
        address. Addresses from before a restart of the dataflow are unknown, so the name must be enough.
        """
        self._workers[worker.id] = worker
        worker.heartbeat_s = self.interval_s
        addresses = (worker.address, "") if worker.address else ()
        replaced = [each for a in addresses for each in self._replaceable.pop((worker.name, a), ())]
        for former in replaced:
            former.is_replaced = True
        self._replaceable.setdefault((worker.name, worker.address), []).append(worker)
        return bool(replaced)

    def drop(self, worker_id: str) -> None:
        """Removes a service that vanished or left. A drained one is remembered for its last heartbeats."""
        worker = self._workers.pop(worker_id, None)
        if worker is not None and not worker.is_replaced:
            key = (worker.name, worker.address)
            self._replaceable[key].remove(worker)
            if not self._replaceable[key]:
                del self._replaceable[key]
        if worker is not None and worker.is_draining:
            self._left[worker_id] = None
        if len(self._left) > _MAX_LEFT:
            del self._left[next(iter(self._left))]
        self.farewells_changed.set()

    def worker(self, worker_id: str) -> WorkerLife | None:
        """The service, if it is known and has not left."""
        return self._workers.get(worker_id)

    def has_left(self, worker_id: str) -> bool:
        """Whether a service with this id has drained and left since the last restart."""
        return worker_id in self._left

    @property
    def interval_s(self) -> float:
        """Interval of heartbeats for a service that joins now."""
        wanted_s = min(len(self._workers) / _BEATS_PER_S, self.timeout_s / _BEATS_PER_LEASE)
        return max(self._heartbeat_s, wanted_s)

    @property
    def is_full(self) -> bool:
        """Whether another service can join only in place of an existing one."""
        return len(self._workers) >= self.max_workers

    def workers(self) -> tuple[WorkerLife, ...]:
        """All services, in the order in which they joined."""
        return tuple(self._workers.values())

    def note_end_told(self, worker_id: str) -> None:
        """Notes that the service gets a reply that says that the run is over."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.was_told_the_end = True
            self.farewells_changed.set()

    @property
    def all_know_the_end(self) -> bool:
        """Whether every service has been told that the run is over."""
        return all(worker.was_told_the_end for worker in self._workers.values())

    def silent(self, now_s: float) -> tuple[WorkerLife, ...]:
        """Services that have missed their heartbeats."""
        return tuple(w for w in self._workers.values() if _silent_from_s(w) <= now_s)

    def newly_silent(self, now_s: float) -> tuple[WorkerLife, ...]:
        """Silent services that this method has not returned since their last sign of life."""
        workers = tuple(worker for worker in self.silent(now_s) if not worker.is_noted_silent)
        for worker in workers:
            worker.is_noted_silent = True
        return workers

    def next_silence_s(self) -> float:
        """When to check for silent services next; infinity if there are none to check.

        That is one interval after the first service falls silent: services that stop at the same time fall
        silent one by one within an interval, and one message should name them all.
        """
        heard = [_silent_from_s(worker) for worker in self._workers.values() if not worker.is_noted_silent]
        return min(heard, default=float("inf")) + self.interval_s

    def _drop_at_s(self, worker: WorkerLife) -> float:
        """When a service is dropped unless it gives another sign of life. One that was replaced is dropped as
        soon as it is silent, so that its leases are reissued and it is listed only once."""
        drop_at_s = worker.last_seen_s + self.timeout_s * _WORKER_GRACE
        return min(_silent_from_s(worker), drop_at_s) if worker.is_replaced else drop_at_s

    def grant(self, lease_ids: Iterable[str], now_s: float) -> None:
        """Starts the deadlines of leases that are new, or that were live before a restart."""
        for lease_id in lease_ids:
            self._leases[lease_id] = now_s + self.timeout_s
            self._leases.move_to_end(lease_id)

    def end(self, lease_ids: Iterable[str]) -> None:
        """Ends the deadlines of leases that have a result, or that were reissued."""
        for lease_id in lease_ids:
            self._leases.pop(lease_id, None)

    def note_seen(self, worker_id: str, now_s: float) -> None:
        """Notes a request of the service."""
        if (worker := self._workers.get(worker_id)) is not None:
            worker.last_seen_s = now_s
            worker.is_noted_silent = False

    def note_beat(self, worker_id: str, lease_ids: Iterable[str], load: Load, now_s: float) -> None:
        """Notes a heartbeat: the service is working on these leases."""
        self.note_seen(worker_id, now_s)
        worker = self._workers[worker_id]
        worker.load = load
        worker.served = load.versions or worker.served
        self.grant((lease_id for lease_id in lease_ids if lease_id in self._leases), now_s)

    def overdue_leases(self, now_s: float) -> tuple[str, ...]:
        """Leases without a heartbeat for the lease timeout."""
        return tuple(id_ for id_, _ in takewhile(lambda item: item[1] <= now_s, self._leases.items()))

    def overdue_workers(self, now_s: float) -> tuple[str, ...]:
        """Services that have been silent for longer than their grace."""
        return tuple(w.id for w in self._workers.values() if self._drop_at_s(w) <= now_s)

    def next_deadline_s(self) -> float:
        """When to check for overdue leases and services next; infinity if there are none to check.

        As in `next_silence_s`, the check of services is one interval late, so that it finds them together.
        That of leases is as late as the interval has grown.
        """
        late_s = self.interval_s
        leases_s = next(iter(self._leases.values()), float("inf")) - self._heartbeat_s
        workers_s = min(map(self._drop_at_s, self._workers.values()), default=float("inf"))
        return min(leases_s, workers_s) + late_s


def _silent_from_s(worker: WorkerLife) -> float:
    """When a service is silent unless it gives another sign of life."""
    return worker.last_seen_s + _MISSED_BEATS * worker.heartbeat_s + _LATE_BEAT_S

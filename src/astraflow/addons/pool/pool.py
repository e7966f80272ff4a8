"""The rollout services of a run whose pool sizes itself: carries out what `PoolSizer` decides.

A started service is one more process of the supervisor. A service that has to leave is retired, so that the
supervisor doesn't restart it. The dataflow asks it to leave; it then finishes its episodes and ends. If that
takes longer than `cluster.pool.drain_s`, the service is terminated, and later killed. Its unfinished episodes
are leased to other services, so no episode is lost.

Each decision is a line of `pool.jsonl` in the run folder, with the advice that led to it. A resumed run
starts with the services of the last line. The journal records when each service joined and left.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from astraflow.addons.pool.pool_sizer import Change, PoolSizer, SeatState
from astraflow.processes.pool import Look, Pool, seats_of
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder, set_aside, write_atomic
from astraflow.types import Item, ScalingAdvice, StatusReply

__all__ = ["PoolDecision", "SizedPool"]

_log = logging.getLogger(__name__)

_KILL_AFTER_S = 10.0
"""Time from a service's termination until it is killed. The service itself gives its episodes 2 s."""


class PoolDecision(Item, frozen=True, kw_only=True):
    """A line of `pool.jsonl`."""

    at_s: float
    """Unix time."""
    why: str
    services: tuple[str, ...]
    """The pool's services after the decision."""
    started: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    advice: ScalingAdvice = ScalingAdvice()
    """The dataflow's advice at that time."""


@dataclass(slots=True)
class _Leaving:
    """A service that has to leave."""

    since_s: float
    """Unix time of the decision."""
    is_terminated: bool = False
    """Whether the service was told to stop at once."""


class SizedPool(Pool):
    """Starts and stops the services of a pool. Example: `SizedPool(recipe, folder, specs)`.

    `specs`: all processes of the run, including every service that the pool may ever have.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        specs: Sequence[ProcessSpec],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = recipe.cluster
        self._folder = folder
        self._clock = clock
        self._sizer = PoolSizer(recipe.cluster)
        names = [seat.name for seat in seats_of(recipe.cluster)]
        self._specs = {spec.name: spec for spec in specs if spec.name in names}
        self._leaving: dict[str, _Leaving] = {}
        earlier, self._note = _read_whole_lines(folder)
        # The recipe may have changed since then, and no longer have room for all of these services.
        before = [name for name in earlier[-1].services if name in self._specs] if earlier else []
        self._services = before[: self._cluster.max_services] or list(
            self._sizer.choose_first(recipe.rollout.services)
        )
        super().__init__(
            [spec for spec in specs if spec.name not in self._specs or spec.name in self._services]
        )
        self._last = ""

    @property
    def text(self) -> str:
        """The pool's size, and the last decision with its reason."""
        bounds = f"{self._cluster.min_services} to {self._cluster.max_services}"
        size = f"{len(self._services)} rollout services of {bounds}"
        leaving = f", {len(self._leaving)} finish their episodes" if self._leaving else ""
        return f"{size}{leaving}{f'; {self._last}' if self._last else ''}"

    def look(self, status: StatusReply, supervisor: Supervisor) -> Look:
        """Makes at most one decision, and starts and stops processes. Returns: what is left to the caller."""
        if status.state != "running":
            return Look()
        if self._note:
            look = Look(note=self._note)
            self._note = ""
            return look
        # Somebody else may have retired a service; the pool may start it again.
        running = {service.name for service in supervisor.states}
        self._services = [name for name in self._services if name in running]
        asked = self._end_leaving(status, supervisor)
        change = self._sizer.decide(self._clock(), status.scaling, self._states(status, supervisor))
        if change is None:
            return Look(asked_to_leave=asked)
        for name in change.stop:
            supervisor.retire(name)
            self._leaving[name] = _Leaving(self._clock())
        for name in change.start:
            supervisor.add(self._specs[name])
        return Look(self._record(change, status.scaling), asked)

    def _states(self, status: StatusReply, supervisor: Supervisor) -> dict[str, SeatState]:
        """The state of each service that the supervisor has."""
        members = {worker.name for worker in status.workers if not worker.is_draining}
        states: dict[str, SeatState] = {}
        for service in supervisor.states:
            if service.name in self._leaving:
                states[service.name] = "leaving"
            elif service.name in self._specs:
                is_working = service.state == "running" and service.name in members
                states[service.name] = "working" if is_working else "starting"
        return states

    def _end_leaving(self, status: StatusReply, supervisor: Supervisor) -> tuple[str, ...]:
        """Terminates and kills services that take too long to leave.

        Returns: the handles of the services that the dataflow hasn't asked to leave yet.
        """
        running = {service.name for service in supervisor.states}
        self._leaving = {name: leaving for name, leaving in self._leaving.items() if name in running}
        handles = {worker.name: worker.id for worker in status.workers if not worker.is_draining}
        members = {worker.name for worker in status.workers}
        for name, leaving in self._leaving.items():
            passed_s = self._clock() - leaving.since_s
            if passed_s > self._cluster.pool.drain_s + _KILL_AFTER_S:
                supervisor.kill(name)
            # A service that hasn't joined has no episodes to finish, and the dataflow can't reach it.
            elif not leaving.is_terminated and (passed_s > self._cluster.pool.drain_s or name not in members):
                leaving.is_terminated = True
                supervisor.terminate(name)
        return tuple(handles[name] for name in self._leaving if name in handles)

    def _record(self, change: Change, advice: ScalingAdvice) -> str:
        """Records a decision. Returns: the decision in words."""
        before = len(self._services)
        self._services = [name for name in self._services if name not in change.stop]
        self._services += change.start
        parts = [f"{', '.join(change.start)} started"] if change.start else []
        parts += [f"{', '.join(change.stop)} asked to leave"] if change.stop else []
        text = f"{before} -> {len(self._services)} rollout services ({'; '.join(parts)}): {change.why}"
        now_s = self._clock()
        self._last = f"{time.strftime('%H:%M:%S', time.localtime(now_s))} {text}"
        _log.info("pool: %s", text)
        self._append(
            PoolDecision(
                at_s=now_s,
                why=change.why,
                services=tuple(self._services),
                started=change.start,
                stopped=change.stop,
                advice=advice,
            )
        )
        return f"pool: {text}"

    def _append(self, decision: PoolDecision) -> None:
        """Appends a line. A full disk doesn't end the run: the decision is in the launcher's log, too."""
        try:
            with self._folder.pool.open("ab") as file:
                file.write(msgspec.json.encode(decision) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as err:
            _log.warning("%s cannot be written: %s", self._folder.pool, err)


def _read_whole_lines(folder: RunFolder) -> tuple[list[PoolDecision], str]:
    """Reads the decisions so far, and removes a last line that a crash cut short. If another line is damaged,
    sets the file aside. Returns: the decisions, and what was set aside and why."""
    lines = folder.pool.read_bytes().splitlines(keepends=True) if folder.pool.is_file() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        write_atomic(folder.pool, b"".join(lines))
    decisions: list[PoolDecision] = []
    for number, line in enumerate(lines, start=1):
        try:
            decisions.append(msgspec.json.decode(line, type=PoolDecision))
        except ValueError as err:
            what = f"{folder.pool}: line {number} is not a decision of the pool: {err}"
            return decisions, set_aside(folder.pool, what)
    return decisions, ""

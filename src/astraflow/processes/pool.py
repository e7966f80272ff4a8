"""The rollout services of a run whose pool sizes itself: carries out what the sizer decides.

A service that is started is one more process of the supervisor. One that has to go is retired, so that nobody
starts it again; the dataflow is asked to let it leave, and it finishes its episodes and ends. If that takes
longer than `cluster.pool.drain_s`, it is told to stop, and later killed: what it has not finished is leased
again. So nothing is lost either way.

Every decision is a line of `pool.jsonl` in the run folder, with the advice that led to it; a run that is
resumed has the services that it had. The journal has when each service joined and left.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from astraflow.errors import DataError
from astraflow.processes.pool_sizer import Change, PoolSizer, SeatState, seats_of
from astraflow.processes.supervisor import Supervisor
from astraflow.protocols import ProcessSpec
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.run_folder import RunFolder, write_atomic
from astraflow.types import Item, ScalingAdvice, StatusReply

__all__ = ["Look", "Pool", "PoolDecision"]

_log = logging.getLogger(__name__)

_KILL_AFTER_S = 10.0
"""Time for a service to end after it was told to stop; it gives its episodes 2 s."""


class PoolDecision(Item, frozen=True, kw_only=True):
    """A line of `pool.jsonl`."""

    at_s: float
    """Unix time."""
    why: str
    services: tuple[str, ...]
    """The services that the pool has from then on."""
    started: tuple[str, ...] = ()
    stopped: tuple[str, ...] = ()
    advice: ScalingAdvice = ScalingAdvice()
    """What the dataflow had advised."""


@dataclass(frozen=True, slots=True)
class Look:
    """What there is to say and to ask after a look at the pool."""

    note: str = ""
    """A decision, in words; empty if there was none."""
    asked_to_leave: tuple[str, ...] = ()
    """Handles of the services that the dataflow has to let go."""


@dataclass(slots=True)
class _Leaving:
    """A service that has to go."""

    since_s: float
    is_told: bool = False
    """Whether it was told to stop."""


class Pool:
    """Example: `pool = Pool(recipe, folder, specs)`; start `pool.first_specs`, then `pool.look(status,
    supervisor)` now and then.

    `specs` are all processes of the run, with all services that the pool may have.
    Raises: DataError if `pool.jsonl` cannot be read.
    """

    def __init__(
        self,
        recipe: Recipe,
        folder: RunFolder,
        specs: Sequence[ProcessSpec],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._cluster = recipe.cluster
        self._folder = folder
        self._clock = clock
        self._sizer = PoolSizer(recipe.cluster)
        names = [seat.name for seat in seats_of(recipe.cluster)]
        self._specs = {spec.name: spec for spec in specs if spec.name in names}
        self._leaving: dict[str, _Leaving] = {}
        earlier = _read_whole_lines(folder)
        # The recipe may have changed: what it does not have any more is left out.
        before = [name for name in earlier[-1].services if name in self._specs] if earlier else []
        most = recipe.cluster.max_services
        self._asked_for = before[:most] or list(self._sizer.first(recipe.rollout.services))
        self.first_specs = tuple(
            spec for spec in specs if spec.name not in self._specs or spec.name in self._asked_for
        )
        """The processes that the run starts with."""
        self._last = ""

    @property
    def text(self) -> str:
        """How many services there are, and why that changed last, in words."""
        least = self._cluster.min_services
        most = self._cluster.max_services
        size = f"{len(self._asked_for)} rollout services of {least} to {most}"
        leaving = f", {len(self._leaving)} finish their episodes" if self._leaving else ""
        return f"{size}{leaving}{f'; {self._last}' if self._last else ''}"

    def look(self, status: StatusReply, supervisor: Supervisor) -> Look:
        """Decides, starts and ends processes; returns what is left to do."""
        if status.state != "running":
            return Look()
        asked = self._let_go(status, supervisor)
        change = self._sizer.decide(self._clock(), status.scaling, self._states(status, supervisor))
        if change is None:
            return Look(asked_to_leave=asked)
        for name in change.stop:
            supervisor.retire(name)
            self._leaving[name] = _Leaving(self._clock())
        for name in change.start:
            supervisor.add(self._specs[name])
        return Look(self._noted(change, status.scaling), asked)

    def _states(self, status: StatusReply, supervisor: Supervisor) -> dict[str, SeatState]:
        """How each service is that the run has now."""
        joined = {worker.name for worker in status.workers if not worker.is_draining}
        found: dict[str, SeatState] = {}
        for service in supervisor.states:
            if service.name in self._leaving:
                found[service.name] = "leaving"
            elif service.name in self._specs:
                is_at_work = service.state == "running" and service.name in joined
                found[service.name] = "working" if is_at_work else "starting"
        return found

    def _let_go(self, status: StatusReply, supervisor: Supervisor) -> tuple[str, ...]:
        """Follows the services that have to go; returns the handles of those that do not know it yet."""
        running = {service.name for service in supervisor.states}
        self._leaving = {name: leaving for name, leaving in self._leaving.items() if name in running}
        handles = {worker.name: worker.id for worker in status.workers if not worker.is_draining}
        joined = {worker.name for worker in status.workers}
        for name, leaving in self._leaving.items():
            passed_s = self._clock() - leaving.since_s
            if passed_s > self._cluster.pool.drain_s + _KILL_AFTER_S:
                supervisor.kill(name)
            elif not leaving.is_told and (passed_s > self._cluster.pool.drain_s or name not in joined):
                leaving.is_told = True
                supervisor.terminate(name)
        return tuple(handles[name] for name in self._leaving if name in handles)

    def _noted(self, change: Change, advice: ScalingAdvice) -> str:
        """Records a decision; returns it in words."""
        before = len(self._asked_for)
        self._asked_for = [name for name in self._asked_for if name not in change.stop]
        self._asked_for += change.start
        parts = [f"{', '.join(change.start)} started"] if change.start else []
        parts += [f"{', '.join(change.stop)} asked to leave"] if change.stop else []
        text = f"{before} -> {len(self._asked_for)} rollout services ({'; '.join(parts)}): {change.why}"
        now_s = self._clock()
        self._last = f"{time.strftime('%H:%M:%S', time.localtime(now_s))} {text}"
        _log.info("pool: %s", text)
        self._append(
            PoolDecision(
                at_s=now_s,
                why=change.why,
                services=tuple(self._asked_for),
                started=change.start,
                stopped=change.stop,
                advice=advice,
            )
        )
        return f"pool: {text}"

    def _append(self, decision: PoolDecision) -> None:
        """A full disk does not end the run: the decision is in the launcher's log, too."""
        try:
            with self._folder.pool.open("ab") as file:
                file.write(msgspec.json.encode(decision) + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as err:
            _log.warning("%s cannot be written: %s", self._folder.pool, err)


def _read_whole_lines(folder: RunFolder) -> list[PoolDecision]:
    """The decisions so far. A last line that a crash cut short is removed. Raises: DataError."""
    lines = folder.pool.read_bytes().splitlines(keepends=True) if folder.pool.is_file() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        write_atomic(folder.pool, b"".join(lines))
    found: list[PoolDecision] = []
    for number, line in enumerate(lines, start=1):
        try:
            found.append(msgspec.json.decode(line, type=PoolDecision))
        except msgspec.DecodeError as err:
            raise DataError(
                f"{folder.pool}: line {number} is no decision on the pool: {err}; delete the file to start "
                "with rollout.services"
            ) from err
    return found

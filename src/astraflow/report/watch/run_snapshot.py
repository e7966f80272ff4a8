"""A run at one moment: everything that the rules of the watchdog may read.

It combines what the dataflow, the launcher and the steps report anyway. Only the free disk space is measured
for the watchdog alone.
"""

import itertools
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from astraflow.processes.process_state import ProcessState
from astraflow.recipe.service_state import ServiceState
from astraflow.types import PolicyStatus, StatusReply, StepRecord, Wait, WorkerStatus
from astraflow.types.waits import POOL, Party

__all__ = ["Disk", "LauncherState", "RunSnapshot", "StepMemory", "newest_values"]

_NEWEST = 8
"""Number of newest steps from which the usual value of a metric is computed."""
_KEPT_FIRST = 5
_KEPT_NEWEST = 32
_SILENT_S = 2.0
"""A healthy process gives a sign of life every second; this allows for one that is late."""
_RESTARTING_S = 30.0
"""A restarted process needs this long to import libraries and load a checkpoint."""
_STARTING_S = 300.0
"""A service that hasn't joined yet may load a large model for this long."""
_PAUSED_S = 5.0
"""A process that is silent for longer was paused, not only late."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of the run folder."""

    where: str
    """Path of the run folder."""
    free_bytes: int
    checkpoint_bytes: int = 0
    """Expected size of the next checkpoints of all policies: the size of the newest ones."""


@dataclass(frozen=True, slots=True)
class LauncherState:
    """The launcher, as another process sees it."""

    pid: int
    state: ProcessState
    silent_s: float
    """Time since it last wrote `run.json`."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment. Unknown fields are empty.

    Example: `RunSnapshot(now_s=status.now_s, status=status, steps={"actor": records})`.
    """

    now_s: float
    """Unix seconds on the dataflow's clock."""
    status: StatusReply | None = None
    services: Sequence[ServiceState] = ()
    """The processes that the launcher started."""
    steps: Mapping[str, Sequence[StepRecord]] = field(default_factory=dict[str, Sequence[StepRecord]])
    """Policy -> its steps, oldest first: the first few, and the newest."""
    unanswered_s: float = 0.0
    """Seconds for which the dataflow has not answered; 0 if it answers."""
    unanswered_reason: str = ""
    """The error of the last request; empty if only the time is known."""
    disk: Disk | None = None
    launcher: LauncherState | None = None
    """None while its record in `run.json` is fresh."""
    calm_since_s: float = 0.0
    """Since when no part of the run has been paused or starting, as far as is known. Waits and transfers
    count from there, because a pause isn't the fault of a link, a pool, or a trainer."""

    def calm_s(self, seconds: float) -> float:
        """How much of the last `seconds` the run has been calm."""
        return min(seconds, self.now_s - self.calm_since_s)

    @property
    def is_disturbed(self) -> bool:
        """Whether a part of the run is paused, restarting, or starting, or has just done so."""
        joined = {worker.name for worker in self.workers}
        paused = [worker for worker in self.workers if self.silence_s(worker) >= _PAUSED_S]
        return (
            self.unanswered_s > 0
            or (bool(paused) and 2 * len(paused) >= len(self.workers))
            or any(_is_disturbed(service, joined) for service in self.services)
        )

    @property
    def policies(self) -> Sequence[PolicyStatus]:
        """Policies that still have steps to do, while the run continues."""
        if self.status is None or self.status.state != "running":
            return ()
        return [policy for policy in self.status.policies if policy.step < policy.num_steps]

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """Rollout services, while the run continues."""
        return self.status.workers if self.status is not None and self.status.state == "running" else ()

    @property
    def waits(self) -> Sequence[Wait]:
        """Who waits for whom, while the run continues."""
        return self.status.waits if self.status is not None and self.status.state == "running" else ()

    def waits_for_batch(self) -> Iterator[tuple[PolicyStatus, Wait]]:
        """Policies whose trainer waits for a batch, with that wait."""
        for policy in self.policies:
            for wait in self.waits:
                if wait.who == Party(kind="trainer", name=policy.name) and wait.whom == POOL:
                    yield policy, wait

    def silence_s(self, worker: WorkerStatus) -> float:
        """Seconds since the last sign of life of a rollout service."""
        return max(0.0, self.now_s - worker.last_seen_s)

    def is_in_trouble(self, *names: str) -> bool:
        """Whether one of these processes is stopped, hangs or has crashed, or seems to.

        The rules about processes name it, now or within seconds. A part that waits for such a process is not
        a second fault, so rules about waits skip it.
        """
        for service in [service for service in self.services if service.name in names]:
            is_silent = service.silent_s is not None and service.silent_s >= _SILENT_S
            is_new = service.restarts > 0 and service.age_s < _RESTARTING_S
            if service.trouble or is_silent or is_new or service.state == "restarting":
                return True
        return False

    def usual(self, policy: str, metric: str) -> float | None:
        """Median of a metric over the newest steps; None if fewer than three report it."""
        values = newest_values(self.steps.get(policy, ()), metric, _NEWEST)
        return statistics.median(values) if len(values) >= 3 else None

    def step_s(self, policy: str) -> float | None:
        """Median time from one step to the next; None before the fourth step."""
        times = [record.at_s for record in self.steps.get(policy, ())][-_NEWEST - 1 :]
        if len(times) < 4:
            return None
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def _is_disturbed(service: ServiceState, joined: Collection[str]) -> bool:
    is_paused = service.silent_s is not None and service.silent_s >= _PAUSED_S
    is_new = service.restarts > 0 and service.age_s < _RESTARTING_S
    is_starting = (
        service.name.startswith("rollout-")
        and service.state == "running"
        and service.name not in joined
        and service.age_s < _STARTING_S
    )
    return bool(service.trouble) or is_paused or is_new or is_starting or service.state == "restarting"


class StepMemory:
    """The first few and the newest steps of each policy. Example: `memory.add(record)`, `memory.steps`."""

    def __init__(self) -> None:
        self._first: dict[str, list[StepRecord]] = {}
        self._newest: dict[str, deque[StepRecord]] = {}

    def add(self, record: StepRecord) -> None:
        """Keeps a step. Steps must arrive in order."""
        first = self._first.setdefault(record.policy, [])
        if len(first) < _KEPT_FIRST:
            first.append(record)
        else:
            self._newest.setdefault(record.policy, deque(maxlen=_KEPT_NEWEST)).append(record)

    @property
    def steps(self) -> dict[str, Sequence[StepRecord]]:
        """Policy -> its steps, oldest first."""
        return {policy: [*first, *self._newest.get(policy, ())] for policy, first in self._first.items()}


def newest_values(records: Sequence[StepRecord], metric: str, num: int) -> list[float]:
    """A metric of the newest `num` steps, oldest first; steps that don't report it are left out."""
    return [item.value for record in records[-num:] for item in record.metrics if item.name == metric]

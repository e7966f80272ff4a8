"""What the watchdog sees of a run: everything that its rules may look at, at one moment.

It is made of what the dataflow, the launcher and the steps already tell; nothing is measured for it alone but
the room on the disk.
"""

import itertools
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from astraflow.processes.process_state import ProcessState
from astraflow.processes.supervisor import ServiceState
from astraflow.types import PolicyStatus, StatusReply, StepRecord, Wait, WorkerStatus
from astraflow.types.waits import POOL, Party

__all__ = ["Disk", "LauncherLife", "Sight", "StepMemory", "newest_values"]

_NEWEST = 8
"""Steps that say what is usual."""
_KEPT_FIRST = 5
_KEPT = 32
_SILENT_S = 2.0
"""A process that works gives a sign of life every second."""
_ANEW_S = 30.0
"""A process that was restarted imports libraries and loads a checkpoint before it works again."""


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk of the run folder."""

    where: str
    free_bytes: int
    checkpoint_bytes: int = 0
    """What the next checkpoints of all policies will take, by those that are there."""


@dataclass(frozen=True, slots=True)
class LauncherLife:
    """The launching process, as somebody else sees it."""

    pid: int
    state: ProcessState
    silent_s: float
    """Age of its last word in `run.json`."""


@dataclass(frozen=True, slots=True)
class Sight:
    """A run at one moment. What is not known is empty.

    Example: `Sight(now_s=status.now_s, status=status, steps={"actor": records})`.
    """

    now_s: float
    """Unix seconds, by the clock of the dataflow."""
    status: StatusReply | None = None
    services: Sequence[ServiceState] = ()
    """The processes that the launcher started."""
    steps: Mapping[str, Sequence[StepRecord]] = field(default_factory=dict[str, Sequence[StepRecord]])
    """Policy -> its steps, oldest first: the first few, and the newest."""
    unanswered_s: float = 0.0
    """Since when the dataflow has not answered; 0 if it does."""
    why_unanswered: str = ""
    disk: Disk | None = None
    launcher: LauncherLife | None = None

    @property
    def policies(self) -> Sequence[PolicyStatus]:
        """Policies that still have steps to do, while the run goes on."""
        if self.status is None or self.status.state != "running":
            return ()
        return [policy for policy in self.status.policies if policy.step < policy.num_steps]

    @property
    def workers(self) -> Sequence[WorkerStatus]:
        """Rollout services, while the run goes on."""
        return self.status.workers if self.status is not None and self.status.state == "running" else ()

    @property
    def waits(self) -> Sequence[Wait]:
        """Who waits for whom, while the run goes on."""
        return self.status.waits if self.status is not None and self.status.state == "running" else ()

    def waits_for_batch(self) -> Iterator[tuple[PolicyStatus, Wait]]:
        """Policies whose trainer waits for a batch, with that wait."""
        for policy in self.policies:
            for wait in self.waits:
                if wait.who == Party(kind="trainer", name=policy.name) and wait.whom == POOL:
                    yield policy, wait

    def silence_s(self, worker: WorkerStatus) -> float:
        """Seconds since a rollout service was heard of."""
        return max(0.0, self.now_s - worker.last_seen_s)

    def is_in_trouble(self, *names: str) -> bool:
        """Whether one of these processes is stopped, hangs or has crashed, or seems to.

        Rules about processes say so, now or soon. What waits for such a process is no second thing that is
        wrong.
        """
        return any(_is_in_trouble(service) for service in self.services if service.name in names)

    def usual(self, policy: str, metric: str) -> float | None:
        """Median of a number over the newest steps; None if fewer than three tell it."""
        values = newest_values(self.steps.get(policy, ()), metric, _NEWEST)
        return statistics.median(values) if len(values) >= 3 else None

    def step_s(self, policy: str) -> float | None:
        """Median time from one step to the next; None before the fourth step."""
        times = [record.at_s for record in self.steps.get(policy, ())][-_NEWEST - 1 :]
        if len(times) < 4:
            return None
        return statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def _is_in_trouble(service: ServiceState) -> bool:
    is_silent = service.silent_s is not None and service.silent_s >= _SILENT_S
    is_new = service.restarts > 0 and service.age_s < _ANEW_S
    return bool(service.trouble) or is_silent or is_new or service.state == "restarting"


class StepMemory:
    """The first few and the newest steps of each policy. Example: `memory.add(record)`, `memory.steps`."""

    def __init__(self) -> None:
        self._first: dict[str, list[StepRecord]] = {}
        self._newest: dict[str, deque[StepRecord]] = {}

    def add(self, record: StepRecord) -> None:
        """Remembers a step; they come in order."""
        first = self._first.setdefault(record.policy, [])
        if len(first) < _KEPT_FIRST:
            first.append(record)
        else:
            self._newest.setdefault(record.policy, deque(maxlen=_KEPT)).append(record)

    @property
    def steps(self) -> dict[str, Sequence[StepRecord]]:
        """Policy -> steps, oldest first."""
        return {policy: [*first, *self._newest.get(policy, ())] for policy, first in self._first.items()}


def newest_values(records: Sequence[StepRecord], metric: str, num: int) -> list[float]:
    """A number of the newest steps, oldest first; steps that do not tell it are left out."""
    return [item.value for record in records[-num:] for item in record.metrics if item.name == metric]

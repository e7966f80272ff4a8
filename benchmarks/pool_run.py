"""Simulates a run whose pool of rollout services changes, under a virtual clock: its duration and its cost.

All deciding parts are real: the dataflow's core (draws, tickets, leases, batches, versions), its wait shares
and the advice based on them, the pool sizer, and the emulated devices of the `paced` engine. Time is virtual,
so other load on the machine doesn't change anything. Processes, HTTP, the journal, and moving weights take no
time here.

A service has costs from the moment that it is requested until it has left, including the time in which it
starts and the time in which it finishes its last episodes.
"""

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from astraflow.addons.pool.pool_sizer import PoolSizer, SeatState
from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import (
    AddWorker,
    DropWorker,
    EpisodeFacts,
    IssueLeases,
    LeaseView,
    RecordResult,
)
from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from astraflow.dataflow.service.scaling import WaitShares
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.types import ServedVersions
from astraflow_paced.emulated_device import PacedDevice, PacedJob
from virtual_core import VirtualCore, make_meta

__all__ = ["Load", "PoolMeasured", "PoolRun", "fixed"]

POLICY = "actor"
GROUP_SIZE = 8
TOKENS_PER_S = 100.0
"""Speed of each request."""
LOOK_S = 2.0
"""Time between two checks of the pool, and between two heartbeats."""


@dataclass(frozen=True)
class Load:
    """The load of a run."""

    steps: int
    mean_tokens: Callable[[float], float]
    """Share of the steps that are done -> mean length of completions."""
    step_s: float = 0.0
    """Constant part of a training step's seconds, independent of its batch."""
    million_tokens_s: float = 0.0
    """Additional seconds per million tokens of the batch."""
    sigma: float = 0.8
    """Standard deviation of log(length)."""
    join_s: float = 90.0
    """Time from the request to the first lease: start, import, fetch the weights."""
    groups: int = 32
    """Groups per batch."""
    num_slots: int = 16
    """Requests that run at the same time on a device."""

    @property
    def num_places(self) -> int:
        """Episodes that a service takes: a quarter more than run at the same time."""
        return self.num_slots + self.num_slots // 4

    def needed_for(self, length: float) -> float:
        """Returns the number of services that generate a batch in the time that the trainer takes for one,
        with completions of this mean length."""
        num_tokens = length * GROUP_SIZE * self.groups
        step_s = self.step_s + self.million_tokens_s * num_tokens / 1e6
        return num_tokens / step_s / (self.num_slots * TOKENS_PER_S)

    def num_tokens(self, done: float, rng: random.Random) -> int:
        """Draws the length of a completion. The longest are cut at four times the mean."""
        mean = self.mean_tokens(done)
        drawn = rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)
        return max(1, min(round(4 * mean), round(drawn)))


def fixed(num_services: int) -> ClusterConfig:
    """Makes the config of a pool with a fixed number of services."""
    fields = {"min_services": num_services, "max_services": num_services}
    return parse_config(fields, ClusterConfig, where="cluster")


@dataclass
class PoolMeasured:
    """The measurements of a run."""

    wall_s: float = 0.0
    """Time until all steps were done."""
    used_s: float = 0.0
    """Seconds of all services together."""
    num_tokens: int = 0
    """Number of trained tokens."""
    sizes: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """(time, number of requested services from then on)."""
    busy_s: float = 0.0
    """Time in which the trainer trained."""

    @property
    def used_h(self) -> float:
        """Hours of all services together."""
        return self.used_s / 3600

    @property
    def num_changes(self) -> int:
        """Number of the sizer's decisions."""
        return len(self.sizes) - 1


@dataclass(eq=False)
class _Service:
    """A requested rollout service."""

    name: str
    num_places: int
    since_s: float
    """Time at which it was requested."""
    device: PacedDevice | None = None
    """Set once it has joined."""
    is_leaving: bool = False
    jobs: dict[str, PacedJob] = field(default_factory=dict[str, PacedJob])
    """Lease -> its request."""
    num_ended: int = 0
    """Tokens of the completions that have ended."""

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        assert self.device is not None
        return self.num_ended + sum(map(self.device.tokens_done, self.jobs.values()))

    @property
    def room(self) -> int:
        if self.device is None or self.is_leaving:
            return 0
        return self.num_places - len(self.jobs)


class PoolRun:
    """One run. Example: `PoolRun(load, cluster).run().wall_s`."""

    # size: everything that a simulated run consists of
    def __init__(self, load: Load, cluster: ClusterConfig, *, num_services: int = 1, seed: int = 0) -> None:
        self._load = load
        self._sizer = PoolSizer(cluster)
        self._shares = WaitShares(cluster.pool.window_s)
        self._services: dict[str, _Service] = {}
        self._found = PoolMeasured()
        self._ended: deque[tuple[_Service, LeaseView, int, int]] = deque()
        """Completions that have just ended: service, lease, tokens, oldest version."""
        self._tokens: dict[tuple[int, int], int] = {}
        self._step = 0
        self._waits_since_s: float | None = 0.0
        self._waited_s = 0.0
        table = parse_config(
            {"group_size": GROUP_SIZE, "groups_per_batch": load.groups, "max_staleness": 4, "engine_lag": 1},
            TableConfig,
            where="table",
        )
        plan = RunPlan(
            seed=seed,
            group_size=GROUP_SIZE,
            policies={POLICY: PolicyPlan(table=table, num_steps=load.steps)},
            sources={"tasks": 1_000_000},
            curators=(),
            eval=EvalPlan(sets={}, every=1, deadline_s=300.0),
            max_attempts=3,
        )
        self._clock = VirtualCore(plan)
        self._epoch: int = self._clock.attach(POLICY).epoch
        self._shares.note_session(POLICY, 0.0)
        self._clock.publish(POLICY, self._epoch, 0, 0)
        for name in self._sizer.choose_first(num_services):
            self._ask_for(name)
        self._note_size()

    def run(self) -> PoolMeasured:
        """Runs until all steps are done."""
        self._look()
        while True:
            dues_s = [s.device.due_s for s in self._services.values() if s.device is not None]
            self._clock.now_s = max(self._clock.now_s, min([*dues_s, self._clock.due_s]))
            self._advance()
            while self._clock.due_s <= self._clock.now_s:
                self._clock.run_next()
            if self._step == self._load.steps:
                break
            if f"batch/{POLICY}" in self._clock.woken and self._waits_since_s is not None:
                self._take()
            if "leases" in self._clock.woken:
                self._lease()
            self._clock.woken.clear()
        for service in self._services.values():
            self._pay(service)
        self._found.wall_s = self._clock.now_s
        return self._found

    # --- the pool ---------------------------------------------------------------------------------

    def _look(self) -> None:
        """Passes on what the dataflow learns from heartbeats, and what the launcher learns from the
        dataflow."""
        joined = [s for s in self._services.values() if s.device is not None]
        is_held_back = self._clock.core.is_held_back(self._served())
        for service in joined:
            free = 1 - len(service.jobs) / service.num_places
            self._shares.note_beat(
                service.name,
                free_frac=free,
                is_held_back=is_held_back,
                now_s=self._clock.now_s,
                tokens=service.num_tokens,
            )
        waiting = {} if self._waits_since_s is None else {POLICY: self._waits_since_s}
        staying = [service.name for service in joined if not service.is_leaving]
        advice = self._shares.advice(self._clock.now_s, waiting, staying)
        states: dict[str, SeatState] = {name: _state(service) for name, service in self._services.items()}
        change = self._sizer.decide(self._clock.now_s, advice, states)
        if change is not None:
            for name in change.stop:
                self._let_go(self._services[name])
            for name in change.start:
                self._ask_for(name)
            self._note_size()
        self._clock.after(LOOK_S, partial(self._look))

    def _note_size(self) -> None:
        asked_for = sum(not service.is_leaving for service in self._services.values())
        self._found.sizes.append((self._clock.now_s, asked_for))

    def _ask_for(self, name: str) -> None:
        service = _Service(name, self._load.num_places, self._clock.now_s)
        self._services[name] = service
        self._clock.after(self._load.join_s, partial(self._join, service))

    def _join(self, service: _Service) -> None:
        if self._services.get(service.name) is not service:
            return  # it is no longer requested
        service.device = PacedDevice(num_slots=self._load.num_slots, tokens_per_s=TOKENS_PER_S)
        service.device.advance(self._clock.now_s)
        self._clock.apply(AddWorker(worker_id=service.name, name=service.name, hosts=(POLICY,)))
        self._clock.woken.add("leases")

    def _let_go(self, service: _Service) -> None:
        service.is_leaving = True
        if not service.jobs:
            self._leave(service)

    def _leave(self, service: _Service) -> None:
        self._pay(service)
        if service.device is not None:
            self._clock.apply(DropWorker(worker_id=service.name, reason="drained"))
        del self._services[service.name]

    def _pay(self, service: _Service) -> None:
        self._found.used_s += self._clock.now_s - service.since_s

    # --- episodes ---------------------------------------------------------------------------------

    def _served(self) -> tuple[ServedVersions, ...]:
        return (ServedVersions(policy=POLICY, versions=(self._step,)),)

    def _advance(self) -> None:
        for service in self._services.values():
            if service.device is not None:
                for job in service.device.advance(self._clock.now_s):
                    job.ended()
        while self._ended:
            self._finish(*self._ended.popleft())

    def _lease(self) -> None:
        """Hands out what may run. Each group goes to the service with the most room."""
        while (service := max(self._services.values(), key=_room, default=None)) and service.room > 0:
            request = IssueLeases(
                worker_id=service.name, num_free=min(service.room, GROUP_SIZE), served=self._served()
            )
            leases = self._clock.apply(request)
            for lease in leases:
                self._begin(service, lease)
            if not leases:
                return

    def _begin(self, service: _Service, lease: LeaseView) -> None:
        done = self._step / self._load.steps
        num_tokens = self._load.num_tokens(done, random.Random(lease.seed))
        job = PacedJob(
            owner=POLICY,
            num_tokens=num_tokens,
            prefill=0.0,
            ended=partial(self._ended.append, (service, lease, num_tokens, self._step)),
        )
        service.jobs[lease.id] = job
        assert service.device is not None
        service.device.submit(job)

    def _finish(self, service: _Service, lease: LeaseView, num_tokens: int, oldest: int) -> None:
        del service.jobs[lease.id]
        service.num_ended += num_tokens
        self._tokens[lease.group_id, lease.episode_idx] = num_tokens
        facts = EpisodeFacts(
            trajectories=(make_meta(POLICY, num_tokens, (oldest, self._step), float(lease.seed & 1)),),
            score=float(lease.seed & 1),
            metrics=(),
            duration_s=num_tokens / TOKENS_PER_S,
        )
        self._clock.apply(RecordResult(lease_id=lease.id, worker_id=service.name, outcome=facts))
        self._clock.woken.add("leases")
        if service.is_leaving and not service.jobs:
            self._leave(service)

    # --- training ---------------------------------------------------------------------------------

    def _take(self) -> None:
        view = self._clock.take(POLICY, self._epoch, self._step)
        if view is None:
            return
        assert self._waits_since_s is not None
        self._waited_s = self._clock.now_s - self._waits_since_s
        self._waits_since_s = None
        keys = {(sample.group_id, sample.episode_idx) for sample in view.samples}
        num_tokens = sum(self._tokens.pop(key) for key in keys)
        self._found.num_tokens += num_tokens
        step_s = self._load.step_s + self._load.million_tokens_s * num_tokens / 1e6
        self._found.busy_s += step_s
        self._clock.after(step_s, partial(self._trained))

    def _trained(self) -> None:
        self._clock.commit(POLICY, self._epoch, self._step, self._step + 1)
        self._step += 1
        batches = self._clock.core.num_batches(POLICY)
        self._shares.note_step(POLICY, waited_s=self._waited_s, now_s=self._clock.now_s, batches=batches)
        self._waits_since_s = self._clock.now_s
        self._clock.woken |= {"leases", f"batch/{POLICY}"}


def _room(service: _Service) -> int:
    return service.room


def _state(service: _Service) -> SeatState:
    if service.is_leaving:
        return "leaving"
    return "starting" if service.device is None else "working"

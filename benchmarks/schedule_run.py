"""Simulates schedules of RL training under a virtual clock.

All deciding parts are real: the dataflow's core (draws, tickets, leases, samplers, staleness, batches,
versions), and the emulated devices of the `paced` engine, one per rollout service. Only the time is virtual.
Nothing sleeps, so a loaded machine gives the same figures as an idle one. Processes, HTTP, the journal, and
the transfer of weights take no time here.

In an episode, each policy generates one completion in turn, and an environment responds after each. A device
that changes between generation and training needs `switch_s` for it, in each direction. Training takes the
memory of the KV cache, so requests that continue after it compute their context again.
"""

import math
import random
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from astraflow.dataflow.core.commands import (
    AddWorker,
    BatchView,
    EpisodeFacts,
    ExpireLeases,
    IssueLeases,
    LeaseView,
    RecordResult,
)
from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from astraflow.types import ServedVersions
from astraflow_paced.emulated_device import PacedDevice, PacedJob
from schedules import (
    ENV_S,
    ENV_SIGMA,
    GROUP_SIZE,
    NUM_DEVICES,
    NUM_SLOTS,
    OVER,
    POLICIES,
    PREFILL,
    SPARE,
    TOKENS_PER_S,
    Schedule,
    Work,
)
from virtual_core import VirtualCore, make_meta

__all__ = ["Episode", "Measured", "Trainer", "VirtualRun"]

OWNER = "all"
"""Owner of all requests on the emulated devices."""


@dataclass(frozen=True)
class Use:
    """Device-seconds since the start, summed over devices.

    They are what the work needs at the speed of a full device: a device that generates at half of its full
    speed counts half. The rest of its time is idle, as are the seconds in which it neither trains nor
    switches.
    """

    at_s: float
    generate: float
    recompute: float
    """Contexts that a device computed again."""
    train: float
    switch: float

    def since(self, other: "Use") -> "Use":
        """Returns what was added after another moment."""
        return Use(
            self.at_s - other.at_s,
            self.generate - other.generate,
            self.recompute - other.recompute,
            self.train - other.train,
            self.switch - other.switch,
        )

    def idle_frac(self, num_devices: int) -> float:
        """Returns the share of the devices' time in which they did nothing."""
        used = self.generate + self.recompute + self.train + self.switch
        return 1 - used / (self.at_s * num_devices)


class DevicePool:
    """Devices that generate, under one clock. `training` and `switching` are how many devices do so now.

    Example: `pool.submit(3, job)`; then `pool.advance(pool.due_s)` calls `job.ended()`.
    """

    def __init__(self, num_devices: int, num_slots: int, speed: dict[str, float]) -> None:
        self._devices = [PacedDevice(num_slots=num_slots, **speed) for _ in range(num_devices)]
        full = speed["max_tokens_per_s"]
        one_s = 1 / speed["tokens_per_s"] + (num_slots / full if full else 0.0)
        self._full_rate = num_slots / one_s
        self._due_s = [math.inf] * num_devices
        self._seen_s = [0.0] * num_devices
        """When each device's work was last added up. Its speed has not changed since."""
        self._now_s = 0.0
        self._tokens = 0.0
        self._recomputed = 0.0
        self._train_s = 0.0
        self._switch_s = 0.0
        self.training = 0.0
        self.switching = 0.0

    def __len__(self) -> int:
        return len(self._devices)

    @property
    def due_s(self) -> float:
        """When the next request ends if nothing else happens."""
        return min(self._due_s)

    def advance(self, now_s: float) -> None:
        """Moves the clock, and ends the requests that are due."""
        seconds = now_s - self._now_s
        self._train_s += seconds * self.training
        self._switch_s += seconds * self.switching
        self._now_s = now_s
        for idx, due_s in enumerate(self._due_s):
            if due_s <= now_s:
                self._changed(idx, self._catch_up(idx))

    def submit(self, idx: int, job: PacedJob, *, is_first: bool = False) -> None:
        """Queues a request on a device."""
        device = self._catch_up(idx)
        device.submit(job, is_first=is_first)
        self._changed(idx, device)

    def remove(self, idx: int, job: PacedJob) -> None:
        """Removes a request from its device."""
        device = self._catch_up(idx)
        device.remove(job)
        self._changed(idx, device)

    def hold(self, owner: str) -> None:
        """Stops all requests of an owner."""
        for idx in range(len(self)):
            device = self._catch_up(idx)
            device.hold(owner)
            self._changed(idx, device)

    def release(self, owner: str) -> None:
        """Lets the requests of an owner continue."""
        for idx in range(len(self)):
            device = self._catch_up(idx)
            device.release(owner)
            self._changed(idx, device)

    def recompute(self, job: PacedJob, tokens: float) -> None:
        """Lets a request that doesn't advance compute its context again, in the time of `tokens`."""
        job.left += tokens
        self._recomputed += tokens

    def tokens_done(self, idx: int, job: PacedJob) -> int:
        """Returns the number of tokens that a request has generated."""
        return self._catch_up(idx).tokens_done(job)

    def num_waiting(self, idx: int, owner: str) -> int:
        """Returns the number of an owner's requests that wait for a slot of a device."""
        return self._devices[idx].num_waiting(owner)

    def first_waiting(self, idx: int) -> PacedJob:
        """Returns the request that waits longest for a slot of a device."""
        return self._devices[idx].waiting[0]

    def use(self) -> Use:
        """Returns what all devices have done until now."""
        for idx in range(len(self)):
            self._catch_up(idx)
        recompute = self._recomputed / self._full_rate
        generate = self._tokens / self._full_rate - recompute
        return Use(self._now_s, generate, recompute, self._train_s, self._switch_s)

    def _catch_up(self, idx: int) -> PacedDevice:
        device = self._devices[idx]
        self._tokens += device.rate * (self._now_s - self._seen_s[idx])
        self._seen_s[idx] = self._now_s
        for job in device.advance(self._now_s):
            job.ended()
        return device

    def _changed(self, idx: int, device: PacedDevice) -> None:
        self._due_s[idx] = device.due_s


@dataclass
class Measured:
    """The measurements of a run. Times are virtual seconds since the first lease."""

    ends_s: dict[str, float] = field(default_factory=dict[str, float])
    """When each policy had finished its steps."""
    episodes: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Begin and end of each episode."""
    steps: dict[str, list[tuple[float, float]]] = field(
        default_factory=lambda: {name: list[tuple[float, float]]() for name in POLICIES}
    )
    """Policy -> begin and end of each training step."""
    uses: dict[str, list[Use]] = field(default_factory=lambda: {name: list[Use]() for name in POLICIES})
    """Policy -> what all devices had done when each step was committed."""
    staleness: list[float] = field(default_factory=list[float])
    """Mean staleness of each batch."""
    staleness_max: int = 0
    num_cancelled: int = 0
    num_moved: int = 0
    """Episodes that went on to another device before their end."""
    num_switches: int = 0
    """Times that a device changed between generation and training."""
    tokens_trained: list[list[int]] = field(default_factory=list[list[int]])
    """Tokens of each episode that was trained on, per step of the first policy."""
    tokens_drawn: list[int] = field(default_factory=list[int])
    """Tokens that each started episode would have if it ended."""

    @property
    def wall_s(self) -> float:
        """Time until both policies had finished their steps."""
        return max(self.ends_s.values())

    def use_until(self, step: int) -> Use:
        """Returns what all devices had done when both policies had committed a number of steps."""
        if not step:
            return Use(0.0, 0.0, 0.0, 0.0, 0.0)
        return max((self.uses[name][step - 1] for name in POLICIES), key=lambda use: use.at_s)


@dataclass(eq=False)
class Episode:
    """A running episode, in which the policies generate in turn."""

    lease: LeaseView
    device: int
    began_s: float
    tokens: tuple[int, ...]
    pauses_s: tuple[float, ...]
    """Time of the environment after each completion."""
    turn: int = 0
    oldest: list[int] = field(default_factory=list[int])
    """Version of each policy when its completion began."""
    job: PacedJob | None = None
    is_cancelled: bool = False


@dataclass
class Trainer:
    """A trainer of one or both policies. The core only knows the first."""

    policy: str
    trains: tuple[str, ...]
    step_s: float
    work_s: float
    """Device-seconds of a step."""
    epoch: int
    step: int = 0
    version: int = 0
    is_busy: bool = False


class VirtualRun:
    """One run of a schedule. Example: `VirtualRun(ASTRAFLOW, Work(), steps=20).run().wall_s`."""

    def __init__(
        self, schedule: Schedule, work: Work, *, steps: int, seed: int = 0, switch_s: float = 0.0
    ) -> None:
        self._schedule = schedule
        self._work = work
        self._steps = steps
        self._switch_s = switch_s
        num = schedule.num_generating(work)
        self._pool = DevicePool(num, NUM_SLOTS, work.speed())
        # If a batch does not fill the devices, each takes its share of it.
        over = 1 + OVER if "limiter" in schedule.table else 1
        share = math.ceil(over * work.episodes / num) if schedule.is_lockstep else NUM_SLOTS + SPARE
        self._room = [min(share, NUM_SLOTS + SPARE)] * num
        self._finds_no_lease = False
        """Whether a device had room when it last asked for leases, but got none."""
        self._is_away = False
        """Whether all devices train or switch, so no episode may begin."""
        self._ended: deque[Episode] = deque()
        """Episodes whose completion has just ended."""
        self._running: dict[str, Episode] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        """(group, episode) -> tokens, for those that have not been trained on yet."""
        self._versions: dict[str, int] = dict.fromkeys(POLICIES, 0)
        self._found = Measured()
        names = POLICIES[:1] if schedule.is_lockstep else POLICIES
        self._clock = VirtualCore(self._plan(names, seed))
        for idx in range(num):
            self._clock.apply(AddWorker(worker_id=f"{idx}", name=f"{idx}", hosts=names))
        self._trainers = [
            self._attached(name, step_s) for name, step_s in zip(names, schedule.step_s(work), strict=True)
        ]

    def run(self) -> Measured:
        """Runs until every policy has done its steps."""
        clock = self._clock
        self._lease()
        while len(self._found.ends_s) < len(POLICIES):
            due_s = min(self._pool.due_s, clock.due_s)
            if math.isinf(due_s):
                raise RuntimeError(f"{self._schedule.name}: nothing runs after {clock.now_s:.0f} s")
            clock.now_s = max(clock.now_s, due_s)
            self._advance()
            while clock.due_s <= clock.now_s:
                clock.run_next()
            for trainer in self._trainers:
                if f"batch/{trainer.policy}" in clock.woken:
                    self._take(trainer)
            if "leases" in clock.woken:
                self._lease()
            clock.woken.clear()
        return self._found

    def _plan(self, names: tuple[str, ...], seed: int) -> RunPlan:
        table = self._schedule.table_of(self._work)
        # A table stops drawing once it has all groups of its last step, so over-sampling would not cover that
        # step.
        planned = self._steps + 1 if self._schedule.is_lockstep else self._steps
        return RunPlan(
            seed=seed,
            group_size=table.group_size,
            policies={name: PolicyPlan(table=table, num_steps=planned) for name in names},
            sources={"tasks": 1_000_000},
            curators=(),
            eval=EvalPlan(sets={}, every=1, deadline_s=300.0),
            max_attempts=1,
            admission=self._schedule.admission,
        )

    # --- episodes ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        self._pool.advance(self._clock.now_s)
        while self._ended:
            episode = self._ended.popleft()
            episode.job = None
            self._clock.after(episode.pauses_s[episode.turn], partial(self._answered, episode))

    def _lease(self) -> None:
        """Hands out what may run. Each group goes to the service with the most room."""
        room = self._room
        while not self._is_away and room[idx := max(range(len(room)), key=room.__getitem__)] > 0:
            served = tuple(
                ServedVersions(policy=trainer.policy, versions=(trainer.version,))
                for trainer in self._trainers
            )
            num = min(room[idx], GROUP_SIZE)
            request = IssueLeases(worker_id=f"{idx}", num_free=num, served=served)
            leases: tuple[LeaseView, ...] = self._clock.apply(request)
            for lease in leases:
                self._begin(lease, idx)
            self._finds_no_lease = not leases
            if not leases:
                return

    def _begin(self, lease: LeaseView, device: int) -> None:
        rng = random.Random(lease.seed)
        tokens = tuple(self._work.num_tokens(idx, rng) for idx in range(len(POLICIES)))
        pauses_s = tuple(rng.lognormvariate(math.log(ENV_S), ENV_SIGMA) for _ in POLICIES)
        episode = Episode(lease, device, self._clock.now_s, tokens, pauses_s)
        self._room[device] -= 1
        self._running[lease.id] = episode
        self._found.tokens_drawn.append(sum(tokens))
        self._generate(episode)

    def _generate(self, episode: Episode) -> None:
        episode.oldest.append(self._versions[POLICIES[episode.turn]])
        episode.job = PacedJob(
            owner=OWNER,
            num_tokens=episode.tokens[episode.turn],
            prefill=0.0,
            ended=partial(self._ended.append, episode),
        )
        self._pool.submit(episode.device, episode.job)

    def _answered(self, episode: Episode) -> None:
        if episode.is_cancelled:
            return
        episode.turn += 1
        if episode.turn < len(POLICIES):
            self._generate(episode)
            return
        lease = episode.lease
        self._leave(episode)
        self._tokens[lease.group_id, lease.episode_idx] = sum(episode.tokens)
        score = float(lease.seed & 1)
        facts = EpisodeFacts(
            trajectories=tuple(self._meta(trainer.policy, episode, score) for trainer in self._trainers),
            score=score,
            metrics=(),
            duration_s=self._clock.now_s - episode.began_s,
        )
        self._clock.apply(RecordResult(lease_id=lease.id, worker_id=f"{episode.device}", outcome=facts))

    def _meta(self, policy: str, episode: Episode, score: float) -> Any:
        idx = POLICIES.index(policy)
        return make_meta(policy, episode.tokens[idx], (episode.oldest[idx], self._versions[policy]), score)

    def _leave(self, episode: Episode) -> None:
        del self._running[episode.lease.id]
        self._room[episode.device] += 1
        self._clock.woken.add("leases")
        self._found.episodes.append((episode.began_s, self._clock.now_s))

    def _cancel_rest(self) -> None:
        rest = tuple(self._running.values())
        for episode in rest:
            episode.is_cancelled = True
            if episode.job is not None:
                self._pool.remove(episode.device, episode.job)
            self._leave(episode)
        self._found.num_cancelled += len(rest)
        command = ExpireLeases(lease_ids=tuple(episode.lease.id for episode in rest), never_arrived=True)
        self._clock.apply(command)

    def _recompute(self, episode: Episode) -> None:
        """Lets a request that lost its KV cache compute its context again."""
        job = episode.job
        if job is None:
            return
        if done := self._pool.tokens_done(episode.device, job):
            self._pool.recompute(job, (sum(episode.tokens[: episode.turn]) + done) / PREFILL)

    # --- training ---------------------------------------------------------------------------------

    def _attached(self, policy: str, step_s: float) -> Trainer:
        epoch = self._clock.attach(policy).epoch
        self._clock.publish(policy, epoch, 0, 0)
        if self._schedule.is_lockstep:
            return Trainer(policy, POLICIES, step_s, sum(self._work.train_s), epoch)
        work_s = self._work.train_s[POLICIES.index(policy)]
        return Trainer(policy, (policy,), step_s, work_s, epoch)

    def _take(self, trainer: Trainer) -> None:
        if self._next_batch(trainer) is None:
            return
        if self._schedule.cancels:
            self._cancel_rest()
        if self._schedule.holds:
            self._pool.hold(OWNER)
        train = partial(self._train, trainer)
        if self._schedule.is_colocated:
            self._is_away = True
            self._switch(NUM_DEVICES, train)
        else:
            train()

    def _next_batch(self, trainer: Trainer) -> BatchView | None:
        """Takes the batch of the trainer's next step if the trainer is free and the batch is ready."""
        if trainer.is_busy or trainer.step == self._steps or self._is_away:
            return None
        view = self._clock.take(trainer.policy, trainer.epoch, trainer.step)
        if view is None:
            return None
        trainer.is_busy = True
        self._found.staleness.append(view.staleness_mean)
        self._found.staleness_max = max(self._found.staleness_max, view.staleness_max)
        if trainer.policy == POLICIES[0]:
            keys = {(sample.group_id, sample.episode_idx) for sample in view.samples}
            self._found.tokens_trained.append([self._tokens.pop(key) for key in keys])
        return view

    def _switch(self, num: int, then: "partial[None]") -> None:
        """Switches devices between generation and training."""
        self._found.num_switches += num
        if not self._switch_s:
            then()
            return
        self._pool.switching += num
        self._clock.after(self._switch_s, partial(self._switched, num, then))

    def _switched(self, num: int, then: "partial[None]") -> None:
        self._pool.switching -= num
        then()

    def _train(self, trainer: Trainer) -> None:
        self._train_for(trainer, trainer.step_s)

    def _train_for(self, trainer: Trainer, seconds: float) -> None:
        """Trains on as many devices as do the step in some seconds."""
        num = trainer.work_s / seconds
        self._pool.training += num
        self._clock.after(seconds, partial(self._trained, trainer, self._clock.now_s, num))

    def _trained(self, trainer: Trainer, began_s: float, num: float) -> None:
        self._pool.training -= num
        self._clock.commit(trainer.policy, trainer.epoch, trainer.step, trainer.step + 1)
        trainer.step += 1
        trainer.version = trainer.step
        trainer.is_busy = False
        self._clock.woken |= {"leases", *(f"batch/{each.policy}" for each in self._trainers)}
        use = self._pool.use()
        for name in trainer.trains:
            self._versions[name] = trainer.step
            self._found.steps[name].append((began_s, self._clock.now_s))
            self._found.uses[name].append(use)
            if trainer.step == self._steps:
                self._found.ends_s[name] = self._clock.now_s
        if self._schedule.is_colocated:
            self._switch(NUM_DEVICES, partial(self._resume))
        elif self._schedule.holds:
            self._pool.release(OWNER)

    def _resume(self) -> None:
        """Continues generation on devices that have just trained."""
        self._is_away = False
        if self._schedule.holds:
            for episode in self._running.values():
                self._recompute(episode)
            self._pool.release(OWNER)
        self._clock.woken |= {"leases", *(f"batch/{each.policy}" for each in self._trainers)}


def work_bound_s(found: Measured, work: Work, window: tuple[int, int]) -> float:
    """Returns the seconds that all devices need, without ever waiting, for the work of some steps: their own
    tokens at the speed of full devices, and training."""
    tokens = sum(sum(step) for step in found.tokens_trained[window[0] : window[1]])
    generate_s = tokens / (NUM_SLOTS * TOKENS_PER_S)
    return (generate_s + (window[1] - window[0]) * sum(work.train_s)) / NUM_DEVICES

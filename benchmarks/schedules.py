"""Simulates schedules of RL training under a virtual clock: what generates, what trains, and what waits.

All deciding parts are real: the dataflow's core (draws, tickets, leases, samplers, staleness, batches,
versions), and the emulated devices of the `paced` engine, one per rollout service. Only the time is virtual.
Nothing sleeps, so a loaded machine gives the same figures as an idle one. Processes, HTTP, the journal, and
the transfer of weights take no time here; `multi_policy.py` uses this module, and measures what they add.

In an episode, each policy generates one completion in turn, and an environment responds after each. A
schedule is a table of the core (limiter, sampler, staleness) and three facts: whether trainers wait for each
other, whether generation stops while they train, and whether episodes that a batch doesn't need are
canceled.
"""

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from astraflow.addons.forecast.emulated_device import PacedDevice, PacedJob
from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import (
    AddWorker,
    AttachTrainer,
    BatchView,
    Command,
    CommitStep,
    EpisodeFacts,
    ExpireLeases,
    IssueLeases,
    LeaseView,
    PayloadRef,
    PublishVersion,
    RecordResult,
    TakeBatch,
    TrajectoryMeta,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from astraflow.protocols import TableSizes, TableView
from astraflow.types import Manifest, ServedVersions

__all__ = [
    "ASTRAFLOW",
    "BARRIER",
    "GROUP_SIZE",
    "NUM_DEVICES",
    "NUM_SLOTS",
    "POLICIES",
    "SYNCHRONOUS",
    "InFlight",
    "Measured",
    "Schedule",
    "VirtualRun",
    "Work",
]

POLICIES = ("first", "second")
NUM_DEVICES = 10
NUM_SLOTS = 64
"""Requests that run at the same time on a device."""
GROUP_SIZE = 8
TOKENS_PER_S = 50.0
"""Speed of each request on a full device."""
ENV_S = 1.0
ENV_SIGMA = 1.0
SPARE = NUM_SLOTS // 4
"""Episodes that a service takes beyond its slots, so that the slots are not idle while environments
respond."""
OVER = 0.25
"""Share of episodes that over-sampling starts in addition to those of a batch."""


@dataclass(frozen=True)
class Work:
    """What a step requires of the devices."""

    groups: int = 64
    """Groups of `GROUP_SIZE` episodes per batch."""
    tail: float = 1.0
    """Speed of a request that runs alone on a device, divided by that of one of `NUM_SLOTS`."""
    sigma: float = 1.0
    """Standard deviation of log(length)."""
    mean_tokens: tuple[float, float] = (1500.0, 1500.0)
    """Mean length of each policy's completions, before the longest are cut."""
    max_tokens: tuple[int, int] = (4096, 4096)
    train: tuple[float, float] = (0.5, 0.5)
    """Time that one device needs for a step of each policy, in units of `busy_s`."""
    devices: tuple[int, int, int] = (8, 1, 1)
    """Devices that generate, train the first policy, and train the second policy, if each task has its
    own."""

    @property
    def episodes(self) -> int:
        """Episodes per batch."""
        return GROUP_SIZE * self.groups

    @property
    def busy_s(self) -> float:
        """Seconds in which 8 devices that are never idle generate a batch."""
        rng = np.random.default_rng(0)
        tokens = 0.0
        for mean, cut in zip(self.mean_tokens, self.max_tokens, strict=True):
            lengths = rng.lognormal(math.log(mean) - self.sigma**2 / 2, self.sigma, size=200_000)
            tokens += float(np.minimum(lengths, cut).mean())
        return self.episodes * tokens / TOKENS_PER_S / (8 * NUM_SLOTS)

    def speed(self) -> dict[str, float]:
        """The device's `tokens_per_s` and `max_tokens_per_s`. A full device is equally fast with any
        `tail`."""
        alone = self.tail * TOKENS_PER_S
        if self.tail == 1.0:
            return {"tokens_per_s": alone, "max_tokens_per_s": 0.0}
        return {
            "tokens_per_s": alone,
            "max_tokens_per_s": NUM_SLOTS / (1 / TOKENS_PER_S - 1 / alone),
        }

    def num_tokens(self, idx: int, rng: random.Random) -> int:
        """Draws the length of a policy's completion."""
        mean = self.mean_tokens[idx]
        drawn = rng.lognormvariate(math.log(mean) - self.sigma**2 / 2, self.sigma)
        return min(self.max_tokens[idx], max(1, round(drawn)))


class InFlight:
    """A limiter of the number of groups that run or wait for a batch, not counting those in training.

    `over`: share beyond a batch. `while_training`: whether groups are drawn while a batch is trained.
    """

    def __init__(self, *, over: float = 0.0, while_training: bool = False) -> None:
        self._over = over
        self._while_training = while_training

    def max_tickets(self, sizes: TableSizes) -> int:
        """Returns the number of tickets for a batch in training and the groups in flight."""
        return sizes.groups_per_batch + self._flight(sizes)

    def tickets(self, view: TableView, sizes: TableSizes) -> int:
        """Returns how many groups may be in flight now."""
        if view.num_in_batches and not self._while_training:
            return view.num_in_batches
        return view.num_in_batches + self._flight(sizes)

    def _flight(self, sizes: TableSizes) -> int:
        return math.ceil((1 + self._over) * sizes.groups_per_batch)


@dataclass(frozen=True)
class Schedule:
    """A way to share the devices between generation and the training of both policies."""

    name: str
    table: Mapping[str, Any]
    """What differs from a table of `Work.groups` groups of `GROUP_SIZE`."""
    is_lockstep: bool = True
    """One trainer does the steps of both policies. Otherwise, each has its own trainer, and neither waits."""
    is_colocated: bool = False
    """All devices generate, then all train, with their combined speed. Otherwise, each device has its own
    task."""
    holds: bool = False
    """Requests are paused while a batch is trained."""
    cancels: bool = False
    """Episodes that a batch doesn't need are canceled."""
    by_episode: bool = False
    """Any episodes fill a batch, regardless of their group. This is the easiest way to leave out slow
    episodes."""
    has_barrier: bool = False
    """No trainer begins a step before the other has done the same number of steps."""

    def table_of(self, work: Work) -> TableConfig:
        """Returns the table of each trained policy."""
        size = 1 if self.by_episode else GROUP_SIZE
        fields = {"group_size": size, "groups_per_batch": work.episodes // size, **self.table}
        return parse_config(fields, TableConfig, where="table")

    def step_s(self, work: Work) -> tuple[float, ...]:
        """Returns the seconds of a step, per trainer."""
        if self.is_colocated:
            return (sum(work.train) / NUM_DEVICES * work.busy_s,)
        each = tuple(
            share / num * work.busy_s for share, num in zip(work.train, work.devices[1:], strict=True)
        )
        return (max(each),) if self.is_lockstep else each

    def num_generating(self, work: Work) -> int:
        """Returns the number of devices that generate."""
        return NUM_DEVICES if self.is_colocated else work.devices[0]


def _limiter(**args: object) -> dict[str, object]:
    return {"name": "use", "use": "schedules:InFlight", "args": args}


_IN_TURN = {"max_staleness": 0, "engine_lag": 0, "sampler": {"name": "on_policy"}}
_OVER = {**_IN_TURN, "limiter": _limiter(over=OVER)}
_PARTIAL = {"max_staleness": 8, "engine_lag": 0, "sampler": {"name": "sweep"}, "limiter": _limiter(over=OVER)}
_AHEAD = {"max_staleness": 1, "engine_lag": 0, "sampler": {"name": "sweep"}}

ASTRAFLOW = Schedule(
    "astraflow",
    {"max_staleness": 4, "engine_lag": 1, "sampler": {"name": "fifo"}},
    is_lockstep=False,
)
BARRIER = replace(ASTRAFLOW, name="astraflow, barrier", has_barrier=True)
"""The same, but both policies wait for each other."""
SYNCHRONOUS = (
    Schedule("split", _IN_TURN),
    Schedule("split, over-sampled", _OVER, cancels=True, by_episode=True),
    Schedule("split, partial rollouts", _PARTIAL, holds=True, by_episode=True),
    Schedule("split, one step off", {**_AHEAD, "limiter": _limiter(while_training=True)}),
    Schedule(
        "split, one step off, over-sampled",
        {**_AHEAD, "limiter": _limiter(over=OVER, while_training=True)},
        cancels=True,
        by_episode=True,
    ),
    Schedule("colocated", _IN_TURN, is_colocated=True),
    Schedule("colocated, over-sampled", _OVER, is_colocated=True, cancels=True, by_episode=True),
    Schedule("colocated, partial rollouts", _PARTIAL, is_colocated=True, holds=True, by_episode=True),
)
"""The schedules of trainer-centered systems: all steps of both policies wait for each other."""


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
    staleness: list[float] = field(default_factory=list[float])
    """Mean staleness of each batch."""
    staleness_max: int = 0
    num_cancelled: int = 0
    tokens_trained: list[int] = field(default_factory=list[int])
    """Tokens of each episode that was trained on."""
    tokens_drawn: list[int] = field(default_factory=list[int])
    """Tokens that each started episode would have if it ended."""

    @property
    def wall_s(self) -> float:
        """Time until both policies had finished their steps."""
        return max(self.ends_s.values())

    @property
    def length_ratio(self) -> float:
        """Mean length of the episodes that were trained on, divided by that of all started ones. Below 1, the
        schedule prefers short episodes."""
        return float(np.mean(self.tokens_trained) / np.mean(self.tokens_drawn))

    def slot_use(self, num_devices: int) -> float:
        """Returns the mean number of episodes that ran at the same time, divided by the slots of the
        generating devices."""
        spans = sum(min(end, self.wall_s) - min(begin, self.wall_s) for begin, end in self.episodes)
        return spans / (self.wall_s * num_devices * NUM_SLOTS)


@dataclass(eq=False)
class _Episode:
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
class _Trainer:
    """A trainer of one or both policies. The core only knows the first."""

    policy: str
    trains: tuple[str, ...]
    step_s: float
    epoch: int
    step: int = 0
    version: int = 0
    is_busy: bool = False


class VirtualRun:
    """One run of a schedule. Example: `VirtualRun(ASTRAFLOW, Work(), steps=20).run().wall_s`."""

    def __init__(self, schedule: Schedule, work: Work, *, steps: int, seed: int = 0) -> None:
        self._schedule = schedule
        self._work = work
        self._steps = steps
        self._seed = seed
        self._now_s = 0.0
        num = schedule.num_generating(work)
        self._devices = [PacedDevice(num_slots=NUM_SLOTS, **work.speed()) for _ in range(num)]
        # If a batch does not fill the devices, each takes its share of it.
        over = 1 + OVER if "limiter" in schedule.table else 1
        share = math.ceil(over * work.episodes / num) if schedule.is_lockstep else NUM_SLOTS + SPARE
        self._room = [min(share, NUM_SLOTS + SPARE)] * num
        self._events: list[tuple[float, int, partial[None]]] = []
        self._order = itertools.count()
        self._ended: deque[_Episode] = deque()
        """Episodes whose completion has just ended."""
        self._running: dict[str, _Episode] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        """(group, episode) -> tokens, for those that have not been trained on yet."""
        self._versions: dict[str, int] = dict.fromkeys(POLICIES, 0)
        self._woken: set[str] = set()
        """Topics of the core whose waiting parties may find something new."""
        self._found = Measured()
        table = schedule.table_of(work)
        names = POLICIES[:1] if schedule.is_lockstep else POLICIES
        # A table stops drawing once it has all groups of its last step, so over-sampling would not cover that
        # step.
        planned = steps + 1 if schedule.is_lockstep else steps
        self._core = Core(
            RunPlan(
                seed=seed,
                group_size=table.group_size,
                policies={name: PolicyPlan(table=table, num_steps=planned) for name in names},
                sources={"tasks": 1_000_000},
                curators=(),
                eval=EvalPlan(sets={}, every=1, deadline_s=300.0),
                max_attempts=1,
            )
        )
        for idx in range(num):
            self._apply(AddWorker(worker_id=f"{idx}", name=f"{idx}", hosts=names))
        self._trainers = [
            self._attached(name, step_s) for name, step_s in zip(names, schedule.step_s(work), strict=True)
        ]

    def run(self) -> Measured:
        """Runs until every policy has done its steps."""
        self._lease()
        while len(self._found.ends_s) < len(POLICIES):
            due_s = min(device.due_s for device in self._devices)
            if self._events:
                due_s = min(due_s, self._events[0][0])
            if math.isinf(due_s):
                raise RuntimeError(f"{self._schedule.name}: nothing runs after {self._now_s:.0f} s")
            self._now_s = max(self._now_s, due_s)
            self._advance()
            while self._events and self._events[0][0] <= self._now_s:
                heapq.heappop(self._events)[-1]()
            for trainer in self._trainers:
                if f"batch/{trainer.policy}" in self._woken:
                    self._take(trainer)
            if "leases" in self._woken:
                self._lease()
            self._woken.clear()
        return self._found

    def _apply(self, command: Command) -> Any:
        """Returns the core's reply. Parties that it wakes are handled before the clock moves."""
        decision = self._core.apply(command, self._now_s)
        self._woken.update(decision.wakes)
        return decision.answer

    # --- episodes ---------------------------------------------------------------------------------

    def _advance(self) -> None:
        for device in self._devices:
            for job in device.advance(self._now_s):
                job.ended()
        while self._ended:
            episode = self._ended.popleft()
            episode.job = None
            pause_s = episode.pauses_s[episode.turn]
            self._after(pause_s, partial(self._answered, episode))

    def _after(self, seconds: float, call: "partial[None]") -> None:
        heapq.heappush(self._events, (self._now_s + seconds, next(self._order), call))

    def _lease(self) -> None:
        """Hands out what may run. Each group goes to the service with the most room."""
        while (idx := max(range(len(self._room)), key=self._room.__getitem__)) >= 0 and self._room[idx]:
            served = tuple(
                ServedVersions(policy=trainer.policy, versions=(trainer.version,))
                for trainer in self._trainers
            )
            num = min(self._room[idx], GROUP_SIZE)
            leases = self._apply(IssueLeases(worker_id=f"{idx}", num_free=num, served=served))
            for lease in leases:
                self._begin(lease, idx)
            if not leases:
                return

    def _begin(self, lease: LeaseView, device: int) -> None:
        rng = random.Random(lease.seed)
        tokens = tuple(self._work.num_tokens(idx, rng) for idx in range(len(POLICIES)))
        pauses_s = tuple(rng.lognormvariate(math.log(ENV_S), ENV_SIGMA) for _ in POLICIES)
        episode = _Episode(lease, device, self._now_s, tokens, pauses_s)
        self._room[device] -= 1
        self._running[lease.id] = episode
        self._found.tokens_drawn.append(sum(tokens))
        self._generate(episode)

    def _generate(self, episode: _Episode) -> None:
        episode.oldest.append(self._versions[POLICIES[episode.turn]])
        episode.job = PacedJob(
            owner="all",
            num_tokens=episode.tokens[episode.turn],
            prefill=0.0,
            ended=partial(self._ended.append, episode),
        )
        self._devices[episode.device].submit(episode.job)

    def _answered(self, episode: _Episode) -> None:
        if episode.is_cancelled:
            return
        episode.turn += 1
        if episode.turn < len(POLICIES):
            self._generate(episode)
            return
        lease = episode.lease
        self._leave(episode)
        self._tokens[lease.group_id, lease.episode_idx] = sum(episode.tokens)
        facts = EpisodeFacts(
            trajectories=tuple(
                _meta(trainer.policy, episode, self._versions[trainer.policy]) for trainer in self._trainers
            ),
            score=float(lease.seed & 1),
            metrics=(),
            duration_s=self._now_s - episode.began_s,
        )
        self._apply(RecordResult(lease_id=lease.id, worker_id=f"{episode.device}", outcome=facts))

    def _leave(self, episode: _Episode) -> None:
        del self._running[episode.lease.id]
        self._room[episode.device] += 1
        self._woken.add("leases")
        self._found.episodes.append((episode.began_s, self._now_s))

    def _cancel_rest(self) -> None:
        rest = tuple(self._running.values())
        for episode in rest:
            episode.is_cancelled = True
            if episode.job is not None:
                self._devices[episode.device].remove(episode.job)
            self._leave(episode)
        self._found.num_cancelled += len(rest)
        command = ExpireLeases(lease_ids=tuple(episode.lease.id for episode in rest), never_arrived=True)
        self._apply(command)

    # --- training ---------------------------------------------------------------------------------

    def _attached(self, policy: str, step_s: float) -> _Trainer:
        attach = AttachTrainer(policy=policy, trainer_id=policy, durable_step=0)
        epoch = self._apply(attach).epoch
        self._publish(policy, epoch, 0)
        trains = POLICIES if self._schedule.is_lockstep else (policy,)
        return _Trainer(policy, trains, step_s, epoch)

    def _publish(self, policy: str, epoch: int, step: int) -> None:
        manifest = Manifest(
            policy=policy, version=step, kind="full", tensors=(), chunks=(), digest="0", num_bytes=0
        )
        command = PublishVersion(policy=policy, epoch=epoch, step=step, manifest=manifest)
        self._apply(command)

    def _take(self, trainer: _Trainer) -> None:
        if trainer.is_busy or trainer.step == self._steps:
            return
        if self._schedule.has_barrier and any(other.step < trainer.step for other in self._trainers):
            return
        command = TakeBatch(policy=trainer.policy, epoch=trainer.epoch, step=trainer.step)
        view: BatchView | None = self._apply(command)
        if view is None:
            return
        trainer.is_busy = True
        self._found.staleness.append(view.staleness_mean)
        self._found.staleness_max = max(self._found.staleness_max, view.staleness_max)
        if trainer.policy == POLICIES[0]:
            keys = {(sample.group_id, sample.episode_idx) for sample in view.samples}
            self._found.tokens_trained += [self._tokens.pop(key) for key in keys]
        if self._schedule.cancels:
            self._cancel_rest()
        if self._schedule.holds:
            for device in self._devices:
                device.hold("all")
        self._after(trainer.step_s, partial(self._trained, trainer, self._now_s))

    def _trained(self, trainer: _Trainer, began_s: float) -> None:
        command = CommitStep(
            policy=trainer.policy,
            epoch=trainer.epoch,
            step=trainer.step,
            version=trainer.step + 1,
            metrics=(),
        )
        trainer.step += 1
        self._publish(trainer.policy, trainer.epoch, trainer.step)
        self._apply(command)
        trainer.version = trainer.step
        trainer.is_busy = False
        self._woken |= {"leases", *(f"batch/{each.policy}" for each in self._trainers)}
        for name in trainer.trains:
            self._versions[name] = trainer.step
            self._found.steps[name].append((began_s, self._now_s))
            if trainer.step == self._steps:
                self._found.ends_s[name] = self._now_s
        if self._schedule.holds:
            for device in self._devices:
                device.release("all")


def _meta(policy: str, episode: _Episode, newest: int) -> TrajectoryMeta:
    """Makes what the core knows about a policy's trajectory. Rewards differ within a group."""
    idx = POLICIES.index(policy)
    num_tokens = episode.tokens[idx]
    reward = float(episode.lease.seed & 1)
    return TrajectoryMeta(
        policy=policy,
        role=policy,
        reward=reward,
        num_tokens=num_tokens,
        num_trained_tokens=num_tokens,
        oldest_version=episode.oldest[idx],
        newest_version=newest,
        finish_reason="stop",
        turn_spans=((0, num_tokens),),
        turn_rewards=(reward,),
        num_trained_by_turn=(num_tokens,),
        payload=PayloadRef(segment=0, offset=0, length=0),
    )

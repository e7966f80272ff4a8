"""Schedules of RL training with two policies on ten devices: what generates, what trains, and what waits.

A schedule is a table of the core (limiter, sampler, staleness) and a few facts: whether trainers wait for
each other, whether generation stops while they train, whether episodes that a batch doesn't need are
canceled, and whether a trainer's devices generate while it waits. `schedule_run.py` simulates them.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from astraflow.config import parse_config
from astraflow.dataflow.config import TableConfig
from astraflow.protocols import TableSizes, TableView

__all__ = [
    "ASTRAFLOW",
    "GROUP_SIZE",
    "LENDING",
    "NUM_DEVICES",
    "NUM_SLOTS",
    "POLICIES",
    "SYNCHRONOUS",
    "InFlight",
    "Schedule",
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
PREFILL = 10.0
"""Tokens of a context that a device computes in the time of one that it generates."""
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
    def train_s(self) -> tuple[float, ...]:
        """Seconds in which one device does a step of each policy."""
        return tuple(share * self.busy_s for share in self.train)

    @property
    def bound_s(self) -> float:
        """Seconds of a step if all devices did its work without ever waiting."""
        return (8 * self.busy_s + sum(self.train_s)) / NUM_DEVICES

    @cached_property
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
        return {"tokens_per_s": alone, "max_tokens_per_s": NUM_SLOTS / (1 / TOKENS_PER_S - 1 / alone)}

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
    lends: bool = False
    """A trainer's devices generate while it waits, and idle ones help a trainer."""
    admission: Literal["any", "all"] = "any"
    """Whether a group is drawn when any policy has room for it, or all that need groups."""

    def table_of(self, work: Work) -> TableConfig:
        """Returns the table of each trained policy."""
        size = 1 if self.by_episode else GROUP_SIZE
        fields = {"group_size": size, "groups_per_batch": work.episodes // size, **self.table}
        return parse_config(fields, TableConfig, where="table")

    def step_s(self, work: Work) -> tuple[float, ...]:
        """Returns the seconds of a step, per trainer."""
        if self.is_colocated:
            return (sum(work.train_s) / NUM_DEVICES,)
        each = tuple(seconds / num for seconds, num in zip(work.train_s, work.devices[1:], strict=True))
        return (max(each),) if self.is_lockstep else each

    def num_generating(self, work: Work) -> int:
        """Returns the number of devices that generate, at least at times."""
        return NUM_DEVICES if self.is_colocated or self.lends else work.devices[0]


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
    admission="all",
)
"""Both policies act in every episode, so a group that only one of them had room for would be lost for the
other."""
LENDING = replace(ASTRAFLOW, name="astraflow, lending", lends=True)
"""The same, but no device waits if another policy or task can use it."""
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

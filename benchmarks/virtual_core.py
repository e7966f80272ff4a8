"""The dataflow's core under a virtual clock: what all simulations of this folder share.

The core is the real one. The owner of a `VirtualCore` moves `now_s`, runs what is due, and answers the
parties that the core wakes.
"""

import heapq
import itertools
import math
from collections.abc import Callable
from typing import Any

from astraflow.dataflow.core.commands import (
    AttachTrainer,
    BatchView,
    Command,
    CommitStep,
    PayloadRef,
    PublishVersion,
    TakeBatch,
    TrajectoryMeta,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import RunPlan
from astraflow.dataflow.core.state import PolicyState
from astraflow.types import Manifest

__all__ = ["VirtualCore", "make_meta"]


class VirtualCore:
    """A core and its clock. Example: `VirtualCore(plan).after(3.0, call)`."""

    def __init__(self, plan: RunPlan) -> None:
        self.core = Core(plan)
        self.now_s = 0.0
        self.woken: set[str] = set()
        """Topics of the core whose waiting parties may find something new."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def due_s(self) -> float:
        """When the next planned call is due; infinite if there is none."""
        return self._events[0][0] if self._events else math.inf

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        """Plans a call."""
        heapq.heappush(self._events, (self.now_s + seconds, next(self._order), call))

    def run_next(self) -> None:
        """Runs the next planned call."""
        heapq.heappop(self._events)[-1]()

    def apply(self, command: Command) -> Any:
        """Returns the core's answer."""
        decision = self.core.apply(command, self.now_s)
        self.woken.update(decision.wakes)
        return decision.answer

    def policy(self, name: str) -> PolicyState:
        """Returns the core's state of a policy, to read."""
        return self.core._ctx.policy(name)  # pyright: ignore[reportPrivateUsage]

    def attach(self, policy: str) -> Any:
        """Attaches a trainer and returns its session."""
        return self.apply(AttachTrainer(policy=policy, trainer_id=policy, durable_step=0))

    def take(self, policy: str, epoch: int, step: int) -> BatchView | None:
        """Returns a step's batch if it is ready."""
        return self.apply(TakeBatch(policy=policy, epoch=epoch, step=step))

    def publish(self, policy: str, epoch: int, step: int, version: int) -> None:
        """Publishes a version."""
        manifest = Manifest(
            policy=policy, version=version, kind="full", tensors=(), chunks=(), digest="0", num_bytes=0
        )
        self.apply(PublishVersion(policy=policy, epoch=epoch, step=step, manifest=manifest))

    def commit(self, policy: str, epoch: int, step: int, version: int) -> None:
        """Publishes the version that a step made, and commits the step."""
        self.publish(policy, epoch, step + 1, version)
        self.apply(CommitStep(policy=policy, epoch=epoch, step=step, version=version, metrics=()))


def make_meta(policy: str, num_tokens: int, versions: tuple[int, int], reward: float) -> TrajectoryMeta:
    """Makes what the core knows about a policy's trajectory. `versions`: the oldest and newest one."""
    oldest, newest = versions
    return TrajectoryMeta(
        policy=policy,
        role=policy,
        reward=reward,
        num_tokens=num_tokens,
        num_trained_tokens=num_tokens,
        oldest_version=oldest,
        newest_version=newest,
        finish_reason="stop",
        turn_spans=((0, num_tokens),),
        turn_rewards=(reward,),
        num_trained_by_turn=(num_tokens,),
        payload=PayloadRef(segment=0, offset=0, length=0),
    )

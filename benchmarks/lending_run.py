"""Simulates devices that change sides: a trainer's own devices generate while it waits.

The decisions are those of the real arbiter (`astraflow.addons.lending`). This module moves the devices, as
their services would: a device that is taken back gives its unfinished episodes, with their tokens, to the
generating devices with the fewest episodes. They go before the waiting ones, since they are older, and
compute their context again. A device that returns takes waiting requests of others first, and then leases.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from astraflow.addons.lending.decision import Crew, Side, SwitchTimes, TrainerView, choose_side, num_joining
from astraflow.dataflow.core.commands import LeaseView
from schedule_run import OWNER, Episode, Trainer, VirtualRun
from schedules import NUM_SLOTS, SPARE, Schedule, Work

__all__ = ["LendingRun"]

PERIODS = 4
"""Batches over which the time between two of them is averaged."""


@dataclass
class _Lender:
    """A trainer's devices, and what the decision about them needs."""

    devices: range
    side: Side = Side.GENERATE
    lent_step: int = 0
    is_switching: bool = False
    joined: tuple[int, ...] = ()
    """Generating devices that take part in the present step."""
    taken_s: deque[float] = field(default_factory=lambda: deque([0.0], maxlen=PERIODS + 1))
    """When the trainer took its last batches."""

    @property
    def period_s(self) -> float:
        num = len(self.taken_s) - 1
        return (self.taken_s[-1] - self.taken_s[0]) / num if num else 0.0


class LendingRun(VirtualRun):
    """One run with lending. Example: `LendingRun(LENDING, Work(), steps=20, switch_s=3.0).run().wall_s`."""

    def __init__(
        self, schedule: Schedule, work: Work, *, steps: int, seed: int = 0, switch_s: float = 0.0
    ) -> None:
        super().__init__(schedule, work, steps=steps, seed=seed, switch_s=switch_s)
        self._is_on = [True] * len(self._pool)
        """Whether each device generates now."""
        self._load = [0] * len(self._pool)
        """Episodes of each device."""
        begin = work.devices[0]
        self._lenders: dict[str, _Lender] = {}
        for trainer, num in zip(self._trainers, work.devices[1:], strict=True):
            self._lenders[trainer.policy] = _Lender(range(begin, begin + num))
            begin += num

    # --- episodes ---------------------------------------------------------------------------------

    def _begin(self, lease: LeaseView, device: int) -> None:
        self._load[device] += 1
        super()._begin(lease, device)

    def _leave(self, episode: Episode) -> None:
        self._load[episode.device] -= 1
        super()._leave(episode)

    def _turn_off(self, idx: int) -> None:
        """Ends generation on a device. Its episodes continue on others."""
        self._is_on[idx] = False
        self._room[idx] -= NUM_SLOTS + SPARE
        moved = [episode for episode in self._running.values() if episode.device == idx]
        moved.sort(key=lambda episode: episode.lease.group_id, reverse=True)
        for episode in moved:
            if episode.job is not None:
                self._pool.remove(idx, episode.job)
            to = min((i for i, is_on in enumerate(self._is_on) if is_on), key=self._load.__getitem__)
            self._move(episode, to, is_first=True)

    def _move(self, episode: Episode, to: int, *, is_first: bool) -> None:
        """Continues an episode, whose request no device has now, on a device."""
        self._found.num_moved += 1
        for idx, num in ((episode.device, -1), (to, 1)):
            self._load[idx] += num
            self._room[idx] -= num
        self._recompute(episode)
        episode.device = to
        if episode.job is not None:
            self._pool.submit(to, episode.job, is_first=is_first)

    def _turn_on(self, idx: int) -> None:
        """Begins generation on a device, first of requests that wait elsewhere."""
        self._is_on[idx] = True
        self._room[idx] += NUM_SLOTS + SPARE
        by_job = {episode.job: episode for episode in self._running.values() if episode.job is not None}
        others = [i for i, is_on in enumerate(self._is_on) if is_on and i != idx]
        while others and self._load[idx] < NUM_SLOTS:
            fullest = max(others, key=lambda i: self._pool.num_waiting(i, OWNER))
            if not self._pool.num_waiting(fullest, OWNER) or self._load[fullest] <= NUM_SLOTS + SPARE:
                break
            job = self._pool.first_waiting(fullest)
            self._pool.remove(fullest, job)
            self._move(by_job[job], idx, is_first=False)
        self._clock.woken.add("leases")

    # --- the baton --------------------------------------------------------------------------------

    def _view(self, trainer: Trainer, num_ready: int) -> TrainerView:
        lender = self._lenders[trainer.policy]
        period_s = lender.period_s
        missing = 1 - self._ready_frac(trainer.policy)
        return TrainerView(
            side=lender.side,
            step=trainer.step,
            steps_left=self._steps - trainer.step,
            num_ready=num_ready,
            missing_s=missing * period_s if period_s else float("inf"),
            period_s=period_s,
            since_s=self._clock.now_s - lender.taken_s[-1],
            step_s=trainer.step_s,
            times=SwitchTimes(self._switch_s),
            lent_step=lender.lent_step,
            waits_for_tickets=self._finds_no_lease,
        )

    def _head(self, policy: str, skip: int = 0) -> list[bool]:
        """Returns which of the groups of the next batch, or of one after `skip` batches, are ready."""
        state = self._clock.policy(policy)
        num = self._work.groups
        return [i in state.ready for i in islice(state.waiting, skip * num, (skip + 1) * num)]

    def _num_ready(self, policy: str) -> int:
        """Returns how many batches, at most two, the trainer could take. The sampler is `fifo`."""
        if len(self._clock.policy(policy).ready) < self._work.groups:
            return 0
        num = 0
        while num < 2 and len(head := self._head(policy, num)) == self._work.groups and all(head):
            num += 1
        return num

    def _ready_frac(self, policy: str) -> float:
        return sum(self._head(policy)) / self._work.groups

    def _take(self, trainer: Trainer) -> None:
        lender = self._lenders[trainer.policy]
        if trainer.is_busy or lender.is_switching or trainer.step == self._steps:
            return
        choice = choose_side(self._view(trainer, self._num_ready(trainer.policy)))
        if choice.side != lender.side:
            self._give(trainer, choice.side)
            return
        if lender.side == Side.TRAIN and self._next_batch(trainer) is not None:
            lender.taken_s.append(self._clock.now_s)
            self._train(trainer)

    def _give(self, trainer: Trainer, side: Side) -> None:
        """Gives the baton of a trainer's devices to its other tenant."""
        lender = self._lenders[trainer.policy]
        lender.is_switching = True
        if side == Side.TRAIN:
            for idx in lender.devices:
                self._turn_off(idx)
        self._switch(len(lender.devices), partial(self._given, trainer, side))

    def _given(self, trainer: Trainer, side: Side) -> None:
        lender = self._lenders[trainer.policy]
        lender.is_switching = False
        lender.side = side
        if side == Side.GENERATE:
            lender.lent_step = trainer.step
            for idx in lender.devices:
                self._turn_on(idx)
        self._clock.woken.add(f"batch/{trainer.policy}")
        if side == Side.TRAIN:
            self._take(trainer)

    def _train(self, trainer: Trainer) -> None:
        lender = self._lenders[trainer.policy]
        view = self._view(trainer, self._num_ready(trainer.policy))
        crew = self._crew(trainer, len(lender.devices))
        on = sorted((i for i, is_on in enumerate(self._is_on) if is_on), key=self._load.__getitem__)
        lender.joined = tuple(on[: num_joining(view, crew)])
        for idx in lender.joined:
            self._turn_off(idx)
        if not lender.joined:
            super()._train(trainer)
            return
        self._found.num_switches += len(lender.joined)
        # The own devices begin alone, while the others switch.
        alone_s = self._switch_s * len(lender.devices)
        rest_s = (trainer.work_s - alone_s) / (len(lender.devices) + len(lender.joined))
        self._train_for(trainer, self._switch_s + rest_s)

    def _crew(self, trainer: Trainer, num_own: int) -> Crew:
        loads = [load for load, is_on in zip(self._load, self._is_on, strict=True) if is_on]
        others_s = tuple(
            other.step_s
            for other in self._trainers
            if other is not trainer and not other.is_busy and self._num_ready(other.policy)
        )
        num_idle = loads.count(0)
        num_busy = len(loads) - num_idle
        return Crew(num_own=num_own, num_idle=num_idle, num_busy=num_busy, others_s=others_s)

    def _trained(self, trainer: Trainer, began_s: float, num: float) -> None:
        lender = self._lenders[trainer.policy]
        super()._trained(trainer, began_s, num)
        for idx in lender.joined:
            self._switch(1, partial(self._turn_on, idx))
        lender.joined = ()
        if trainer.step == self._steps:
            self._give(trainer, Side.GENERATE)

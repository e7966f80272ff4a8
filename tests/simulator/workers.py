"""A simulated rollout service: registers, follows versions, leases, runs episodes, sends results, beats."""

import random
from collections.abc import Generator
from typing import Any

import msgspec

from astraflow.dataflow.core.commands import EpisodeFacts, LeaseView, TrajectoryMeta
from astraflow.errors import RefusedError
from astraflow.types import HANDED_IN, Failure, MetricItem, ServedVersions
from drivers.core_driver import make_facts, make_meta
from simulator.clock import Ask, Link, Process, Signal, World
from simulator.referee import Referee
from simulator.scenario import HEARTBEAT_S, POLL_S, Scenario

__all__ = ["Worker"]


class Worker:
    """One process; `kill` ends it without a word."""

    def __init__(
        self, world: World, scenario: Scenario, referee: Referee, name: str, *, is_broken: bool = False
    ) -> None:
        """`is_broken`: it fails every lease as soon as it has it."""
        self.is_broken = is_broken
        rng = world.rng
        self._world, self._scenario, self._referee = world, scenario, referee
        self.link = Link(name, latency_s=rng.choice((0.001, 0.02, 0.15)))
        num_slots, self.slowness = rng.randint(1, 4), rng.choice((1.0, 1.0, 3.0))
        self.num_slots = max(2, num_slots) if self.slowness > 1.0 else num_slots
        self.is_alive = True
        self._id = ""
        self._current: dict[str, int] = {}
        self._pinned: dict[str, tuple[int, ...]] = {}
        self._running: dict[str, Process] = {}
        self._outbox: dict[str, EpisodeFacts | Failure] = {}
        self._freed, self._has_results = Signal(), Signal()
        self._processes = [world.spawn(script) for script in (self._lease(), self._send(), self._beat())]
        self._processes += [world.spawn(self._follow(policy)) for policy in scenario.plan.policies]
        world.tell("%s starts: %d slots, %.0fx slow", name, self.num_slots, self.slowness)

    def kill(self) -> None:
        """The process dies; leases, episodes and unsent results are lost."""
        self._world.tell("%s dies", self.link.name)
        self.is_alive = False
        for process in (*self._processes, *self._running.values()):
            process.kill()

    def drain(self) -> None:
        """Asks to leave when its episodes are done."""
        if self._id:
            self._world.spawn(self._ask_to_drain(self._id))

    def _ask_to_drain(self, worker_id: str) -> Generator[Any, Any, None]:
        yield self._ask("drain", worker_id)

    def _ask(self, method: str, *args: Any, timeout_s: float = 4.0) -> Ask:
        return Ask(self.link, method, args, timeout_s)

    def _served(self) -> tuple[ServedVersions, ...]:
        return tuple(
            ServedVersions(policy=policy, versions=tuple(sorted({version, *self._pinned.get(policy, ())})))
            for policy, version in self._current.items()
        )

    def _leave_if(self, state: object) -> bool:
        if state == "running":
            return False
        if self.is_alive:
            self.kill()
        return True

    # --- loops ---

    def _lease(self) -> Generator[Any, Any, None]:
        while True:
            if not self._id:
                self._id = yield self._ask("register", self.link.name)
                if not self._id:
                    yield self._pause()
                continue
            num_free = self.num_slots - len(self._running)
            if num_free <= 0 or len(self._outbox) > 8:
                yield self._freed
                continue
            held = frozenset((*self._running, *self._outbox))
            args = (self._id, num_free, self._served(), held)
            reply = yield self._ask("leases", *args, timeout_s=POLL_S + 4.0)
            if isinstance(reply, RefusedError):
                self._id = ""
            elif reply is None:
                yield self._pause()
            else:
                for lease in reply.leases:
                    self._running[lease.id] = self._world.spawn(self._episode(lease))

    def _beat(self) -> Generator[Any, Any, None]:
        while True:
            yield HEARTBEAT_S * (0.9 + 0.2 * self._world.rng.random())
            if not self._id:
                continue
            held, worker_id = (*self._running, *self._outbox), self._id
            reply = yield self._ask("heartbeat", worker_id, held, self._served(), timeout_s=HEARTBEAT_S)
            if reply is None:
                continue
            if isinstance(reply, RefusedError):
                self._id = "" if self._id == worker_id else self._id
                continue
            for lease_id in reply.revoked:
                if (episode := self._running.pop(lease_id, None)) is not None:
                    episode.kill()
                    self._freed.fire()
            is_drained = reply.is_draining and not self._running and not self._outbox
            if self._leave_if("drained" if is_drained else reply.state):
                return

    def _follow(self, policy: str) -> Generator[Any, Any, None]:
        after, pinned = -1, ()
        while True:
            reply = yield self._ask("versions", policy, after, pinned, timeout_s=POLL_S + 4.0)
            if reply is None:
                yield self._pause()
                continue
            if self._leave_if(reply.state):
                return
            yield 0.05 + self._world.rng.random() * self.slowness
            after, pinned = reply.newest, reply.pinned
            if reply.newest >= 0:
                self._current[policy] = reply.newest
                self._pinned[policy] = pinned

    def _send(self) -> Generator[Any, Any, None]:
        while True:
            if not self._outbox:
                yield self._has_results
                continue
            results = tuple(self._outbox.items())[:8]
            receipts = yield self._ask("episodes", self._id or self.link.name, results)
            if receipts is None:
                yield self._pause()
                continue
            for receipt in receipts:
                if receipt.status == "invalid":
                    self._referee.problem(f"{self.link.name}: an honest result is refused: {receipt.reason}")
                self._outbox.pop(receipt.lease_id, None)
            self._freed.fire()

    def _pause(self) -> float:
        return 0.2 + self._world.rng.random()

    # --- episodes ---

    def _episode(self, lease: LeaseView) -> Generator[Any, Any, None]:
        rng = self._world.rng
        started = dict(self._current)
        if self.is_broken:
            yield 0.01
            outcome = Failure(error_class="Broken", message="as ever", is_retryable=rng.random() < 0.5)
            self._put(lease, outcome)
            return
        yield (0.3 + rng.expovariate(0.5)) * self.slowness
        # Its own generator, so that the draws of earlier seeds stay as they were.
        hands_in = random.Random(f"hand in {self._scenario.seed} {lease.id}").random()
        if self._world.has_faults and hands_in < self._scenario.hand_in_frac:
            self._put(lease, Failure(error_class=HANDED_IN, message="the device was asked back"))
            return
        fails = self._scenario.failure_frac if self._world.has_faults else 0.0
        if rng.random() < fails:
            is_retryable = rng.random() < 0.8
            outcome = Failure(error_class="Boom", message="it broke", is_retryable=is_retryable)
        elif lease.kind == "eval":
            outcome = self._evaluated(lease)
        else:
            outcome = self._facts(lease, started)
        self._put(lease, outcome)

    def _evaluated(self, lease: LeaseView) -> EpisodeFacts | Failure:
        """A score of some length, or none if the episode took too long."""
        own = random.Random(f"length {self._scenario.seed} {lease.id}")
        if own.random() < self._scenario.late_frac:
            return Failure(error_class="DeadlineError", message="too long", is_retryable=own.random() < 0.5)
        facts = make_facts(score=_reward(lease, self._scenario))
        num_tokens = own.randint(1, 99)
        metrics = (MetricItem("sampled_tokens", float(num_tokens)),)
        return msgspec.structs.replace(facts, duration_s=num_tokens / 10, metrics=metrics)

    def _put(self, lease: LeaseView, outcome: EpisodeFacts | Failure) -> None:
        self._outbox[lease.id] = outcome
        self._running.pop(lease.id, None)
        self._has_results.fire()
        self._freed.fire()

    def _facts(self, lease: LeaseView, started: dict[str, int]) -> EpisodeFacts:
        rng, reward = self._world.rng, _reward(lease, self._scenario)
        metas: list[TrajectoryMeta] = []
        for policy, oldest in started.items():
            num_tokens = rng.randint(3, 30)
            num_trained = 0 if rng.random() < self._scenario.idle_frac else rng.randint(1, num_tokens)
            metas.append(
                make_meta(
                    policy,
                    reward=reward,
                    versions=(oldest, self._current[policy]),
                    num_tokens=num_tokens,
                    num_trained=num_trained,
                    turn_spans=((0, num_tokens),),
                    offset=self._referee.new_payload(),
                )
            )
        return make_facts(*metas, score=reward)


def _reward(lease: LeaseView, scenario: Scenario) -> float:
    """Depends on the group and the episode alone; all equal in some groups."""
    fixed = random.Random(f"{scenario.seed} {lease.kind} {lease.group_id}")
    if fixed.random() < scenario.equal_frac:
        return 1.0
    return float((lease.episode_idx + fixed.randint(0, 1)) % 2)

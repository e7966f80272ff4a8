"""What goes wrong in a simulated run, and when it stops going wrong."""

import math
from collections.abc import Generator
from typing import Any

from astraflow.types import Task
from simulator.clock import Ask, Link, World
from simulator.dataflow import Dataflow
from simulator.referee import Referee
from simulator.scenario import Change, Scenario
from simulator.trainers import Trainer
from simulator.workers import Worker

__all__ = ["chaos"]

Peers = tuple[list[Worker], list[Trainer]]


class _Chaos:
    """One method a kind of fault."""

    def __init__(
        self, world: World, scenario: Scenario, referee: Referee, dataflow: Dataflow, peers: Peers
    ) -> None:
        self.world, self._scenario, self._referee, self._dataflow = world, scenario, referee, dataflow
        self._workers, self._trainers = peers
        self._num_started = len(self._workers)

    def living(self) -> list[Worker]:
        """The services that are there and work."""
        return [worker for worker in self._workers if worker.is_alive and not worker.is_broken]

    def add_worker(self) -> None:
        """Another service joins."""
        name = f"w{self._num_started}"
        self._num_started += 1
        self._workers.append(Worker(self.world, self._scenario, self._referee, name))

    def kill_worker(self) -> None:
        """A service dies; after a while another comes."""
        if living := self.living():
            self.world.rng.choice(living).kill()
            self.world.after(self.world.rng.uniform(0.0, 10.0), self.add_worker)

    def drain_worker(self) -> None:
        """A service leaves in order, and another comes."""
        if living := self.living():
            self.world.rng.choice(living).drain()
            self.add_worker()

    def cut_link(self) -> None:
        """A service or a trainer is cut off, and goes on with what it has: a zombie for a while."""
        links = [worker.link for worker in self.living()] + [t.session.link for t in self._trainers]
        link = self.world.rng.choice(links)
        link.cut_until_s = self.world.now_s + self.world.rng.uniform(1.0, 25.0)
        link.cut = self.world.rng.choice(("lose", "hold"))
        self.world.tell("link of %s is cut (%s) until %.1f", link.name, link.cut, link.cut_until_s)

    def kill_trainer(self) -> None:
        """A trainer dies and comes back with its durable checkpoint."""
        self.world.rng.choice(self._trainers).kill(self.world.rng.uniform(0.1, 8.0))

    def start_second_trainer(self) -> None:
        """A trainer that still works is taken for dead."""
        self.world.rng.choice(self._trainers).start()

    def crash_dataflow(self) -> None:
        """The dataflow dies."""
        self._dataflow.crash(self.world.rng.uniform(0.1, 6.0))

    def slow_disk(self) -> None:
        """Writing takes seconds, or is quick again."""
        self._dataflow.is_disk_slow = not self._dataflow.is_disk_slow

    def go_on(self, change: Change) -> bool:
        """A person stops the run, or finds it over, and starts it again with another schedule.

        Returns: whether the dataflow was up to hear of it.
        """
        if not self._dataflow.is_up:
            return False
        self.world.tell("the run goes on with %s", change.schedule)
        self._dataflow.change_schedule(change.schedule)
        for trainer in self._trainers:
            trainer.session.kill()
            trainer.start()
        self.add_worker()
        return True

    def calm(self) -> None:
        """Nothing goes wrong any more; somebody is there to do the work."""
        self.world.tell("no more faults")
        self.world.has_faults = self._dataflow.is_disk_slow = False
        for peer in (*self._workers, *(trainer.session for trainer in self._trainers)):
            peer.link.cut_until_s = min(peer.link.cut_until_s, self.world.now_s)
        if not self.living():
            self.add_worker()


_FAULTS = (
    *(_Chaos.kill_worker, _Chaos.cut_link, _Chaos.cut_link, _Chaos.kill_trainer, _Chaos.start_second_trainer),
    *(_Chaos.crash_dataflow, _Chaos.crash_dataflow, _Chaos.slow_disk, _Chaos.add_worker, _Chaos.drain_worker),
)


def chaos(
    world: World, scenario: Scenario, referee: Referee, dataflow: Dataflow, peers: Peers
) -> Generator[Any, Any, None]:
    """The script of all faults; it also ends the simulation a little after the run's end."""
    trouble = _Chaos(world, scenario, referee, dataflow, peers)
    world.spawn(_outsider(world, scenario))
    world.spawn(_person(trouble, scenario))
    while world.now_s < scenario.faults_end_s and not dataflow.is_over:
        rest_s = scenario.faults_end_s - world.now_s
        yield min(rest_s + 0.001, world.rng.expovariate(1.0 / scenario.fault_every_s))
        if world.now_s < scenario.faults_end_s:
            world.rng.choice(_FAULTS)(trouble)
    trouble.calm()
    for change in (None, *(change for change in scenario.changes if math.isinf(change.at_s))):
        if change is not None:
            trouble.go_on(change)
        while not dataflow.is_over:
            yield 2.0
            if dataflow.is_over:
                yield 8.0  # Time for all to hear of it; a person may let the run go on meanwhile.
    world.is_over = True


def _person(trouble: _Chaos, scenario: Scenario) -> Generator[Any, Any, None]:
    """Resumes the run with other schedules while it is under way."""
    for change in scenario.changes:
        if math.isfinite(change.at_s):
            yield max(0.0, change.at_s - trouble.world.now_s)
            while not trouble.go_on(change):
                yield 1.0


def _outsider(world: World, scenario: Scenario) -> Generator[Any, Any, None]:
    """Pushes tasks, each of them twice; and may stop the run."""
    link = Link("outsider", latency_s=0.05)
    for number in range(scenario.num_pushed):
        yield world.rng.uniform(0.0, 10.0)
        tasks = (Task(id=f"pushed/{number // 2}", source="", prompt="?"),)
        yield Ask(link, "push", (tasks,))
    if scenario.stop_at_s < scenario.limit_s:
        yield max(0.0, scenario.stop_at_s - world.now_s)
        while (yield Ask(link, "stop", ())) is None:
            yield 1.0

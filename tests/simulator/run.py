"""Puts a simulated run together, and lets it run to its end."""

import random
from collections.abc import Callable

from astraflow.types.wait_words import wait_line
from simulator.chaos import chaos
from simulator.clock import World
from simulator.dataflow import Dataflow, Record
from simulator.referee import Referee
from simulator.scenario import make_scenario
from simulator.trainers import Trainer
from simulator.workers import Worker

__all__ = ["Record", "run_of"]


def run_of(seed: int, tell: Callable[[str], None] | None = None) -> Dataflow:
    """The dataflow after the run of a seed; `tell` gets the trace, line by line. Raises: BrokenRuleError."""
    scenario = make_scenario(seed)
    world = World(random.Random(f"run {seed}"), scenario.network, tell)
    referee = Referee(scenario.plan)
    world.tell("%s", scenario)
    dataflow = Dataflow(world, scenario, referee)
    world.serve(dataflow.handle)
    trainers = [Trainer(world, scenario, referee, policy) for policy in scenario.plan.policies]
    workers = [Worker(world, scenario, referee, f"w{n}") for n in range(scenario.num_workers)]
    if scenario.has_broken:
        workers.append(Worker(world, scenario, referee, "broken", is_broken=True))
    world.spawn(chaos(world, scenario, referee, dataflow, (workers, trainers)))
    world.run(until_s=scenario.limit_s)
    core = dataflow.core
    if core.state == "running":
        waits = "; ".join(map(wait_line, core.waits()))
        referee.problem(f"the run is not over after {world.now_s:.0f} s: {waits}")
    world.tell("the run is over: %s", core.reason)
    if scenario.has_broken and ("every rollout service" in core.reason or "row failed" in core.reason):
        referee.problem(f"a broken service among others ended the run: {core.reason}")
    referee.check_end(core, dataflow.records)
    return dataflow

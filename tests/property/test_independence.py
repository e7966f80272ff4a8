"""No step of one policy waits for another: simulated runs of two policies, of which one has trouble.

The dataflow's core is the real one; time is virtual, so a rate is a fact of the schedule and not of the
machine. Compared is a policy's rate of steps beside the troubled one with its rate alone in the same run.
"""

import random
from collections.abc import Callable
from functools import cache

import pytest

from astraflow.dataflow.core.plan import EvalPlan, PolicyPlan, RunPlan
from drivers.core_driver import make_table
from simulator.clock import Network, World
from simulator.dataflow import Dataflow
from simulator.referee import Referee
from simulator.scenario import Scenario
from simulator.trainers import Trainer
from simulator.workers import Worker

pytestmark = pytest.mark.timeout(120)

STEPS = 200
STEP_S = 1.2
NUM_SLOTS = 32
"""Slots of each of three services, enough for the trainers to set the pace."""
LIMIT_S = 20_000.0
UNDISTURBED = 0.95
"""Least share of the rate without trouble."""

Trouble = Callable[[World, Trainer], None]


def make_scenario(policies: tuple[str, ...]) -> Scenario:
    """No faults but those of the test; enough work for the whole run."""
    table = make_table(group_size=2, groups_per_batch=4, max_staleness=12, engine_lag=1)
    plans = {name: PolicyPlan(table=table, num_steps=STEPS) for name in policies}
    plan = RunPlan(
        seed=0,
        group_size=2,
        policies=plans,
        sources={"train": 50},
        curators=(),
        eval=EvalPlan(sets={}, every=1, deadline_s=40.0),
        max_attempts=3,
    )
    return Scenario(
        seed=0,
        plan=plan,
        network=Network(0.0, 0.0, 0.0),
        num_workers=3,
        fault_every_s=float("inf"),
        faults_end_s=0.0,
        limit_s=LIMIT_S,
        failure_frac=0.0,
        hand_in_frac=0.0,
        late_frac=0.0,
        idle_frac=0.0,
        equal_frac=0.0,
        checkpoint_every=5,
        num_pushed=0,
        stop_at_s=float("inf"),
    )


@cache
def rate_of_the_first(*policies: str, step_s: float = STEP_S, trouble: Trouble | None = None) -> float:
    """Steps a second of the first policy, between its tenth and its last; it must do all of them."""
    scenario = make_scenario(policies)
    world = World(random.Random(0), scenario.network, None)
    world.has_faults = False
    referee = Referee(scenario.plan)
    dataflow = Dataflow(world, scenario, referee)
    world.serve(dataflow.handle)
    workers = [Worker(world, scenario, referee, f"w{n}") for n in range(scenario.num_workers)]
    for worker in workers:
        worker.num_slots, worker.slowness = NUM_SLOTS, 1.0
    Trainer(world, scenario, referee, policies[0], step_s=STEP_S)
    for name in policies[1:]:
        other = Trainer(world, scenario, referee, name, step_s=step_s)
        if trouble is not None:
            trouble(world, other)
    world.run(until_s=LIMIT_S)
    steps = dataflow.core.steps(policies[0])
    assert len(steps) == STEPS, dataflow.core.waits()
    return (STEPS - 10) / (steps[-1].at_s - steps[9].at_s)


def dies_for_a_minute(world: World, trainer: Trainer) -> None:
    world.after(60.0, trainer.kill, 60.0)


def dies_for_ever(world: World, trainer: Trainer) -> None:
    world.after(60.0, trainer.kill, LIMIT_S)


def restarts_again_and_again(world: World, trainer: Trainer) -> None:
    for n in range(1, 20):
        world.after(20.0 * n, trainer.kill, 1.0)


@pytest.mark.parametrize(
    ("step_s", "trouble"),
    [
        (10 * STEP_S, None),
        (STEP_S, dies_for_a_minute),
        (STEP_S, dies_for_ever),
        (STEP_S, restarts_again_and_again),
    ],
    ids=["ten times slower", "dead for a minute", "dead for ever", "restarted again and again"],
)
def test_a_policy_trains_as_fast_as_alone_whatever_happens_to_the_others_trainer(
    step_s: float, trouble: Trouble | None
) -> None:
    alone = rate_of_the_first("solver")
    beside = rate_of_the_first("solver", "verifier", step_s=step_s, trouble=trouble)
    assert beside >= UNDISTURBED * alone


def test_the_rate_is_that_of_its_own_trainer() -> None:
    assert rate_of_the_first("solver") > 0.9 / STEP_S

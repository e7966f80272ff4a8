"""What a seed stands for: policies and their tables, peers, and which faults come how often."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from astraflow.algorithms.samplers import ReplayConfig
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.plan import (
    BestRule,
    EvalPlan,
    EvalSetPlan,
    PolicyPlan,
    RunPlan,
    Schedule,
    StopPlan,
)
from drivers.core_driver import make_table
from simulator.clock import Network

__all__ = ["HEARTBEAT_S", "LEASE_TIMEOUT_S", "POLL_S", "Change", "Scenario", "make_scenario"]

HEARTBEAT_S, LEASE_TIMEOUT_S, POLL_S = 3.0, 8.0, 20.0
_DEADLINE_S = 40.0
_MOST_STEPS = 7
"""Steps of a policy, after all changes."""


@dataclass(frozen=True, slots=True)
class Change:
    """A person stops the run, or finds it over, and resumes it with another schedule."""

    at_s: float
    """Infinity for after its end."""
    schedule: Schedule
    """Policies that have done more steps keep those."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulated run."""

    seed: int
    plan: RunPlan
    network: Network
    num_workers: int
    fault_every_s: float
    """Mean time between kills, cuts and the like; infinity for none."""
    faults_end_s: float
    limit_s: float
    """The run must be over by then: the slowest services do an episode in 4 s, and retries cost more."""
    failure_frac: float
    """Episodes that end in a failure while there are faults."""
    hand_in_frac: float
    """Episodes that are handed in while there are faults."""
    late_frac: float
    """Evaluation episodes that take too long."""
    idle_frac: float
    """Trajectories in which a policy samples nothing."""
    equal_frac: float
    """Groups whose rewards are all equal."""
    checkpoint_every: int
    num_pushed: int
    stop_at_s: float
    """A person stops the run then; infinity for never."""
    changes: tuple[Change, ...] = ()
    has_broken: bool = False
    """One more service is there all the time that fails every lease at once."""

    def __str__(self) -> str:
        tables = ", ".join(
            f"{name}: {p.num_steps} steps x {p.table.groups_per_batch} groups, {p.table.sampler.name}, "
            f"staleness {p.table.max_staleness}, lag {p.table.engine_lag}, {p.table.max_failed} may fail, "
            f"replay of {p.table.max_replayed} ({p.table.replay})"
            for name, p in self.plan.policies.items()
        )
        return (
            f"seed {self.seed}: groups of {self.plan.group_size}; {tables}; "
            f"{self.plan.max_attempts} attempts, {self.num_workers} services, "
            f"{'one more fails everything, ' if self.has_broken else ''}"
            f"evaluation {dict(self.plan.eval.sets)}, {self.plan.stop}, "
            f"{len(self.changes)} other schedules, {self.network}, "
            f"a fault every {self.fault_every_s:.0f} s until {self.faults_end_s:.0f} s; over by "
            f"{self.limit_s:.0f} s"
        )


@cache
def _table(
    group_size: int,
    groups: int,
    lag: int,
    slack: int,
    max_failed: int,
    sampler: str,
    replay: ReplayConfig,
    *,
    is_filtered: bool,
) -> TableConfig:
    return make_table(
        group_size=group_size,
        groups_per_batch=groups,
        max_staleness=lag + slack + replay.reserve,
        engine_lag=lag,
        max_failed=max_failed,
        sampler={"name": sampler},
        filters=[{"name": "zero_variance"}] if is_filtered else [],
        replay=replay.model_dump(),
    )


def _replay(seed: int, name: str) -> ReplayConfig:
    """Replay of a policy, in half of the tables; of its own chance, so that a seed keeps its other traits."""
    rng = random.Random(f"replay {seed} {name}")
    if rng.random() < 0.5:
        return ReplayConfig()
    replay = ReplayConfig(
        ratio=rng.choice((0.5, 1.0, 2.0)),
        size=rng.choice((1, 2, 4, 256)),
        select=rng.choice(("latest", "uniform", "priority")),
        max_uses=rng.choice((2, 2, 3)),
        reserve=rng.randint(1, 4),
    )
    return replay if rng.random() < 0.5 else replay.model_copy(update={"ratio": 0.0, "share": 0.5})


def _stop(rng: random.Random) -> StopPlan:
    """A stop before the last step, in half of the cases."""
    return rng.choice((
        *[StopPlan()] * 3,
        StopPlan(epochs=rng.randint(1, 2)),
        StopPlan(sequences=rng.randint(1, 12)),
        StopPlan(tokens=rng.randint(10, 120)),
    ))  # fmt: skip


def _changes(seed: int, plan: RunPlan) -> tuple[Change, ...]:
    """Other schedules, in a quarter of the runs; of their own chance: a seed keeps its other traits."""
    rng, stops = random.Random(f"changes {seed}"), random.Random(f"changed stops {seed}")
    changes: list[Change] = []
    for _ in range(rng.choice((0, 0, 0, 0, 0, 0, 1, 2))):
        more = {f"more{n}": EvalSetPlan(1, rng.randint(1, 2)) for n in range(rng.randint(0, 1))}
        sets = {**(plan.eval.sets if rng.random() < 0.7 else {}), **more}
        best = BestRule(next(iter(sets)), mode=rng.choice(("max", "min"))) if sets else None
        evaluation = EvalPlan(sets, every=rng.randint(1, 3), deadline_s=_DEADLINE_S, best=best)
        steps = {name: rng.randint(1, _MOST_STEPS) for name in plan.policies}
        at_s = rng.choice((rng.uniform(2.0, 90.0), float("inf")))
        changes.append(Change(at_s, Schedule(steps, evaluation, _stop(stops))))
    return tuple(sorted(changes, key=lambda change: change.at_s))


def _num_episodes(plan: RunPlan, schedules: Sequence[Schedule]) -> int:
    """Episodes of a run that has all of these schedules one after the other, at most."""
    return sum(
        schedule.steps[name] * (policy.table.groups_per_batch * plan.group_size)
        + (schedule.steps[name] + 1) * sum(s.num_tasks * s.samples for s in schedule.eval.sets.values())
        for schedule in schedules
        for name, policy in plan.policies.items()
    )


def make_scenario(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    group_size = rng.choice((1, 2, 2, 3))
    is_filtered = group_size > 1 and rng.random() < 0.5
    names = ("actor", "critic", "judge")[: rng.choice((1, 1, 2, 2, 3))]
    policies = {
        name: PolicyPlan(
            table=_table(
                group_size,
                rng.randint(1, 3),
                rng.randint(0, 2),
                rng.randint(0, 2),
                rng.randint(0, group_size - 1),
                rng.choice(("fifo", "sweep")),
                _replay(seed, name),
                is_filtered=is_filtered,
            ),
            num_steps=rng.randint(2, 5),
        )
        for name in names
    }
    sets = {
        f"held{n}": EvalSetPlan(rng.randint(1, 2), rng.randint(1, 2)) for n in range(rng.choice((0, 0, 1, 2)))
    }
    trouble = rng.choice((0.0, 0.3, 1.0, 1.0, 2.0))
    faults_end_s = rng.uniform(30.0, 120.0) if trouble else 0.0
    sources = {"train": rng.randint(3, 30), "more": rng.randint(0, 5)}
    equal_frac = (1.0 if rng.random() < 0.05 else 0.2) if is_filtered else 0.0
    plan = RunPlan(
        seed=seed,
        group_size=group_size,
        policies=policies,
        sources=sources,
        curators=(),
        eval=EvalPlan(sets=sets, every=rng.randint(1, 3), deadline_s=_DEADLINE_S),
        max_attempts=rng.choice((1, 2, 3, 3, 5)),
        max_lost=random.Random(f"lost {seed}").choice((0, 0, 1, 2)),  # apart: earlier seeds stay as they were
        admission=random.Random(f"admission {seed}").choice(("any", "any", "all")),
        stop=_stop(random.Random(f"stop {seed}")),
    )
    changes = _changes(seed, plan)
    num_episodes = _num_episodes(plan, [plan.schedule, *(change.schedule for change in changes)])
    if equal_frac == 1.0:
        num_episodes += 3 * group_size * sum(sources.values())  # Two passes over the tasks in vain end it.
    return Scenario(
        seed=seed,
        plan=plan,
        changes=changes,
        network=Network(*(trouble * rng.choice((0.0, 0.03, 0.1)) for _ in range(3))),
        num_workers=rng.randint(1, 3),
        fault_every_s=rng.uniform(4.0, 20.0) / trouble if trouble else float("inf"),
        faults_end_s=faults_end_s,
        limit_s=faults_end_s + 150.0 * (1 + len(changes)) + 9.0 * num_episodes,
        failure_frac=rng.choice((0.0, 0.05, 0.2)),
        hand_in_frac=random.Random(f"hand in {seed}").choice((0.0, 0.0, 0.3)),
        late_frac=random.Random(f"late {seed}").choice((0.0, 0.0, 0.1, 0.4)),
        idle_frac=rng.choice((0.0, 0.1)),
        equal_frac=equal_frac,
        checkpoint_every=rng.randint(1, 3),
        num_pushed=rng.choice((0, 0, 3)),
        has_broken=random.Random(f"broken {seed}").random() < 0.25,
        stop_at_s=rng.uniform(5.0, 60.0) if rng.random() < 0.03 else float("inf"),
    )

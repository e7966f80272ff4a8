"""Metrics of training episodes in the records of steps."""

import math
import random

import msgspec
import pytest

from astraflow.dataflow.core.commands import CommitStep, EpisodeFacts
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import EvalSetPlan
from astraflow.types import PERCENTILES, MetricItem, StepRecord
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta, make_table


def facts(
    *metrics: MetricItem, reward: float = 1.0, score: float = 1.0, duration_s: float = 1.0
) -> EpisodeFacts:
    """An episode with metrics."""
    made = make_facts(make_meta(reward=reward), score=score)
    return msgspec.structs.replace(made, metrics=metrics, duration_s=duration_s)


def trained(driver: Driver, episodes: list[EpisodeFacts], step: int = 0) -> StepRecord:
    """Answers leases with the episodes, then trains the step."""
    leases = driver.lease(len(episodes))
    for lease, episode in zip(leases, episodes, strict=True):
        driver.result(lease.id, episode)
    return committed(driver, step)


def committed(driver: Driver, step: int) -> StepRecord:
    """Trains and commits the step as the service does."""
    driver.take(step)
    driver.publish(step + 1)
    driver.apply(CommitStep(policy="actor", epoch=1, step=step, version=step + 1, metrics=()))
    return driver.core.steps("actor", step - 1)[0]


def values(record: StepRecord) -> dict[str, float]:
    return {item.name: item.value for item in record.metrics}


def started(**table: object) -> Driver:
    driver = Driver(make_core_plan(table=make_table(**table)))  # type: ignore[arg-type]
    driver.start()
    return driver


def test_percentiles_are_those_of_all_calls_of_all_episodes() -> None:
    """To 3.2 %, whatever the values are: they are counted in bins."""
    rng = random.Random(0)
    times = [[rng.lognormvariate(0, 2) for _ in range(rng.randrange(0, 9))] for _ in range(4)]
    episodes = [
        facts(*[MetricItem(f"call_s_{name}", time, name) for time in own for name in PERCENTILES])
        for own in times
    ]
    found = values(trained(started(), episodes))
    ordered = sorted(time for own in times for time in own)
    assert len(ordered) > 10
    for name, share in PERCENTILES.items():
        exact = ordered[math.ceil(share * len(ordered)) - 1]
        assert found[f"episode/call_s_{name}"] == pytest.approx(exact, rel=0.032)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.0, 0.0), (-3.0, 0.0), (1e-9, 0.0), (1e-6, 1e-6), (1e30, 1e12)]
)
def test_percentiles_have_a_range(value: float, expected: float) -> None:
    episodes = [facts(MetricItem("size", value, "p95")) for _ in range(4)]
    assert values(trained(started(), episodes))["episode/size"] == pytest.approx(expected, rel=0.032)


def test_a_percentile_lasts_over_a_restart_and_ends_with_its_step() -> None:
    driver = started()
    first = driver.lease(4)
    for lease, value in zip(first, (1.0, 2.0, 4.0, 64.0), strict=True):
        driver.result(lease.id, facts(MetricItem("size", value, "p50")))
    driver.core = Core.from_snapshot(make_core_plan(table=make_table()), driver.core.snapshot())
    assert values(committed(driver, 0))["episode/size"] == pytest.approx(2.0, rel=0.032)
    again = [facts(MetricItem("size", 8.0, "p50")) for _ in range(4)]
    assert values(trained(driver, again, step=1))["episode/size"] == pytest.approx(8.0, rel=0.032)


def test_the_record_of_a_step_holds_the_metrics_of_its_episodes_each_by_its_reduction():
    numbers = [3.0, 5.0, 4.0, 8.0]
    episodes = [
        facts(
            MetricItem("turns", number),
            MetricItem("calls", number, "sum"),
            MetricItem("longest", number, "max"),
            MetricItem("shortest", number, "min"),
            MetricItem("newest", number, "last"),
            score=number,
            duration_s=number,
        )
        for number in numbers
    ]
    assert values(trained(started(), episodes)) == {
        "episodes": 4.0,
        "episode_score_mean": 5.0,
        "episode_s_mean": 5.0,
        "episode_s_max": 8.0,
        "episode/turns": 5.0,
        "episode/calls": 20.0,
        "episode/longest": 8.0,
        "episode/shortest": 3.0,
        "episode/newest": 8.0,
    }


def test_episodes_of_filtered_groups_count_too():
    driver = started(filters=[{"name": "zero_variance"}])
    same = [facts(MetricItem("right", 1.0), reward=1.0)] * 2
    mixed = [facts(MetricItem("right", value), reward=value) for value in (0.0, 1.0)]
    record = trained(driver, [*same, *mixed, *mixed])
    assert values(record)["episode/right"] == 4 / 6
    assert record.num_samples == 4


def test_each_step_counts_only_the_episodes_since_the_step_before():
    driver = started()
    trained(driver, [facts(MetricItem("turns", 9.0))] * 4)
    assert values(trained(driver, [facts(MetricItem("turns", 1.0))] * 4, step=1))["episode/turns"] == 1.0


def test_the_number_of_metric_names_is_bounded_and_further_values_are_counted():
    driver = started()
    episodes = [facts(*(MetricItem(f"task-{idx}-{n}", 1.0) for n in range(100))) for idx in range(4)]
    found = values(trained(driver, episodes))
    assert sum(name.startswith("episode/") for name in found) == 128
    assert found["episode_metrics_left_out"] == 400 - 128


def test_a_name_of_full_length_still_fits_into_a_record():
    record = trained(started(), [facts(MetricItem("x" * 200, 1.0))] * 4)
    assert msgspec.json.decode(msgspec.json.encode(record), type=StepRecord) == record


def test_sums_survive_a_restart_from_a_snapshot():
    driver = started()
    leases = driver.lease(4)
    for lease in leases[:3]:
        driver.result(lease.id, facts(MetricItem("turns", 2.0)))
    driver.core = Core.from_snapshot(driver.plan, driver.core.snapshot())
    driver.result(leases[3].id, facts(MetricItem("turns", 6.0)))
    assert values(committed(driver, 0))["episode/turns"] == 3.0


def test_the_newest_records_are_the_last_step_of_each_policy_and_the_last_evaluation_of_each_set():
    plan = make_core_plan(eval_sets={"heldout": EvalSetPlan(num_tasks=1, samples=1)}, eval_every=1)
    driver = Driver(plan)
    driver.start()
    for step in range(2):
        driver.result(driver.lease(1)[0].id, make_facts(score=float(step)))
        trained(driver, [facts()] * 4, step=step)
    step_record, eval_record = driver.core.newest_records()
    assert step_record == driver.core.steps("actor")[1]
    assert eval_record == driver.core.evals()[1]

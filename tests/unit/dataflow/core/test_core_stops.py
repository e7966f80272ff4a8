"""A run's `stop`: epochs end the draws, sequences and tokens end the batches, and each is exact."""

import dataclasses

import pytest

from astraflow.dataflow.core.commands import ChangeSchedule, EvalFinished, GroupDrawn
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import EvalSetPlan, RunPlan, StopPlan
from astraflow.errors import RefusedError
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta, make_table


def plan_of(stop: StopPlan, **fields: object) -> RunPlan:
    """A run of a hundred steps, each of 2 groups of 2 samples with 4 trained tokens."""
    plan = make_core_plan(**{"num_steps": 100, **fields})  # type: ignore[arg-type]
    return dataclasses.replace(plan, stop=stop)


def started(stop: StopPlan, **fields: object) -> Driver:
    driver = Driver(plan_of(stop, **fields))
    driver.start()
    return driver


def replay(driver: Driver) -> None:
    """The commands give the same events again."""
    core = Core(driver.plan)
    for command, now_s, events in driver.commands:
        assert core.apply(command, now_s).events == events
    assert core.snapshot() == driver.core.snapshot()


def change_stop(driver: Driver, stop: StopPlan) -> None:
    driver.apply(ChangeSchedule(schedule=dataclasses.replace(driver.core.schedule, stop=stop)))


def test_an_epoch_draws_no_task_twice_and_ends_when_the_rest_fills_no_batch():
    driver = started(StopPlan(epochs=1), num_tasks=7)
    for _ in range(3):
        assert driver.core.state == "running"
        driver.run_step()
    fates = driver.fates()
    assert driver.core.state == "finished"
    assert driver.core.reason == "all steps up to the recipe's stop are done"
    assert (fates.drawn, fates.trained, fates.live) == (6, 6, 0)
    assert len({e.task_idx for e in driver.events if isinstance(e, GroupDrawn)}) == 6
    assert driver.status().num_steps == 3
    replay(driver)


def test_groups_that_fill_no_batch_are_cancelled_when_the_others_are_trained():
    driver = started(StopPlan(epochs=2), num_tasks=3, table=make_table(groups_per_batch=4, max_staleness=3))
    leases = driver.lease(100)
    assert sorted(e.task_idx for e in driver.events if isinstance(e, GroupDrawn)) == [0, 0, 1, 1, 2, 2]
    for lease in leases:
        driver.finish(lease)
    assert driver.core.state == "running"
    driver.train()
    fates = driver.fates()
    assert (driver.core.state, fates.drawn, fates.trained, fates.cancelled) == ("finished", 6, 4, 2)
    replay(driver)


def test_groups_without_a_use_count_as_drawn():
    """Filtered groups leave too few for a second batch: the run ends without one more draw."""
    table = make_table(filters=[{"name": "zero_variance"}], max_staleness=9)
    driver = started(StopPlan(epochs=1), num_tasks=4, table=table)
    for lease in driver.lease(4):
        driver.finish(lease)
    driver.train()
    assert driver.core.state == "running"
    for lease in driver.lease(4):
        driver.finish(lease, reward=1.0)
    fates = driver.fates()
    assert (driver.core.state, fates.drawn, fates.trained) == ("finished", 4, 2)
    assert fates.filtered + fates.cancelled == 2
    replay(driver)


@pytest.mark.parametrize(
    ("stop", "num_steps"),
    [
        (StopPlan(sequences=4), 1),
        (StopPlan(sequences=9), 3),
        (StopPlan(tokens=33), 3),
        (StopPlan(sequences=9, tokens=16), 1),
        (StopPlan(sequences=4_000), 5),
    ],
)
def test_the_batch_that_reaches_the_number_is_the_last_one(stop: StopPlan, num_steps: int):
    fields = {"num_steps": 5} if num_steps == 5 else {}
    driver = started(stop, **fields)
    for _ in range(num_steps):
        assert driver.core.state == "running"
        driver.run_step()
    assert driver.core.state == "finished"
    records = driver.core.steps("actor")
    assert len(records) == num_steps
    assert sum(record.num_samples for record in records) == 4 * num_steps
    replay(driver)


def test_a_trainer_that_asks_for_a_batch_after_the_last_one_is_told_so():
    driver = started(StopPlan(sequences=4))
    driver.finish_groups(2)
    assert driver.take(0) is not None
    with pytest.raises(RefusedError, match="takes 1 steps") as refused:
        driver.take(1)
    assert refused.value.code == "finished"
    assert driver.lease(4) == ()


def test_the_last_version_is_evaluated():
    """It is if the stop is known when the version is published, and if it becomes known later."""
    sets = {"held": EvalSetPlan(num_tasks=1, samples=1)}
    for stop, num_tasks in ((StopPlan(sequences=4), 9), (StopPlan(epochs=1), 3)):
        driver = started(stop, num_tasks=num_tasks, eval_sets=sets, eval_every=50)
        (lease,) = driver.lease()
        driver.result(lease.id, make_facts(make_meta()))
        driver.run_step()
        for lease in driver.lease(8):
            assert driver.core.state == "running"
            if lease.kind == "eval":
                driver.result(lease.id, make_facts(make_meta()))
            else:
                driver.fail(lease, is_retryable=False)
        for lease in driver.lease(1):
            driver.result(lease.id, make_facts(make_meta()))
        assert [e.record.step for e in driver.events if isinstance(e, EvalFinished)] == [0, 1]
        assert driver.core.state == "finished"
        replay(driver)


def test_a_dropped_batch_does_not_count():
    driver = started(StopPlan(sequences=8), table=make_table(max_staleness=5))
    driver.run_step()
    driver.finish_groups(2)
    driver.take(1)
    assert driver.status().num_steps == 2
    driver.drop_batch()
    assert driver.status().num_steps == 100
    driver.attach(durable_step=1)
    driver.publish(1, has_files=True)
    driver.run_step()
    assert driver.core.state == "finished"
    replay(driver)


def test_a_run_goes_on_with_a_later_stop_and_stays_finished_with_the_same():
    driver = started(StopPlan(epochs=1), num_tasks=4)
    for _ in range(2):
        driver.run_step()
    assert driver.core.state == "finished"
    change_stop(driver, StopPlan(epochs=1))
    assert driver.core.state == "finished"
    change_stop(driver, StopPlan(epochs=2))
    assert driver.core.state == "running"
    driver.attach(durable_step=2)
    driver.publish(2, has_files=True)
    for _ in range(2):
        driver.run_step()
    assert (driver.core.state, driver.fates().drawn, driver.fates().trained) == ("finished", 8, 8)
    replay(driver)


def test_the_draws_of_a_restored_core_go_on_where_they_were():
    driver = started(StopPlan(epochs=1), num_tasks=5)
    driver.run_step()
    driver.core = Core.from_snapshot(driver.plan, driver.core.snapshot())
    driver.run_step()
    assert (driver.core.state, driver.fates().drawn) == ("finished", 4)


def test_each_policy_has_its_own_last_step():
    driver = started(StopPlan(sequences=8), policies=("actor", "critic"), table=make_table(max_staleness=9))
    for _ in range(2):
        driver.finish_groups(2)
        driver.train("actor")
    assert (driver.status("actor").num_steps, driver.status("critic").num_steps) == (2, 100)
    for _ in range(2):
        driver.train("critic")
    assert driver.core.state == "finished"
    replay(driver)

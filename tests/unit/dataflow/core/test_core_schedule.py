"""The part of the plan that may change: steps, evaluation, and which version is kept as the best."""

import dataclasses

import pytest

from astraflow.dataflow.core.commands import (
    ChangeSchedule,
    EvalFinished,
    RunEnded,
    RunResumed,
    ScheduleChanged,
    StopRun,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import BestRule, EvalSetPlan, RunPlan, Schedule
from astraflow.errors import RefusedError
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta

HELD = {"held": EvalSetPlan(num_tasks=1, samples=1)}


def longer(plan: RunPlan, steps: int, **evaluation: object) -> Schedule:
    """The plan's schedule, with other numbers of steps and changes to the evaluation."""
    return Schedule(
        dict.fromkeys(plan.policies, steps),
        dataclasses.replace(plan.eval, **evaluation),  # type: ignore[arg-type]
    )


def change(driver: Driver, schedule: Schedule) -> None:
    driver.apply(ChangeSchedule(schedule=schedule))


def replay(driver: Driver) -> None:
    """The commands give the same events again, from the plan that the run began with."""
    core = Core(driver.plan)
    for command, now_s, events in driver.commands:
        assert core.apply(command, now_s).events == events
    assert core.snapshot() == driver.core.snapshot()


def evaluate(driver: Driver, score: float) -> None:
    """Answers the evaluation leases that are due: they go out before all others."""
    for _ in range(sum(size.num_tasks * size.samples for size in driver.core.schedule.eval.sets.values())):
        (lease,) = driver.lease()
        assert lease.kind == "eval"
        driver.result(lease.id, make_facts(make_meta(), score=score))


def run_steps(driver: Driver, steps: range, scores: dict[int, float]) -> None:
    """Trains the steps; the evaluation after `n` steps gives `scores[n]`."""
    for step in steps:
        driver.run_step()
        if step + 1 in scores:
            evaluate(driver, scores[step + 1])


def test_a_finished_run_goes_on_where_it_was_when_it_gets_more_steps():
    driver = Driver(make_core_plan(num_steps=2))
    driver.start()
    driver.run_step()
    driver.run_step()
    assert driver.core.state == "finished"
    drawn = driver.fates().drawn
    change(driver, longer(driver.plan, 4))
    assert driver.last.events == (ScheduleChanged(schedule=longer(driver.plan, 4)), RunResumed())
    assert driver.core.state == "running"
    session = driver.attach(durable_step=2)
    assert (session.step, session.next_version, session.num_steps) == (2, 3, 4)
    driver.publish(2, has_files=True)
    driver.run_step()
    driver.run_step()
    assert driver.core.state == "finished"
    assert [record.step for record in driver.core.steps("actor")] == [0, 1, 2, 3]
    assert driver.fates().trained == 8
    assert driver.fates().drawn >= drawn + 4
    replay(driver)


def test_the_tasks_go_on_after_those_of_the_finished_run():
    """A run of four steps draws the same tasks, whether it was told so at once or later."""
    tasks: list[list[int]] = []
    for is_extended in (False, True):
        driver = Driver(make_core_plan(num_steps=2 if is_extended else 4))
        driver.start()
        driver.run_step()
        driver.run_step()
        if is_extended:
            change(driver, longer(driver.plan, 4))
            driver.attach(durable_step=2)
            driver.publish(2, has_files=True)
        driver.run_step()
        driver.run_step()
        tasks.append([e.task_idx for e in driver.events if type(e).__name__ == "GroupDrawn"])
    assert tasks[0] == tasks[1]


def test_a_finished_run_without_more_steps_stays_finished():
    driver = Driver(make_core_plan(num_steps=1))
    driver.start()
    driver.run_step()
    change(driver, longer(driver.plan, 1, every=7))
    assert driver.core.state == "finished"
    assert driver.core.schedule.eval.every == 7
    replay(driver)


def test_a_failed_run_waits_for_its_resume():
    driver = Driver(make_core_plan(num_steps=1))
    driver.start()
    driver.apply(StopRun(reason="broken", is_failure=True))
    change(driver, longer(driver.plan, 5))
    assert driver.core.state == "failed"


def test_a_run_with_fewer_steps_ends_when_they_are_done():
    driver = Driver(make_core_plan(num_steps=9))
    driver.start()
    driver.run_step()
    driver.run_step()
    change(driver, longer(driver.plan, 3))
    driver.attach(durable_step=2)
    driver.publish(2, has_files=True)
    assert driver.core.state == "running"
    driver.run_step()
    assert driver.core.reason == "all steps are done"
    replay(driver)


def test_a_run_that_did_more_steps_than_it_has_now_ends_with_the_next_publication():
    driver = Driver(make_core_plan(num_steps=9))
    driver.start()
    driver.run_step()
    driver.run_step()
    change(driver, longer(driver.plan, 1))
    driver.attach(durable_step=2)
    driver.publish(2, has_files=True)
    assert driver.core.reason == "all steps are done"
    assert sum(isinstance(event, RunEnded) for event in driver.events) == 1


def test_one_policy_may_train_longer_than_the_other():
    driver = Driver(make_core_plan(policies=("a", "b"), num_steps=1))
    driver.start()
    driver.run_step("a")
    driver.run_step("b")
    assert driver.core.state == "finished"
    change(driver, Schedule({"a": 1, "b": 2}, driver.plan.eval))
    for policy in ("a", "b"):
        driver.attach(policy, 1)
        driver.publish(1, policy, has_files=True)
    driver.run_step("b")
    assert driver.core.state == "finished"
    assert [driver.status(policy).step for policy in ("a", "b")] == [1, 2]


def test_a_schedule_of_other_policies_is_refused():
    driver = Driver(make_core_plan())
    with pytest.raises(RefusedError, match="the schedule is for policies b; the run trains actor"):
        change(driver, Schedule({"b": 1}, driver.plan.eval))


def test_a_snapshot_holds_the_schedule():
    driver = Driver(make_core_plan(num_steps=4))
    driver.start()
    change(driver, longer(driver.plan, 7, every=3))
    data = driver.core.snapshot()
    restored = Core.from_snapshot(driver.plan, data)
    assert restored.schedule == driver.core.schedule == longer(driver.plan, 7, every=3)
    assert restored.snapshot() == data


def test_the_evaluation_follows_the_schedule_of_its_time():
    driver = Driver(make_core_plan(num_steps=6, eval_sets=HELD, eval_every=2))
    driver.start()
    evaluate(driver, 0.0)
    run_steps(driver, range(3), {2: 0.0})
    change(driver, longer(driver.plan, 6, every=5))
    driver.attach(durable_step=3)
    driver.publish(3, has_files=True)
    run_steps(driver, range(3, 6), {5: 0.0, 6: 0.0})
    assert [record.step for record in driver.core.evals()] == [0, 2, 5, 6]
    assert driver.core.state == "finished"
    replay(driver)


def test_an_open_round_of_a_set_that_went_is_dropped_and_the_others_stay():
    sets = HELD | {"other": EvalSetPlan(num_tasks=2, samples=1)}
    driver = Driver(make_core_plan(num_steps=2, eval_sets=sets))
    driver.start()
    leases = {lease.eval_set: lease for lease in driver.lease(3) if lease.kind == "eval"}
    assert leases.keys() == {"held", "other"}
    change(driver, longer(driver.plan, 2, sets=HELD))
    assert [round_id for round_id, _ in driver.core.eval_deadlines()] == [leases["held"].group_id]
    assert driver.result(leases["other"].id, make_facts(make_meta(), score=1.0)).status != "accepted"
    driver.result(leases["held"].id, make_facts(make_meta(), score=1.0))
    assert [record.eval_set for record in driver.core.evals()] == ["held"]
    replay(driver)


def test_a_round_whose_set_got_another_size_is_due_again():
    driver = Driver(make_core_plan(num_steps=2, eval_sets=HELD))
    driver.start()
    change(driver, longer(driver.plan, 2, sets={"held": EvalSetPlan(num_tasks=1, samples=3)}))
    assert driver.core.eval_deadlines() == ()
    driver.attach()
    driver.publish(0, has_files=True)
    evaluate(driver, 1.0)
    assert [(r.step, r.version, r.num_samples) for r in driver.core.evals()] == [(0, 1, 3)]
    replay(driver)


# --- the best version -----------------------------------------------------------------------------


def best_plan(num_steps: int = 8, **rule: object) -> RunPlan:
    plan = make_core_plan(num_steps=num_steps, eval_sets=HELD, eval_every=1)
    best = BestRule("held", **rule)  # type: ignore[arg-type]
    return dataclasses.replace(plan, eval=dataclasses.replace(plan.eval, best=best))


def marks(driver: Driver) -> list[bool]:
    records = [event.record for event in driver.events if isinstance(event, EvalFinished)]
    return [bool(record.best_by) for record in records]


def test_the_best_version_stays_until_another_is_better():
    driver = Driver(best_plan())
    driver.start()
    evaluate(driver, 0.1)
    run_steps(driver, range(6), {1: 0.5, 2: 0.9, 3: 0.3, 4: 0.9, 5: 0.2, 6: 0.1})
    assert marks(driver) == [True, True, True, False, False, False, False]
    kept = {manifest.version for manifest in driver.core.versions("actor").manifests}
    assert 2 in kept
    assert 3 not in kept
    run_steps(driver, range(6, 7), {7: 1.0})
    run_steps(driver, range(7, 8), {})
    assert 2 not in {manifest.version for manifest in driver.core.versions("actor").manifests}
    replay(driver)


def test_the_smallest_value_may_be_the_best():
    driver = Driver(best_plan(mode="min"))
    driver.start()
    evaluate(driver, 0.4)
    run_steps(driver, range(2), {1: 0.5, 2: 0.2})
    assert marks(driver) == [True, False, True]
    assert driver.core.evals()[-1].best_by == "min held"


def test_the_best_version_may_be_chosen_by_a_metric_of_the_round():
    driver = Driver(best_plan(metric="pass@1"))
    driver.start()
    evaluate(driver, 0.0)
    run_steps(driver, range(2), {1: 1.0, 2: 1.0})
    assert marks(driver) == [True, True, False]
    assert driver.core.evals()[1].best_by == "max held/pass@1"


def test_a_metric_that_no_round_has_keeps_nothing():
    driver = Driver(best_plan(metric="unheard-of"))
    driver.start()
    evaluate(driver, 1.0)
    assert marks(driver) == [False]


def test_the_best_version_survives_a_snapshot_and_the_end():
    driver = Driver(best_plan(num_steps=2))
    driver.start()
    evaluate(driver, 0.9)
    run_steps(driver, range(2), {1: 0.5, 2: 0.1})
    assert driver.core.state == "finished"
    driver.core = Core.from_snapshot(driver.plan, driver.core.snapshot())
    change(driver, dataclasses.replace(longer(driver.plan, 3), eval=driver.plan.eval))
    driver.attach(durable_step=2)
    driver.publish(2, has_files=True)
    run_steps(driver, range(2, 3), {3: 0.8})
    assert 0 in {manifest.version for manifest in driver.core.versions("actor").manifests}


def test_a_changed_rule_starts_the_choice_over():
    driver = Driver(best_plan())
    driver.start()
    evaluate(driver, 0.9)
    change(driver, longer(driver.plan, 8, best=BestRule("held", mode="min")))
    driver.attach()
    driver.publish(0, has_files=True)
    run_steps(driver, range(1), {1: 0.95})
    assert [record.best_by for record in driver.core.evals()] == ["max held", "min held"]
    assert 0 not in {manifest.version for manifest in driver.core.versions("actor").manifests}
    replay(driver)

"""Services that fail: set aside, tried again, and never the end of a run in which others work."""

import pytest

from astraflow.dataflow.core.commands import (
    AttemptFailed,
    ExpireLeases,
    ResumeRun,
    RunResumed,
    ServiceRestored,
    ServiceSetAside,
    StopRun,
)
from astraflow.dataflow.core.core import Core
from astraflow.dataflow.core.plan import EvalSetPlan
from astraflow.errors import FencedError, RefusedError
from astraflow.types import Failure
from drivers.core_driver import Driver, make_core_plan, make_facts, make_table


def started(**plan: object) -> Driver:
    """A run whose version 0 is published, with service w0."""
    driver = Driver(make_core_plan(**plan))  # type: ignore[arg-type]
    driver.start()
    return driver


def strike(driver: Driver, worker_id: str = "w0") -> None:
    """The service gets a lease, after all the rest that it may need, and fails it."""
    driver.now_s += 60.0
    driver.fail(driver.lease(1, worker_id)[0])


def test_a_service_that_fails_every_lease_does_not_end_a_run_in_which_another_works():
    driver = started(num_tasks=1000, num_steps=3)
    driver.join("broken")
    while driver.core.state == "running":
        for _ in range(8):  # It is free at once; the other one needs longer.
            for lease in driver.lease(4, "broken"):
                driver.fail(lease, is_retryable=False)
        status = driver.status()
        for lease in driver.lease(2):
            driver.finish(lease)
        if status.num_ready_groups >= 2 and driver.take(status.step) is not None:
            driver.publish(status.step + 1)
            driver.commit(status.step)
    assert driver.core.reason == "all steps are done"
    assert driver.fates().failed <= 6, "three times the two groups that it can hold"
    assert driver.core.is_set_aside("broken")
    assert not driver.core.is_set_aside("w0")


def test_leases_that_fail_together_are_one_strike_and_a_good_one_clears_it():
    driver = started(num_tasks=1000)
    for lease in driver.lease(4):
        driver.fail(lease)
    assert driver.core.failure_streak("w0").strikes == 1
    first, second = driver.lease(2)
    driver.fail(first)
    assert driver.core.failure_streak("w0").strikes == 2
    driver.finish(second)
    assert driver.core.failure_streak("w0").strikes == 0


def test_a_service_that_is_set_aside_rests_longer_each_time_and_then_gets_one_lease_until_it_succeeds():
    driver = started(num_tasks=1000)
    driver.join("other")
    for _ in range(3):
        driver.fail(driver.lease(1)[0])
    told = [event for event in driver.events if isinstance(event, ServiceSetAside)]
    assert [(e.name, e.strikes, e.last_failure) for e in told] == [("w0", 3, "Boom: it broke")]
    for rest_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0):
        struck_s = driver.now_s
        assert driver.core.next_chance_s("w0", struck_s) == struck_s + rest_s
        driver.now_s = struck_s + rest_s - 1.5
        assert driver.lease(4) == (), rest_s
        assert [r.kind for r in driver.core.why_no_lease(driver.served(), "w0")] == ["set_aside"]
        driver.now_s = struck_s + rest_s - 1.0
        (probe,) = driver.lease(4)
        assert driver.lease(4) == (), "one until it is known how it ends"
        driver.fail(probe)
    driver.now_s += 60.0
    driver.finish(driver.lease(4)[0])
    assert driver.events[-1] == ServiceRestored(worker_id="w0", name="w0")
    assert len(driver.lease(2)) == 2


def test_setting_the_clock_back_does_not_prolong_a_rest():
    driver = started(num_tasks=1000)
    for _ in range(8):
        strike(driver)
        driver.join("other")
    driver.now_s -= 3600.0
    assert len(driver.lease(4)) == 1


def test_an_episode_goes_to_another_service_than_the_one_that_failed_it():
    driver = started()
    driver.join("other")
    driver.lease(1, "other")
    (lease,) = driver.lease(1)
    driver.fail(lease)
    assert lease.id[:-1] + "1" not in [other.id for other in driver.lease(8)]
    assert driver.core.is_restricted("w0")
    assert not driver.core.is_restricted("other")
    assert driver.lease(1, "other")[0].id == lease.id[:-1] + "1"


def test_an_episode_comes_back_to_the_service_that_failed_it_when_no_other_is_at_work():
    driver = started()
    driver.join("idle")
    driver.fail(driver.lease(1)[0])
    assert driver.lease(1)[0].id == "0.0.1"


def test_an_episode_does_not_wait_forever_for_another_service():
    driver = started()
    driver.join("other")
    driver.lease(1, "other")
    driver.fail(driver.lease(1)[0])
    failed_s = driver.now_s
    assert driver.core.next_chance_s("w0", driver.now_s) == failed_s + 30.0
    driver.lease(8)
    driver.now_s = failed_s + 30.0
    assert driver.lease(1)[0].attempt == 1


def test_a_service_that_was_lost_with_its_leases_keeps_its_strikes_when_it_comes_back():
    driver = started(num_tasks=1000)
    for _ in range(3):
        driver.fail(driver.lease(1)[0])
    driver.drop()
    driver.join_as("w0.again", "w0")
    assert driver.core.is_set_aside("w0.again")


def test_a_final_failure_on_a_service_that_is_set_aside_is_retried():
    driver = started(num_tasks=1000)
    for _ in range(3):
        driver.fail(driver.lease(1)[0])
    driver.now_s += 60.0
    (lease,) = driver.lease(1)
    driver.fail(lease, is_retryable=False)
    (failed,) = [e for e in driver.last.events if isinstance(e, AttemptFailed)]
    assert failed.is_final == (lease.attempt == 2)


def test_when_every_service_fails_the_run_ends_and_names_them_with_their_errors():
    driver = started(num_tasks=1000)
    driver.join("w1")
    while driver.core.state == "running":
        assert driver.now_s < 5000
        for worker_id in ("w0", "w1"):
            if driver.core.state == "running" and (leases := driver.lease(1, worker_id)):
                failure = Failure(error_class=f"Boom{worker_id}", message="it broke")
                driver.result(leases[0].id, failure)
    assert "every rollout service fails" in driver.core.reason
    for part in ("w0 8 times in a row (Boomw0: it broke)", "w1", "Boomw1"):
        assert part in driver.core.reason


def test_a_run_that_worked_has_more_patience_with_its_only_service():
    driver = started(num_tasks=1000)
    driver.finish(driver.lease(1)[0])
    for num in range(10):
        assert driver.core.state == "running", num
        strike(driver)
    assert driver.core.state == "failed"


def test_the_only_service_that_is_left_does_not_end_a_run_in_which_another_worked_just_now():
    driver = started(num_tasks=1000, table=make_table(groups_per_batch=40))
    driver.join("healthy")
    for _ in range(11):
        strike(driver)
        driver.finish(driver.lease(1, "healthy")[0])
    driver.drop("healthy")
    assert driver.core.state == "running"


# --- a run that failed goes on --------------------------------------------------------------------


def failed(driver: Driver) -> Driver:
    """The run after its only service failed for too long."""
    while driver.core.state == "running":
        strike(driver)
    return driver


def test_a_run_that_failed_is_resumed_with_its_counters_at_0_and_does_all_its_steps():
    driver = started(num_tasks=1000, num_steps=3)
    driver.run_step()
    driver.finish_groups(2)
    assert driver.take(1) is not None, "a batch that is cancelled with the run"
    failed(driver)
    fates = driver.fates()
    assert (fates.live, fates.trained) == (0, 2)
    driver.apply(ResumeRun())
    assert driver.events[-1] == RunResumed()
    assert (driver.core.state, driver.core.reason) == ("running", "")
    assert driver.core.failure_streak("w0").strikes == 0
    driver.attach(durable_step=1)
    driver.publish(1, has_files=True)
    driver.run_step()
    driver.run_step()
    assert driver.core.reason == "all steps are done"
    assert driver.fates().trained == 6
    replayed = Core(driver.plan)
    for command, now_s, events in driver.commands:
        assert replayed.apply(command, now_s).events == events
    assert replayed.snapshot() == driver.core.snapshot()


def test_the_trainer_of_a_run_that_failed_is_fenced_by_the_resume():
    driver = started(num_tasks=1000)
    driver.finish_groups(2)
    driver.take(0)
    driver.publish(1)
    failed(driver)
    driver.apply(ResumeRun())
    with pytest.raises(FencedError):
        driver.commit(0)


def test_an_evaluation_that_was_open_when_the_run_failed_is_due_again():
    driver = started(num_tasks=1000, eval_sets={"heldout": EvalSetPlan(1, 1)})
    driver.apply(StopRun(reason="broken", is_failure=True))
    driver.apply(ResumeRun())
    driver.attach()
    driver.publish(0, has_files=True)
    (lease,) = [lease for lease in driver.lease(1) if lease.kind == "eval"]
    driver.result(lease.id, make_facts(score=0.5))
    assert [record.score_mean for record in driver.core.evals()] == [0.5]


def test_resuming_leaves_a_running_run_alone_and_is_refused_for_a_finished_one():
    driver = started(num_steps=1)
    before = driver.core.snapshot()
    assert driver.apply(ResumeRun()).events == ()
    assert driver.core.snapshot() == before
    driver.run_step()
    with pytest.raises(RefusedError, match="all steps are done"):
        driver.apply(ResumeRun())


def test_strikes_survive_a_snapshot():
    driver = started(num_tasks=1000, table=make_table(group_size=1))
    driver.join("other")
    driver.lease(1, "other")
    for _ in range(3):
        driver.fail(driver.lease(1)[0])
    restored = Core.from_snapshot(driver.plan, driver.core.snapshot())
    assert restored.snapshot() == driver.core.snapshot()
    assert restored.is_set_aside("w0")
    assert restored.is_restricted("w0")


def test_a_lease_that_never_arrived_does_not_count_against_its_service():
    driver = started(num_tasks=1000)
    driver.join("other")
    driver.lease(1, "other")
    for _ in range(4):
        leases = driver.lease(1)
        driver.apply(ExpireLeases(lease_ids=tuple(lease.id for lease in leases), never_arrived=True))
        assert driver.core.failure_streak("w0").strikes == 0
        assert not driver.core.is_restricted("w0")

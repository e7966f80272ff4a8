"""Who gets which lease, and what happens to leases whose service is gone."""

from dataclasses import replace

import pytest

from astraflow.dataflow.core.commands import AddTasks, AttemptFailed, GroupDrawn, IssueLeases
from astraflow.errors import RefusedError
from astraflow.types import ServedVersions, Task, WaitReason
from drivers.core_driver import Driver, make_core_plan, make_table


def started(**plan: object) -> Driver:
    """A run whose version 0 is published, with service w0."""
    driver = Driver(make_core_plan(**plan))  # type: ignore[arg-type]
    driver.start()
    return driver


def ids(leases: tuple[object, ...]) -> list[str]:
    return [lease.id for lease in leases]  # type: ignore[attr-defined]


def test_nothing_is_leased_before_version_0_is_published():
    driver = Driver(make_core_plan())
    driver.join()
    driver.attach()
    assert driver.lease(4, served=(ServedVersions(policy="actor", versions=(0,)),)) == ()
    assert driver.core.why_no_lease(()) == (WaitReason(kind="unpublished", policy="actor", version=0),)


def test_a_service_without_a_version_gets_nothing_even_if_the_lag_would_reach_below_0():
    driver = started(table=make_table(engine_lag=1))
    assert driver.lease(4, served=()) == ()
    assert driver.core.why_no_lease(()) == (WaitReason(kind="behind", policy="actor", version=0),)


def test_the_episodes_of_a_group_are_leased_together_with_seeds_of_their_own():
    driver = started(table=make_table(group_size=4))
    leases = driver.lease(4)
    assert ids(leases) == ["0.0.0", "0.1.0", "0.2.0", "0.3.0"]
    assert len({lease.seed for lease in leases}) == 4
    assert len({lease.task_idx for lease in leases}) == 1
    assert leases[0].source == "train"


def test_a_service_within_the_lag_is_served_and_one_beyond_is_not():
    driver = started(table=make_table(max_staleness=2, engine_lag=1))
    driver.run_step()
    driver.run_step()
    assert driver.lease(1, served=driver.served(actor=0)) == ()
    behind = WaitReason(kind="behind", policy="actor", version=1, served=0)
    assert driver.core.why_no_lease(driver.served(actor=0)) == (behind,)
    assert len(driver.lease(1, served=driver.served(actor=1))) == 1


def test_every_trained_policy_must_be_served():
    driver = started(policies=("solver", "verifier"))
    assert driver.lease(1, served=(ServedVersions(policy="solver", versions=(0,)),)) == ()
    assert len(driver.lease(1)) == 1


def test_draws_stop_when_all_tickets_are_charged():
    driver = started()  # (1 - 0 + 1) * 2 = 4 tickets
    assert len(driver.lease(100)) == 4 * 2
    assert driver.lease(1) == ()
    assert driver.status().num_tickets == driver.status().max_tickets == 4
    assert driver.core.why_no_lease(driver.served()) == (WaitReason(kind="tickets", policy="actor", num=4),)


def test_no_more_groups_are_drawn_than_the_last_steps_can_use():
    driver = started(num_steps=1)
    assert len(driver.lease(100)) == 2 * 2


def test_a_filtered_group_is_replaced_in_the_last_step():
    table = make_table(filters=[{"name": "zero_variance"}])
    driver = started(num_steps=1, table=table)
    for lease in driver.lease(100)[:2]:
        driver.finish(lease, reward=1.0)
    assert driver.fates().filtered == 1
    assert len(driver.lease(100)) == 2


def test_services_that_ask_for_one_episode_at_a_time_each_keep_to_their_own_group():
    driver = started(table=make_table(group_size=4))
    driver.join("w1")
    leased = [driver.lease(1, worker_id)[0] for worker_id in ("w0", "w1") * 4]
    assert [lease.group_id for lease in leased] == [0, 1] * 4
    assert driver.fates().drawn == 2


def test_the_rest_of_a_lost_services_group_comes_before_a_new_draw():
    driver = started(table=make_table(group_size=4))
    driver.join("w1")
    lease = driver.lease(1, "w0")[0]
    driver.finish(lease)
    driver.drop("w0")
    assert ids(driver.lease(4, "w1")) == ["0.1.0", "0.2.0", "0.3.0", "1.0.0"]


def test_the_rest_of_another_services_group_is_taken_over_instead_of_idling():
    driver = started(table=make_table(group_size=4, max_staleness=0))  # two tickets
    driver.join("w1")
    driver.lease(1, "w0")
    assert ids(driver.lease(100, "w1")) == [f"1.{i}.0" for i in range(4)] + ["0.1.0", "0.2.0", "0.3.0"]
    assert driver.lease(1, "w0") == ()


@pytest.mark.parametrize(
    "sampler", [{"name": "fifo"}, {"name": "window", "span": 2}], ids=lambda sampler: sampler["name"]
)
def test_the_rest_of_a_group_that_holds_up_the_trainer_comes_before_new_draws(sampler: dict[str, object]):
    # Each complete group above two is evicted and gives its ticket back: there is always something to draw.
    table = make_table(sampler=sampler, remover={"name": "capacity", "num_groups": 2})
    driver = started(table=table)
    driver.join("w1")
    driver.finish(driver.lease(1, "w0")[0])  # its other episode waits for w0, which asks for nothing more
    for _ in range(3):
        leases = driver.lease(4, "w1")
        if "0.1.0" in ids(leases):
            break
        for lease in leases:
            driver.finish(lease)
    assert ids(leases)[0] == "0.1.0"
    for lease in leases:
        driver.finish(lease)
    assert driver.take(0) is not None


def test_a_group_that_holds_up_nobody_stays_where_it_began():
    driver = started(table=make_table(max_staleness=3))
    driver.join("w1")
    driver.lease(1, "w0")
    for lease in driver.lease(2, "w1"):
        driver.finish(lease)
    assert [lease.group_id for lease in driver.lease(2, "w1")] == [2, 2]  # one group is no batch


def test_a_group_that_failed_while_it_waited_for_a_retry_is_forgotten():
    driver = started()
    first, second = driver.lease(2)
    driver.fail(first)
    driver.fail(second, is_retryable=False)
    assert driver.fate_of(0) == ["failed"]
    assert ids(driver.lease(1)) == ["1.0.0"]


def test_a_retry_comes_before_everything_but_evaluation():
    driver = started()
    leases = driver.lease(3)
    driver.fail(leases[0])
    assert ids(driver.lease(2)) == ["0.0.1", "1.1.0"]


def test_a_retry_samples_with_the_seed_of_the_first_attempt():
    driver = started()
    first = driver.lease(1)[0]
    driver.fail(first)
    again = driver.lease(1)[0]
    assert (again.episode_idx, again.attempt, again.seed) == (first.episode_idx, 1, first.seed)


def test_the_leases_of_a_lost_service_go_out_again():
    driver = started()
    driver.join("w1")
    driver.lease(2, "w0")
    driver.drop("w0")
    assert ids(driver.lease(2, "w1")) == ["0.0.1", "0.1.1"]
    failed = [e for e in driver.events if isinstance(e, AttemptFailed)]
    assert {(e.error_class, e.is_final) for e in failed} == {("worker_lost", False)}


def test_losing_a_service_leaves_the_groups_of_others_alone():
    driver = started()
    driver.join("w1")
    driver.lease(2, "w0")
    driver.lease(2, "w1")
    driver.drop("w0")
    assert driver.core.worker_leases("w1") == ("1.0.0", "1.1.0")
    assert driver.fates().live == 2


def test_an_expired_lease_is_revoked_and_goes_out_again():
    driver = started()
    lease = driver.lease(1)[0]
    assert driver.core.revoked_leases("w0", [lease.id]) == ()
    driver.expire(lease)
    assert driver.core.revoked_leases("w0", [lease.id]) == (lease.id,)
    assert driver.core.lease(lease.id) is None
    assert "leases" in driver.last.wakes
    assert ids(driver.lease(1)) == ["0.0.1"]


def test_an_expired_lease_expires_once():
    driver = started()
    lease = driver.lease(1)[0]
    driver.expire(lease)
    driver.expire(lease)
    assert driver.last.events == ()


def test_an_unknown_service_must_register():
    driver = started()
    with pytest.raises(RefusedError) as refused:
        driver.apply(IssueLeases(worker_id="w9", num_free=1, served=()))
    assert (refused.value.code, refused.value.status) == ("unknown_worker", 404)


def test_joining_again_keeps_the_leases():
    driver = started()
    driver.lease(2)
    driver.join("w0")
    assert len(driver.core.worker_leases("w0")) == 2
    assert [worker.worker_id for worker in driver.core.workers()] == ["w0"]


def test_an_answer_without_leases_changes_nothing():
    driver = started()
    driver.lease(100)
    before = driver.core.snapshot()
    assert driver.lease(5) == ()
    assert driver.last.events == ()
    assert driver.core.snapshot() == before


# --- several policies -----------------------------------------------------------------------------


def test_a_policy_without_a_ticket_is_unadmitted_at_once_and_the_other_trains_on():
    tables = {"slow": make_table(max_staleness=0), "fast": make_table(max_staleness=1)}
    driver = started(tables=tables)
    driver.lease(100)
    drawn = [e for e in driver.events if isinstance(e, GroupDrawn)]
    assert [e.admitted for e in drawn] == [("slow", "fast")] * 2 + [("fast",)] * 2
    assert driver.fates("slow").unadmitted == 2
    assert driver.fates("slow").drawn == driver.fates("fast").drawn == 4


def test_with_admission_all_nothing_is_drawn_for_one_policy_alone():
    tables = {"slow": make_table(max_staleness=0), "fast": make_table(max_staleness=1)}
    driver = started(tables=tables, admission="all", num_steps=2)
    driver.finish_groups(100)
    drawn = [e for e in driver.events if isinstance(e, GroupDrawn)]
    assert [e.admitted for e in drawn] == [("slow", "fast")] * 2
    driver.train("fast")
    assert driver.lease(100) == ()
    slow = WaitReason(kind="tickets", policy="slow", num=2)
    alone = WaitReason(kind="admission_all")
    assert driver.core.why_no_lease(driver.served()) == (slow, alone)
    (trainer_waits, *_) = [wait for wait in driver.core.waits() if wait.who.name == "fast"]
    assert trainer_waits.reasons[-2:] == (alone, slow)
    driver.train("slow")
    assert driver.lease(100)
    assert driver.fates("slow").unadmitted == driver.fates("fast").unadmitted == 0


def test_with_admission_all_a_policy_that_needs_no_more_groups_holds_nobody_up():
    tables = {"slow": make_table(max_staleness=0), "fast": make_table(max_staleness=0)}
    plan = make_core_plan(tables=tables, admission="all", num_steps=2)
    short = replace(plan.policies["fast"], num_steps=1)
    driver = Driver(replace(plan, policies={**plan.policies, "fast": short}))
    driver.start()
    driver.finish_groups(2)
    driver.train("fast")
    driver.train("slow")
    assert driver.lease(100)
    assert driver.fates("fast").unadmitted == 2


def test_a_policy_that_took_all_its_batches_is_not_charged_for_the_others():
    driver = started(policies=("a", "b"), num_steps=1)
    driver.run_step("a")
    driver.take(0, "b")
    assert driver.lease(100) == ()


# --- pushed tasks ---------------------------------------------------------------------------------


def make_task(number: int) -> Task:
    return Task(id=f"outside/{number}", source="", prompt="?")


def test_pushed_tasks_are_drawn_before_the_sources():
    driver = started()
    reply = driver.apply(AddTasks(tasks=(make_task(0), make_task(1)))).answer
    assert (reply.num_accepted, reply.num_known) == (2, 0)
    leases = driver.lease(6)
    assert [lease.source for lease in leases] == [""] * 4 + ["train"] * 2
    assert driver.core.pushed_task(leases[2].task_idx).id == "outside/1"
    assert next(e for e in driver.events if isinstance(e, GroupDrawn)).task_idx == -1


def test_a_pushed_task_is_taken_once():
    driver = started()
    driver.apply(AddTasks(tasks=(make_task(0),)))
    reply = driver.apply(AddTasks(tasks=(make_task(0), make_task(1)))).answer
    assert (reply.num_accepted, reply.num_known) == (1, 1)


def test_a_sample_of_a_pushed_task_carries_its_id():
    driver = started(num_steps=1)
    driver.apply(AddTasks(tasks=(make_task(0), make_task(1))))
    driver.finish_groups(2)
    batch = driver.take(0)
    assert batch is not None
    assert {sample.task_id for sample in batch.samples} == {"outside/0", "outside/1"}

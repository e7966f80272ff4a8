"""Evaluation rounds: when they open, what they pin, how they add up, how they end."""

import math

import pytest

from astraflow.dataflow.core.commands import EvalFinished, ExpireEval
from astraflow.dataflow.core.plan import EvalSetPlan
from astraflow.types import Failure, MetricItem, ServedVersions
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta

_HELDOUT = {"heldout": EvalSetPlan(num_tasks=2, samples=2)}


def started(**plan: object) -> Driver:
    """A run with a held-out set of two tasks, two samples each, whose version 0 is published."""
    driver = Driver(make_core_plan(**{"eval_sets": _HELDOUT, **plan}))  # type: ignore[arg-type]
    driver.start()
    return driver


def score(driver: Driver, lease: object, value: float) -> None:
    """Answers an evaluation lease."""
    driver.result(lease.id, make_facts(score=value))  # type: ignore[attr-defined]


def test_version_0_is_evaluated_before_any_training_episode_runs():
    driver = started()
    leases = driver.lease(6)
    assert [lease.kind for lease in leases] == ["eval"] * 4 + ["train"] * 2
    assert [lease.id for lease in leases[:4]] == ["e0.0.0", "e0.1.0", "e0.2.0", "e0.3.0"]
    assert [lease.task_idx for lease in leases[:4]] == [0, 0, 1, 1]
    assert leases[0].pinned == (ServedVersions(policy="actor", versions=(0,)),)
    assert {lease.eval_set for lease in leases[:4]} == {"heldout"}
    assert len({lease.seed for lease in leases}) == 6


def test_a_service_with_few_evaluation_slots_trains_in_its_others():
    driver = started(max_evals=3)
    first = driver.lease(5)
    assert [lease.kind for lease in first] == ["eval"] * 3 + ["train"] * 2
    assert [lease.kind for lease in driver.lease(1)] == ["train"]
    score(driver, first[0], 1.0)
    assert "worker/w0" in driver.last.wakes
    assert [lease.kind for lease in driver.lease(2)] == ["eval", "train"]


def test_evaluation_takes_no_ticket_and_decides_no_fate():
    driver = started()
    for lease in driver.lease(4):
        score(driver, lease, 1.0)
    assert driver.fates().drawn == 0


def test_a_service_runs_evaluation_only_with_exactly_the_pinned_versions():
    driver = started()
    for step in range(2):
        leases = driver.lease(8)
        for lease in leases:
            driver.finish(lease)
        if step == 0:
            driver.finish_groups(1)
        driver.take(step)
        driver.publish(step + 1)
        driver.commit(step)
    assert driver.core.versions("actor").pinned == (2,)
    assert {lease.kind for lease in driver.lease(1, served=driver.served(actor=1))} <= {"train"}
    both = (ServedVersions(policy="actor", versions=(1, 2)),)
    assert driver.lease(1, served=both)[0].kind == "eval"


def test_the_score_is_the_mean_over_tasks_of_the_mean_over_samples():
    driver = started()
    for lease, value in zip(driver.lease(4), (1.0, 0.0, 1.0, 1.0), strict=True):
        score(driver, lease, value)
    record = driver.core.evals()[0]
    assert (record.policy, record.version, record.step, record.eval_set) == ("actor", 0, 0, "heldout")
    assert (record.num_tasks, record.num_samples, record.num_failed) == (2, 4, 0)
    assert record.score_mean == 0.75
    # task means 1/2 and 1: sample variance 1/8, over two tasks.
    assert record.score_stderr == pytest.approx(math.sqrt(0.125 / 2))
    assert driver.core.evals(after=1) == ()
    assert "evals" in driver.last.wakes


def test_a_round_reports_unbiased_pass_at_k_with_intervals():
    driver = started()
    for lease, value in zip(driver.lease(4), (1.0, 0.0, 1.0, 0.5), strict=True):
        score(driver, lease, value)
    metrics = {item.name: item.value for item in driver.core.evals()[0].metrics}
    # one of two samples passes for either task: 1/2 at the first try, surely within two.
    assert (metrics["pass@1"], metrics["pass@2"]) == (0.5, 1.0)
    assert 0 < metrics["pass@1_low"] < 0.5 < metrics["pass@1_high"] < 1
    assert metrics["pass@2_low"] < metrics["pass@2_high"] == 1


def test_a_failed_episode_is_tried_again_and_then_left_out_instead_of_scored_0():
    driver = started(max_attempts=2)
    leases = driver.lease(4)
    for lease in leases[1:]:
        score(driver, lease, 1.0)
    driver.fail(leases[0])
    again = driver.lease(1)[0]
    assert (again.id, again.seed) == ("e0.0.1", leases[0].seed)
    driver.fail(again)
    record = driver.core.evals()[0]
    assert (record.num_samples, record.num_failed, record.score_mean) == (3, 1, 1.0)


def test_an_evaluation_lease_of_a_lost_service_goes_out_again_and_its_late_result_counts_once():
    driver = started()
    driver.join("w1")
    lost = driver.lease(1, "w0")[0]
    driver.drop("w0")
    assert driver.result(lost.id, make_facts(score=1.0)).status == "accepted"
    assert [lease.id for lease in driver.lease(3, "w1")] == ["e0.1.0", "e0.2.0", "e0.3.0"]
    assert driver.result(lost.id, make_facts(score=0.0)).status == "accepted"
    for lease in tuple(driver.out.values()):
        score(driver, lease, 1.0)
    assert driver.core.evals()[0].score_mean == 1.0


def test_a_round_past_its_deadline_is_reported_as_incomplete_and_without_a_score():
    driver = started()
    leases = driver.lease(3)
    metrics = (MetricItem("sampled_tokens", 70.0),)
    facts = make_facts(score=1.0)
    driver.result(
        leases[0].id,
        type(facts)(trajectories=(), score=1.0, metrics=metrics, duration_s=2.5),
    )
    ((round_id, deadline_s),) = driver.core.eval_deadlines()
    assert deadline_s == 3.0 + 300.0  # opened by the third command
    driver.apply(ExpireEval(round_id=round_id))
    record = driver.core.evals()[0]
    assert (record.num_samples, record.num_failed, record.score_mean) == (1, 3, None)
    assert {item.name: item.value for item in record.metrics} == {
        "sampled_tokens": 70.0,
        "unfinished": 3.0,
        "unfinished_begun": 2.0,
        "longest_finished_s": 2.5,
        "longest_finished_tokens": 70.0,
        "partial_score_mean": 1.0,
    }
    assert driver.core.revoked_leases("w0", [leases[1].id]) == (leases[1].id,)
    assert driver.result(leases[1].id, make_facts(score=0.0)).status == "dropped"
    driver.apply(ExpireEval(round_id=round_id))
    assert driver.last.events == ()


def test_a_round_whose_longest_episodes_ran_out_of_time_has_no_score():
    driver = started(eval_sets={"heldout": EvalSetPlan(num_tasks=2, samples=1)}, max_attempts=1)
    late, quick = driver.lease(2)
    driver.result(late.id, Failure(error_class="DeadlineError", message="too long", is_retryable=True))
    score(driver, quick, 1.0)
    record = driver.core.evals()[0]
    metrics = {item.name: item.value for item in record.metrics}
    assert (record.score_mean, record.num_samples, record.num_failed) == (None, 1, 1)
    assert (metrics["unfinished"], metrics["unfinished_begun"]) == (1.0, 1.0)
    assert metrics["partial_score_mean"] == 1.0


def test_a_round_without_a_single_result_says_so():
    driver = started()
    driver.apply(ExpireEval(round_id=0))
    record = driver.core.evals()[0]
    assert (record.num_samples, record.num_failed, record.score_mean) == (0, 4, None)


def test_metrics_of_episodes_are_reduced_as_they_ask():
    driver = started(eval_sets={"heldout": EvalSetPlan(num_tasks=2, samples=1)})
    for lease, value in zip(driver.lease(2), (1.0, 3.0), strict=True):
        items = tuple(MetricItem(name, value, name) for name in ("mean", "sum", "max", "min", "last"))  # type: ignore[arg-type]
        facts = make_facts(make_meta(), score=value)
        driver.result(lease.id, type(facts)(trajectories=(), score=1.0, metrics=items, duration_s=1.0))
    items = driver.core.evals()[0].metrics
    metrics = {item.name: item.value for item in items if not item.name.startswith("pass@")}
    assert metrics == {"mean": 2.0, "sum": 4.0, "max": 3.0, "min": 1.0, "last": 3.0}


def evaluated(driver: Driver) -> list[tuple[str, int, int]]:
    """(policy, version, step) of the finished rounds."""
    records = [event.record for event in driver.events if isinstance(event, EvalFinished)]
    return [(record.policy, record.version, record.step) for record in records]


def run(driver: Driver, policy: str, steps: range) -> None:
    """Trains steps, answering everything that is leased."""
    for step in steps:
        while (batch := driver.take(step, policy)) is None:
            for lease in driver.lease(8):
                driver.finish(lease)
        assert batch.step == step
        driver.publish(step + 1, policy)
        driver.commit(step, policy)


def drain(driver: Driver) -> None:
    """Answers leases until there are none; the service serves every version."""
    served = tuple(
        ServedVersions(policy=status.name, versions=tuple(range(status.newest_version + 1)))
        for status in driver.core.policy_status()
    )
    while leases := driver.lease(8, served=served):
        for lease in leases:
            driver.finish(lease)


def test_rounds_open_at_version_0_every_few_steps_and_at_the_last_step():
    driver = started(num_steps=5, eval_every=2)
    for step in range(5):
        run(driver, "actor", range(step, step + 1))
        drain(driver)
    assert evaluated(driver) == [("actor", step, step) for step in (0, 2, 4, 5)]
    assert driver.core.state == "finished"


def test_a_step_is_evaluated_once_even_if_a_restarted_trainer_publishes_it_again():
    driver = started(num_steps=4, eval_every=2)
    run(driver, "actor", range(3))
    drain(driver)
    driver.attach(durable_step=1)
    driver.publish(1)
    for step in (1, 2):
        driver.take(step)
        driver.publish(step + 1)
        driver.commit(step)
    run(driver, "actor", range(3, 4))
    drain(driver)
    assert evaluated(driver) == [("actor", 0, 0), ("actor", 2, 2), ("actor", 7, 4)]


def test_with_two_policies_a_round_pins_the_others_newest_version():
    driver = Driver(make_core_plan(policies=("a", "b"), eval_sets=_HELDOUT))
    driver.join()
    driver.attach("a")
    driver.publish(0, "a")
    assert driver.core.eval_deadlines() == ()
    assert driver.core.versions("a").pinned == (0,)
    assert any(wait.has(frozenset({"eval_version"})) for wait in driver.core.waits())
    driver.attach("b")
    driver.publish(0, "b")
    assert len(driver.core.eval_deadlines()) == 2
    drain_evals = [lease for lease in driver.lease(8) if lease.kind == "eval"]
    for lease in drain_evals:
        score(driver, lease, 1.0)
    run(driver, "a", range(2))
    pinned = {lease.pinned for lease in driver.lease(4) if lease.kind == "eval"}
    assert pinned == {(ServedVersions(policy="a", versions=(2,)), ServedVersions(policy="b", versions=(0,)))}


def test_the_run_waits_for_its_last_evaluation():
    driver = started(num_steps=1, eval_every=1)
    run(driver, "actor", range(1))
    assert driver.core.state == "running"
    assert driver.status().step == 1
    drain(driver)
    assert driver.core.state == "finished"


def test_a_run_of_no_steps_evaluates_version_0_and_ends():
    driver = started(num_steps=0)
    drain(driver)
    assert evaluated(driver) == [("actor", 0, 0)]
    assert (driver.core.state, driver.fates().drawn) == ("finished", 0)


def test_a_round_whose_episodes_all_failed_has_no_score():
    driver = started()
    for _ in range(3):
        for lease in driver.lease(4):
            if lease.kind == "eval":
                driver.fail(lease, is_retryable=False)
    (record,) = driver.core.evals()
    assert (record.num_failed, record.num_samples, record.score_mean) == (4, 0, None)


@pytest.mark.parametrize("values", [(1e200, -1e200, 3e200, 0.0), (1.7e308, 1.7e308, 1.7e308, -1.7e308)])
def test_a_score_whose_square_overflows_does_not_end_the_run(values: tuple[float, ...]):
    driver = started()
    for lease, value in zip(driver.lease(4), values, strict=True):
        driver.result(lease.id, make_facts(score=value))
    (record,) = driver.core.evals()
    assert record.score_mean is not None
    assert math.isfinite(record.score_mean)
    assert math.isfinite(record.score_stderr)
    assert record.score_stderr > 0

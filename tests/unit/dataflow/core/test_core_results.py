"""Results of leases, groups that complete, and groups that fail."""

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from astraflow.config import Use
from astraflow.dataflow.core.commands import (
    AttemptFailed,
    FateDecided,
    LeaseView,
    ResultDropped,
    ServiceSetAside,
)
from astraflow.dataflow.core.core import Core
from astraflow.errors import RefusedError
from astraflow.types import HANDED_IN, Failure, MetricItem
from astraflow.types.facts import GroupFacts
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta, make_table


def started(**plan: object) -> Driver:
    """A run whose version 0 is published, with service w0."""
    driver = Driver(make_core_plan(**plan))  # type: ignore[arg-type]
    driver.start()
    return driver


def test_a_group_is_ready_when_all_its_episodes_are():
    driver = started()
    first, second = driver.lease(2)
    driver.finish(first)
    assert (driver.status().num_running_groups, driver.status().num_ready_groups) == (1, 0)
    driver.finish(second)
    assert (driver.status().num_running_groups, driver.status().num_ready_groups) == (0, 1)


def test_the_same_result_again_is_accepted_and_changes_nothing():
    driver = started()
    lease = driver.lease(2)[0]
    driver.finish(lease)
    before = driver.core.snapshot()
    assert driver.finish(lease).status == "accepted"
    assert driver.last.events == ()
    assert driver.core.snapshot() == before


def test_a_result_for_a_complete_group_is_dropped():
    driver = started()
    leases = driver.lease(2)
    for lease in leases:
        driver.finish(lease)
    assert driver.finish(leases[1]).status == "dropped"
    assert isinstance(driver.last.events[0], ResultDropped)


def test_the_result_of_an_expired_lease_counts_while_its_episode_is_open():
    driver = started()
    first = driver.lease(1)[0]
    driver.expire(first)
    assert driver.finish(first).status == "accepted"
    assert [lease.id for lease in driver.lease(2)] == ["0.1.0", "1.0.0"]


def test_the_first_of_two_attempts_wins_and_the_other_lease_is_revoked():
    driver = started()
    first = driver.lease(1)[0]
    driver.expire(first)
    second = driver.lease(1)[0]
    assert driver.finish(first).status == "accepted"
    assert driver.core.revoked_leases("w0", [second.id]) == (second.id,)
    assert driver.finish(second).status == "dropped"
    assert "attempt 0" in driver.last.events[0].reason  # type: ignore[union-attr]


def test_a_late_failure_of_an_expired_lease_does_not_end_the_next_attempt():
    driver = started()
    first = driver.lease(1)[0]
    driver.expire(first)
    second = driver.lease(1)[0]
    assert driver.fail(first).status == "dropped"
    assert driver.core.lease(second.id) == second


@pytest.mark.parametrize("lease_id", ["0.0.1", "0.5.0", "7.0.0", "0.0.9", "e0.0.0", "nonsense", "0.1.0"])
def test_a_lease_that_was_never_issued_is_refused(lease_id: str):
    driver = started()
    driver.lease(1)
    before = driver.core.snapshot()
    with pytest.raises(RefusedError) as refused:
        driver.result(lease_id, make_facts(make_meta()))
    assert refused.value.code == "unknown_lease"
    assert driver.core.snapshot() == before


@pytest.mark.parametrize("versions", [(0, 1), (-1, 0), (1, 0)])
def test_tokens_of_versions_that_do_not_exist_are_refused(versions: tuple[int, int]):
    driver = started()
    lease = driver.lease(1)[0]
    with pytest.raises(RefusedError) as refused:
        driver.result(lease.id, make_facts(make_meta(versions=versions)))
    assert refused.value.code == "invalid"
    assert driver.core.lease(lease.id) == lease


# --- failures -------------------------------------------------------------------------------------


def test_an_episode_is_tried_until_its_attempts_are_used_up_and_then_fails_its_group():
    driver = started(max_attempts=3)
    for _ in range(3):
        driver.fail(driver.lease(1)[0])
    assert driver.fate_of(0) == ["failed"]
    finals = [e.is_final for e in driver.events if isinstance(e, AttemptFailed)]
    assert finals == [False, False, True]
    assert driver.status().num_tickets == 0


def test_a_failure_that_no_retry_can_mend_is_final():
    driver = started()
    driver.fail(driver.lease(1)[0], is_retryable=False)
    assert driver.fate_of(0) == ["failed"]


def test_the_other_leases_of_a_failed_group_are_revoked():
    driver = started()
    first, second = driver.lease(2)
    driver.fail(first, is_retryable=False)
    assert driver.core.revoked_leases("w0", [second.id]) == (second.id,)
    assert driver.finish(second).status == "dropped"


def test_a_group_may_lose_as_many_episodes_as_the_table_allows():
    driver = started(table=make_table(group_size=3, max_failed=1))
    leases = driver.lease(3)
    driver.fail(leases[0], is_retryable=False)
    for lease in leases[1:]:
        driver.finish(lease)
    assert driver.status().num_ready_groups == 1


def test_an_expiry_counts_as_an_attempt():
    driver = started(max_attempts=2)
    for _ in range(2):
        driver.expire(driver.lease(1)[0])
    assert driver.fate_of(0) == ["failed"]


def test_attempts_that_are_lost_with_their_services_do_not_count_up_to_a_bound():
    driver = started(max_attempts=2, max_lost=2)
    driver.expire(driver.lease(1)[0])
    driver.lease(1)
    driver.drop("w0")
    driver.join("w1")
    driver.fail(driver.lease(1, "w1")[0])
    assert driver.fate_of(0) == []
    last = driver.lease(1, "w1")[0]
    assert last.attempt == 3
    driver.expire(last)
    assert driver.fate_of(0) == ["failed"]


def test_the_result_of_an_attempt_after_lost_ones_counts():
    driver = started(max_attempts=1, max_lost=1, table=make_table(group_size=1))
    driver.expire(driver.lease(1)[0])
    again = driver.lease(1)[0]
    assert driver.finish(again).status == "accepted"


def test_lost_attempts_are_remembered_by_a_snapshot():
    driver = started(max_attempts=1, max_lost=1)
    driver.expire(driver.lease(1)[0])
    driver.core = Core.from_snapshot(driver.plan, driver.core.snapshot())
    driver.core = Core.from_snapshot(driver.plan, driver.core.snapshot())
    driver.expire(driver.lease(1)[0])
    assert driver.fate_of(0) == ["failed"]


def hand_in(driver: Driver, lease: LeaseView) -> str:
    failure = Failure(error_class=HANDED_IN, message="the device was asked back")
    return driver.result(lease.id, failure).status


def test_an_attempt_that_is_handed_in_never_counts():
    driver = started(max_attempts=2, max_lost=1, table=make_table(group_size=1))
    for attempt in range(40):
        lease = driver.lease(1)[0]
        assert lease.attempt == attempt
        assert hand_in(driver, lease) == "accepted"
        assert hand_in(driver, lease) == "dropped"
    assert driver.core.state == "running"
    driver.expire(driver.lease(1)[0])
    driver.fail(driver.lease(1)[0])
    last = driver.lease(1)[0]
    assert last.attempt == 42
    driver.core = Core.from_snapshot(driver.plan, driver.core.snapshot())
    hand_in(driver, last)
    assert driver.fate_of(0) == []
    assert driver.finish(driver.lease(1)[0]).status == "accepted"
    assert driver.status().num_ready_groups == 1


def test_failures_still_count_between_attempts_that_are_handed_in():
    driver = started(max_attempts=2)
    for _ in range(20):
        hand_in(driver, driver.lease(1)[0])
    driver.fail(driver.lease(1)[0])
    hand_in(driver, driver.lease(1)[0])
    assert driver.fate_of(0) == []
    driver.fail(driver.lease(1)[0])
    assert driver.fate_of(0) == ["failed"]


def test_a_service_that_hands_in_everything_is_set_aside_and_named_after_200_times():
    driver = started(max_attempts=3)
    for _ in range(200):
        hand_in(driver, driver.lease(1)[0])
    assert not any(isinstance(event, ServiceSetAside) for event in driver.events)
    for _ in range(3):
        assert driver.fate_of(0) == []
        hand_in(driver, driver.lease(1)[0])
    assert driver.fate_of(0) == ["failed"]
    found = next(event for event in driver.events if isinstance(event, ServiceSetAside))
    assert found.last_failure == "handed_in: the device was asked back"


def test_a_service_that_hands_in_leases_is_not_set_aside_and_may_get_them_again():
    driver = started()
    driver.join("w1")
    for _ in range(10):
        hand_in(driver, driver.lease(1)[0])
    assert len(driver.lease(2)) == 2
    assert not any(isinstance(event, ServiceSetAside) for event in driver.events)


def test_a_group_may_fail_for_one_policy_and_serve_another():
    tables = {"strict": make_table(group_size=3), "lenient": make_table(group_size=3, max_failed=1)}
    driver = started(tables=tables)
    leases = driver.lease(3)
    driver.fail(leases[0], is_retryable=False)
    for lease in leases[1:]:
        driver.finish(lease)
    assert driver.fate_of(0, "strict") == ["failed"]
    assert driver.status("lenient").num_ready_groups == 1


# --- verdicts -------------------------------------------------------------------------------------


def test_a_policy_that_sampled_nothing_did_not_use_the_group():
    driver = started(policies=("solver", "verifier"))
    for lease in driver.lease(2):
        driver.result(lease.id, make_facts(make_meta("solver")))
    assert driver.fate_of(0, "verifier") == ["unused"]
    assert driver.status("solver").num_ready_groups == 1


def test_a_filtered_group_gives_its_ticket_back_and_says_how_long_it_was():
    driver = started(table=make_table(filters=[{"name": "zero_variance"}]))
    driver.finish_groups(1, reward=1.0)
    fate = next(e for e in driver.events if isinstance(e, FateDecided))
    assert (fate.fate, fate.num_tokens, fate.step) == ("filtered", 20, -1)
    assert driver.status().num_tickets == 0
    assert "leases" in driver.last.wakes


def test_trajectories_of_policies_that_are_not_trained_are_ignored():
    driver = started(num_steps=1)
    for lease in driver.lease(4):
        driver.result(lease.id, make_facts(make_meta(), make_meta("frozen", versions=(7, 9))))
    batch = driver.take(0)
    assert batch is not None
    assert batch.totals.num_samples == 4


def per_turn(facts: GroupFacts) -> list[tuple[float, ...]]:
    """Each turn's own reward is its advantage."""
    return [trajectory.turn_rewards for trajectory in facts.trajectories]


def test_advantages_by_turn_become_spans_weighted_by_their_trained_tokens():
    credit = Use(use=f"{__name__}:per_turn").model_dump()
    driver = started(num_steps=1, table=make_table(groups_per_batch=1, credit=credit))
    meta = make_meta(
        num_trained=5,
        turn_spans=((2, 4), (6, 9)),
        turn_rewards=(1.0, -2.0),
        num_trained_by_turn=(2, 3),
    )
    for lease in driver.lease(2):
        driver.result(lease.id, make_facts(meta))
    batch = driver.take(0)
    assert batch is not None
    assert batch.samples[0].advantages == ((2, 4, 1.0), (6, 9, -2.0))
    assert batch.totals.advantage_sum == 2 * (2 * 1.0 + 3 * -2.0)
    assert batch.totals.advantage_square_sum == 2 * (2 * 1.0 + 3 * 4.0)


def test_one_advantage_per_trajectory_covers_all_its_tokens():
    driver = started(
        num_steps=1, table=make_table(groups_per_batch=1, credit={"name": "group_relative", "scale": "none"})
    )
    driver.finish_groups(1)
    batch = driver.take(0)
    assert batch is not None
    assert [sample.advantages for sample in batch.samples] == [((0, 10, -0.5),), ((0, 10, 0.5),)]
    assert batch.totals.advantage_sum == 0.0
    assert batch.totals.advantage_square_sum == 2 * 4 * 0.25


def keep_nothing(facts: GroupFacts) -> str:
    """Drops every group, and says why."""
    return "too easy"


def test_a_custom_filter_drops_a_group_by_returning_a_reason():
    table = make_table(filters=[Use(use=f"{__name__}:keep_nothing").model_dump()])
    driver = started(table=table)
    driver.finish_groups(1)
    assert driver.fate_of(0) == ["filtered"]


def explode(facts: GroupFacts) -> bool:
    """Fails on every group."""
    raise ZeroDivisionError("by zero")


def not_finite(facts: GroupFacts) -> list[float]:
    """An advantage that would poison the model."""
    return [math.nan for _ in facts.trajectories]


def too_few(facts: GroupFacts) -> list[float]:
    """Fewer advantages than trajectories."""
    return [0.0]


def test_rewards_that_are_metrics_of_the_episodes_reach_the_credit():
    credit = {"name": "gdpo", "rewards": {"short": 1.0}}
    driver = started(table=make_table(groups_per_batch=1, credit=credit))
    for lease in driver.lease(2):
        metrics = (MetricItem("short", 10.0 * lease.episode_idx), MetricItem("other", 7.0))
        facts = msgspec.structs.replace(make_facts(make_meta(reward=1.0)), metrics=metrics)
        driver.result(lease.id, facts)
    view = driver.take(0)
    assert view is not None
    assert [sample.advantages[0][2] for sample in view.samples] == pytest.approx([-1.0, 1.0], abs=1e-5)


def test_an_episode_without_a_metric_that_is_a_reward_ends_the_run_with_its_name():
    driver = started(table=make_table(credit={"name": "gdpo", "rewards": {"short": 1.0}}))
    driver.finish_groups(1)
    assert driver.core.state == "failed"
    assert "episode 0 has no metric 'short', which table.credit.rewards names" in driver.core.reason


def test_the_baselines_of_rae_survive_a_restart():
    driver = started(table=make_table(group_size=1, groups_per_batch=1, credit={"name": "rae", "decay": 0.5}))
    driver.finish(driver.lease(1)[0], reward=1.0)
    other = Driver(driver.plan)
    other.core, other.sessions = Core.from_snapshot(driver.plan, driver.core.snapshot()), driver.sessions
    other.finish(other.lease(1)[0], reward=1.0)
    other.take(0)
    other.publish(1)
    other.commit(0)
    view = other.take(1)
    assert view is not None
    assert [sample.advantages[0][2] for sample in view.samples] == [0.5]


def answers(facts: GroupFacts, *, given: object) -> object:
    """Whatever the recipe says."""
    return given


def own(kind: str, given: object) -> dict[str, object]:
    use = {"name": "use", "use": f"{__name__}:answers", "args": {"given": given}}
    return {kind: [use] if kind == "shaping" else use}


@pytest.mark.parametrize("advantages", [(1e13, 0.0), (0.0, -1e13)])
def test_each_advantage_of_a_turn_must_be_within_bounds(advantages: tuple[float, float]):
    credit = own("credit", [list(advantages)] * 2)["credit"]
    driver = started(num_steps=1, table=make_table(groups_per_batch=1, credit=credit))
    meta = make_meta(
        num_trained=5, turn_spans=((2, 4), (6, 9)), turn_rewards=(1.0, -2.0), num_trained_by_turn=(2, 3)
    )
    for lease in driver.lease(2):
        driver.result(lease.id, make_facts(meta))
    assert driver.core.state == "failed"
    assert "gave an advantage that is not finite, or not within" in driver.core.reason


@pytest.mark.parametrize("rewards", [(1e13, 0.0), (0.0, -1e13)])
def test_each_reward_that_shaping_gives_must_be_within_bounds(rewards: tuple[float, float]):
    driver = started(table=make_table(groups_per_batch=1, **own("shaping", list(rewards))))  # type: ignore[arg-type]
    driver.finish_groups(1)
    assert driver.core.state == "failed"
    assert "shaping gave rewards that are not within" in driver.core.reason


def in_arrays(facts: GroupFacts) -> object:
    """As numpy gives numbers: one for each turn, in half precision."""
    return [np.ones(1, dtype=np.float16) * t.reward for t in facts.trajectories]


def in_tensors(facts: GroupFacts) -> Any:
    return torch.stack([torch.ones(1, dtype=torch.float16) * t.reward for t in facts.trajectories])


def keeps_by_numpy(facts: GroupFacts) -> Any:
    return np.bool_(len(facts.trajectories) > 0)


@pytest.mark.parametrize("credit", [in_arrays, in_tensors])
def test_advantages_and_verdicts_may_be_of_numpy_or_torch(credit: Callable[..., Any]):
    table = make_table(
        groups_per_batch=1,
        credit=Use(use=f"{__name__}:{credit.__name__}").model_dump(),
        filters=[Use(use=f"{__name__}:keeps_by_numpy").model_dump()],
    )
    driver = started(table=table)
    driver.finish_groups(1)
    view = driver.take(0)
    assert view is not None
    assert [sample.advantages[0][2] for sample in view.samples] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"filters": [{"name": "use", "use": f"{__name__}:explode"}]}, "ZeroDivisionError: by zero"),
        ({"credit": {"name": "use", "use": f"{__name__}:not_finite"}}, "not finite"),
        ({"credit": {"name": "use", "use": f"{__name__}:too_few"}}, "1 advantages for 2 trajectories"),
        (own("credit", None), "the answer None of policy 'actor', group 0: credit raised TypeError"),
        (own("credit", [1.0, {}]), "raised TypeError: float() argument must be"),
        (own("credit", [None, 1.0]), "raised TypeError"),
        (own("credit", "12"), "'1' is a text, not a number"),
        (
            own("shaping", None),
            f"the answer None of policy 'actor', group 0: shaping '{__name__}:answers' raised TypeError",
        ),
        (own("shaping", [1.0]), "shaping gave (1.0,) for 2 trajectories"),
        (own("shaping", ["1", "2"]), "'1' is a text, not a number"),
    ],
)
def test_a_component_that_breaks_its_contract_ends_the_run_with_its_name(
    table: dict[str, object], message: str
):
    driver = started(table=make_table(**table))  # type: ignore[arg-type]
    driver.finish_groups(1)
    assert driver.core.state == "failed"
    assert message in driver.core.reason
    assert "'actor'" in driver.core.reason
    assert driver.fates().live == 0

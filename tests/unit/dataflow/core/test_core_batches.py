"""Which groups a step takes, how stale they may be, and what a step's batch is worth later."""

from collections import Counter

import msgspec
import pytest

from astraflow.algorithms.samplers import ReplayConfig
from astraflow.algorithms.task_gates import SolvedConfig
from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import BatchTaken, FateDecided, StepCommitted, TakeBatch
from astraflow.errors import ConfigError, FencedError, RefusedError
from astraflow.types.facts import GroupFacts
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta, make_table


def started(**plan: object) -> Driver:
    """A run whose version 0 is published, with service w0."""
    driver = Driver(make_core_plan(**plan))  # type: ignore[arg-type]
    driver.start()
    return driver


def taken(driver: Driver) -> list[tuple[int, ...]]:
    """The groups of each batch, in the order of the steps."""
    return [event.group_ids for event in driver.events if isinstance(event, BatchTaken)]


def test_a_batch_is_not_there_until_enough_groups_are_ready():
    driver = started()
    driver.finish_groups(1)
    before = driver.core.snapshot()
    assert driver.take(0) is None
    assert driver.core.snapshot() == before
    driver.finish_groups(1)
    assert "batch/actor" in driver.last.wakes
    batch = driver.take(0)
    assert batch is not None
    assert batch.totals.num_groups == 2


def test_fifo_takes_groups_in_draw_order_and_waits_for_the_first():
    driver = started()
    leases = driver.lease(8)
    for lease in leases[2:]:
        driver.finish(lease)
    assert driver.take(0) is None
    for lease in leases[:2]:
        driver.finish(lease)
    driver.take(0)
    assert taken(driver) == [(0, 1)]


def test_a_filtered_group_does_not_hold_up_the_ones_behind_it():
    driver = started(table=make_table(filters=[{"name": "zero_variance"}]))
    leases = driver.lease(8)
    for lease in leases[:2]:
        driver.finish(lease, reward=1.0)
    assert "batch/actor" in driver.last.wakes
    for lease in leases[2:]:
        driver.finish(lease)
    driver.take(0)
    assert taken(driver) == [(1, 2)]


def test_sweep_takes_groups_in_the_order_in_which_they_completed():
    driver = started(table=make_table(sampler={"name": "sweep"}))
    leases = driver.lease(8)
    for lease in (*leases[4:6], *leases[2:4]):
        driver.finish(lease)
    driver.take(0)
    assert taken(driver) == [(2, 1)]


def test_a_step_that_has_its_batch_gets_the_same_again():
    driver = started()
    driver.finish_groups(3)
    first = driver.take(0)
    assert driver.take(0) == first
    assert driver.last.events == ()


def test_a_ticket_comes_back_when_the_batch_is_committed_not_when_it_is_taken():
    driver = started()
    driver.finish_groups(4)
    driver.take(0)
    assert driver.status().num_tickets == 4
    driver.publish(1)
    assert driver.status().num_tickets == 4
    driver.commit(0)
    assert driver.status().num_tickets == 2
    assert "leases" in driver.last.wakes
    assert driver.fates().trained == 2


def test_a_trained_group_says_in_which_step_and_how_stale_it_was():
    driver = started()
    driver.finish_groups(4)
    for step in range(2):
        driver.take(step)
        driver.publish(step + 1)
        driver.commit(step)
    fates = [e for e in driver.events if isinstance(e, FateDecided)]
    assert [(e.group_id, e.fate, e.step, e.staleness) for e in fates] == [
        (0, "trained", 0, 0),
        (1, "trained", 0, 0),
        (2, "trained", 1, 1),
        (3, "trained", 1, 1),
    ]
    assert {e.num_tokens for e in fates} == {20}


def test_the_next_step_may_be_taken_before_the_last_is_committed_but_not_the_one_after():
    driver = started(table=make_table(max_staleness=3))
    driver.finish_groups(8)
    assert driver.take(0) is not None
    ahead = driver.take(1)
    assert ahead is not None
    assert ahead.trainer_version == 1
    assert driver.take(2) is None
    driver.publish(1)
    driver.commit(0)
    assert "batch/actor" in driver.last.wakes
    assert driver.take(2) is not None


def test_a_step_that_is_not_next_is_refused():
    driver = started()
    driver.finish_groups(4)
    with pytest.raises(RefusedError) as refused:
        driver.take(1)
    assert refused.value.code == "out_of_order"


def test_there_is_no_step_after_the_last():
    driver = started(num_steps=1)
    driver.finish_groups(2)
    driver.take(0)
    with pytest.raises(RefusedError) as refused:
        driver.take(1)
    assert refused.value.code == "finished"


def test_a_session_that_is_over_takes_nothing():
    driver = started()
    driver.attach()
    with pytest.raises(FencedError):
        driver.apply(TakeBatch(policy="actor", epoch=1, step=0))


def test_a_policy_that_is_not_trained_is_refused_by_name():
    driver = started()
    with pytest.raises(RefusedError, match="'ghost'") as refused:
        driver.apply(TakeBatch(policy="ghost", epoch=1, step=0))
    assert refused.value.code == "unknown_policy"


def test_groups_that_grew_too_old_are_swept_when_sweep_passes_them_over():
    driver = started(table=make_table(max_staleness=1, sampler={"name": "sweep"}))
    slow = driver.lease(2)
    for step in range(2):
        driver.finish_groups(2)
        driver.take(step)
        driver.publish(step + 1)
        driver.commit(step)
    for lease in slow:
        driver.finish(lease, version=0)
    assert driver.take(2) is None
    fate = driver.last.events[0]
    assert isinstance(fate, FateDecided)
    assert (fate.fate, fate.staleness) == ("stale", 2)
    assert driver.last.wakes


def test_fifo_reaches_its_worst_staleness_and_never_passes_it():
    # L = 1, max_staleness = 3, so 3 batches of tickets: all drawn at version 1 by an engine at version 0.
    driver = started(table=make_table(max_staleness=3, engine_lag=1), num_steps=8)
    driver.run_step()
    for lease in driver.lease(100, served=driver.served(actor=0)):
        driver.finish(lease, version=0)
    stalest = []
    for step in range(1, 4):
        batch = driver.take(step)
        assert batch is not None
        stalest.append(batch.staleness_max)
        driver.publish(step + 1)
        driver.commit(step)
    assert stalest == [1, 2, 3]
    assert driver.status().staleness_bound == 3
    assert driver.fates().stale == 0


def test_the_record_of_a_step_counts_what_was_discarded_since_the_one_before():
    driver = started(table=make_table(filters=[{"name": "zero_variance"}]))
    driver.finish_groups(1, reward=1.0)
    driver.run_step()
    driver.run_step()
    records = driver.core.steps("actor")
    assert [record.num_discarded_groups for record in records] == [1, 0]
    assert driver.core.steps("actor", after=0) == records[1:]
    first = records[0]
    assert (first.step, first.version, first.num_groups, first.num_samples) == (0, 1, 2, 4)
    assert (first.reward_mean, first.num_trained_tokens) == (0.5, 16)
    assert any(isinstance(e, StepCommitted) and e.record == first for e in driver.events)


def test_payloads_are_retained_until_their_step_is_released():
    driver = started()
    driver.run_step()
    assert len(list(driver.core.retained_payloads())) == 4
    driver.release(1)
    assert list(driver.core.retained_payloads()) == []
    driver.finish(driver.lease(1)[0])
    assert len(list(driver.core.retained_payloads())) == 1


# --- replay, capacity, normalisation, masks -------------------------------------------------------


@pytest.mark.parametrize(("ratio", "num_groups", "most"), [(0.29, 100, 29), (0.58, 50, 29), (0.299, 100, 29)])
def test_a_replay_ratio_gives_the_number_that_it_says(ratio: float, num_groups: int, most: int) -> None:
    assert TableConfig(groups_per_batch=num_groups, replay=ReplayConfig(ratio=ratio)).max_replayed == most


def replay_table(**replay: object) -> TableConfig:
    return make_table(max_staleness=1, replay={"ratio": 1.0, "select": "latest", **replay})


def trained_step(driver: Driver, step: int) -> BatchTaken:
    driver.finish_groups(2)
    driver.take(step)
    driver.publish(step + 1)
    driver.commit(step)
    return [e for e in driver.events if isinstance(e, BatchTaken)][-1]


def test_a_group_is_trained_again_in_the_next_step_while_it_is_fresh_enough():
    driver = started(table=replay_table())
    assert trained_step(driver, 0).replayed_ids == ()
    taken_next = trained_step(driver, 1)
    assert (taken_next.group_ids, taken_next.replayed_ids) == ((2, 3), (1, 0))
    assert (taken_next.staleness, taken_next.replayed_staleness) == ((0, 0), (1, 1))
    # Groups 0 and 1 are used up and too old; 2 and 3 come.
    assert trained_step(driver, 2).replayed_ids == (3, 2)
    record = driver.core.steps("actor")[-1]
    assert (record.num_groups, record.num_replayed_groups, record.staleness_max) == (4, 2, 1)
    assert driver.status().num_replayed_groups == 4
    assert driver.fates().trained == 6


@pytest.mark.parametrize(
    ("share", "num_groups", "fresh", "replayed"),
    [
        (0.0, 32, 32, 0), (0.3, 32, 23, 9), (0.5, 32, 16, 16), (0.7, 32, 10, 22), (0.29, 100, 71, 29),
        (0.3, 3, 3, 0), (0.75, 4, 1, 3),
    ],
)  # fmt: skip
def test_a_replay_share_divides_a_batch_of_fixed_size(
    share: float, num_groups: int, fresh: int, replayed: int
) -> None:
    table = TableConfig(groups_per_batch=num_groups, replay=ReplayConfig(share=share, max_uses=4))
    assert (table.least_fresh, table.max_replayed) == (fresh, replayed)
    assert (table.sizes.least_fresh, table.sizes.groups_per_batch) == (fresh, num_groups)


def share_table(**fields: object) -> TableConfig:
    return make_table(groups_per_batch=4, replay={"share": 0.5, "select": "latest"}, **fields)


@pytest.mark.parametrize(
    ("max_staleness", "fresh"),
    [(3, (4, 2, 2, 2)), (0, (4, 4, 4, 4))],  # nothing to replay at first, and never without staleness
)
def test_replayed_groups_take_the_place_of_fresh_ones_and_fresh_ones_fill_a_shortage(
    max_staleness: int, fresh: tuple[int, ...]
) -> None:
    driver = started(table=share_table(max_staleness=max_staleness))
    for step, num_fresh in enumerate(fresh):
        assert driver.status().groups_per_batch == num_fresh
        driver.finish_groups(num_fresh - 1)
        assert driver.take(step) is None
        driver.finish_groups(1)
        assert "batch/actor" in driver.last.wakes
        driver.train()
    batches = [event for event in driver.events if isinstance(event, BatchTaken)]
    assert [len(batch.group_ids) for batch in batches] == list(fresh)
    assert [len(batch.group_ids) + len(batch.replayed_ids) for batch in batches] == [4] * 4
    assert [record.num_groups for record in driver.core.steps("actor")] == [4] * 4
    assert driver.fates().drawn == driver.fates().trained == sum(fresh)
    assert driver.core.state == "finished"


def test_no_more_groups_are_drawn_than_a_replay_share_leaves_to_rollouts() -> None:
    driver = started(table=share_table(max_staleness=9), num_steps=3)
    assert len(driver.lease(100)) == 2 * (4 + 2 + 2)


def test_a_replay_share_is_the_only_meaning_and_within_reach() -> None:
    with pytest.raises(ConfigError, match=r"ratio \(0\.5\) adds replayed groups.*share \(0\.3\) replaces"):
        make_table(replay={"ratio": 0.5, "share": 0.3})
    with pytest.raises(
        ConfigError, match=r"share \(0\.7\) leaves 10 fresh groups in a batch of 32.*max_uses"
    ):
        make_table(groups_per_batch=32, replay={"share": 0.7, "max_uses": 3})
    assert make_table(groups_per_batch=32, replay={"share": 0.7, "max_uses": 4}).least_fresh == 10


def test_a_group_is_in_at_most_max_uses_steps():
    driver = started(table=replay_table(max_uses=3, ratio=5.0).model_copy(update={"max_staleness": 9}))
    seen = Counter[int]()
    for step in range(4):
        batch = trained_step(driver, step)
        seen.update((*batch.group_ids, *batch.replayed_ids))
    assert max(seen.values()) == 3


def test_a_reserve_leaves_versions_to_replay():
    table = make_table(max_staleness=3, replay={"ratio": 1.0, "reserve": 2})
    assert started(table=table).status().max_tickets == 4
    driver = started(table=table)
    driver.finish_groups(4)
    assert driver.status().num_tickets == 4
    assert driver.status().staleness_bound == 3
    with pytest.raises(ConfigError, match=r"reserve \(2\) must not exceed"):
        make_table(max_staleness=1, replay={"reserve": 2})


def test_a_batch_holds_the_replayed_samples_and_counts_them():
    driver = started(table=replay_table())
    trained_step(driver, 0)
    driver.finish_groups(2)
    view = driver.take(1)
    assert view is not None
    assert [sample.group_id for sample in view.samples] == [2, 2, 3, 3, 1, 1, 0, 0]
    assert (view.totals.num_groups, view.totals.num_samples, view.staleness_max) == (4, 8, 1)
    assert view.staleness_mean == 0.5


def test_payloads_for_replay_are_retained_after_their_step_is_released():
    driver = started(table=replay_table())
    trained_step(driver, 0)
    driver.release(1)
    assert len(list(driver.core.retained_payloads())) == 4


def test_completed_groups_above_the_capacity_are_evicted_and_others_drawn():
    table = make_table(max_staleness=3, remover={"name": "capacity", "num_groups": 2, "evict": "oldest"})
    driver = started(table=table)
    driver.finish_groups(3)
    assert driver.fates().evicted == 1
    assert driver.fate_of(0) == ["evicted"]
    driver.take(0)
    assert taken(driver) == [(1, 2)]


def test_reinforce_plus_plus_whitens_each_batch():
    driver = started(table=make_table(credit={"name": "reinforce_plus_plus"}))
    driver.finish_groups(2)
    view = driver.take(0)
    assert view is not None
    # Rewards 0 and 1 in each group, equally many tokens.
    assert [round(s.advantages[0][2], 4) for s in view.samples] == [-1.0, 1.0, -1.0, 1.0]
    assert view.totals.advantage_sum == pytest.approx(0.0)


def test_masked_truncated_trajectories_get_no_advantage_and_are_not_compared_with():
    driver = started(
        table=make_table(
            group_size=3,
            credit={"name": "group_relative", "scale": "none"},
            filters=[{"name": "truncated", "action": "mask"}],
        )
    )
    for lease in driver.lease(6):
        meta = make_meta(reward=(1.0, 0.0, 9.0)[lease.episode_idx])
        if lease.episode_idx == 2:
            meta = msgspec.structs.replace(meta, finish_reason="length")
        driver.result(lease.id, make_facts(meta))
    view = driver.take(0)
    assert view is not None
    assert [s.advantages[0][2] for s in view.samples] == [0.5, -0.5, 0.0] * 2


def test_an_episode_that_forks_counts_once_in_advantages_and_in_the_reported_reward():
    table = make_table(group_size=4, groups_per_batch=1, credit={"name": "group_relative", "scale": "none"})
    driver = started(table=table)
    for lease in driver.lease(4):
        is_right = lease.episode_idx == 0
        forks = [
            make_meta(reward=float(is_right), num_trained=num) for num in ((1, 2, 4, 1) if is_right else (4,))
        ]
        driver.result(lease.id, make_facts(*forks))
    view = driver.take(0)
    assert view is not None
    assert [s.advantages[0][2] for s in view.samples] == [0.75] * 4 + [-0.25] * 3
    assert (view.totals.num_samples, view.totals.reward_sum) == (7, 4.0)
    driver.publish(1)
    driver.commit(0)
    assert driver.core.steps("actor")[0].reward_mean == 0.25


def test_shaping_changes_what_credit_sees_and_not_the_reported_reward():
    shaping = [{"name": "overlong", "max_tokens": 4, "cache_tokens": 4, "weight": 2.0}]
    driver = started(table=make_table(shaping=shaping, credit={"name": "reinforce_plus_plus"}))
    driver.finish_groups(2)
    view = driver.take(0)
    assert view is not None
    assert view.totals.reward_sum == 2.0


def test_the_filter_that_dropped_a_group_is_named_in_the_steps_metrics():
    driver = started(table=make_table(filters=[{"name": "reward_range"}, {"name": "zero_variance"}]))
    driver.finish_groups(1, reward=1.0)
    driver.finish_groups(1, reward=0.5)
    trained_step(driver, 0)
    metrics = driver.core.steps("actor")[0].metrics
    figures = {item.name: item.value for item in metrics if item.name.startswith("filtered/")}
    assert figures == {"filtered/reward_range": 1.0, "filtered/zero_variance": 1.0}


def too_easy(facts: GroupFacts) -> str | bool:
    return "solved\nby all" if all(t.reward == 1.0 for t in facts.trajectories) else True


def test_a_filter_of_the_users_own_is_named_with_its_reason():
    own = f"{__name__}:too_easy"
    driver = started(table=make_table(filters=[{"name": "use", "use": own}]))
    driver.finish_groups(1, reward=1.0)
    trained_step(driver, 0)
    metrics = driver.core.steps("actor")[0].metrics
    assert {item.name for item in metrics if item.name.startswith("filtered/")} == {
        f"filtered/{own} (solved by all)"
    }


def test_curators_report_in_the_steps_metrics():
    driver = started(curators=(SolvedConfig(min_visits=1, revisit=0.0),), num_tasks=3)
    driver.finish_groups(1, reward=1.0)
    trained_step(driver, 0)
    figures = {item.name: item.value for item in driver.core.steps("actor")[0].metrics}
    assert figures["curation/selected"] >= 3
    assert driver.core.curation()[0].name == "curation/selected"

"""The limiter, sampler and remover in examples/, as their recipes name them, in whole runs of the core."""

from pathlib import Path

import pytest

from astraflow.dataflow.config import TableConfig
from astraflow.dataflow.core.commands import BatchTaken
from astraflow.recipe.recipe import load_recipe
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta, make_table

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def table_of(name: str, **sizes: int) -> TableConfig:
    """Small groups and batches with the parts of an example's recipe."""
    named = load_recipe(EXAMPLES / f"{name}.yaml").policies["actor"].table
    parts = {key: getattr(named, key).model_dump() for key in ("limiter", "sampler", "remover")}
    return make_table(**sizes, **parts)  # type: ignore[arg-type]


def batches(driver: Driver) -> list[tuple[int, ...]]:
    return [event.group_ids for event in driver.events if isinstance(event, BatchTaken)]


def started(table: TableConfig, num_steps: int) -> Driver:
    driver = Driver(make_core_plan(table=table, num_steps=num_steps))
    driver.start()
    return driver


def finish_with(driver: Driver, rewards: list[float]) -> None:
    """Groups of two, whose second episode gets the reward; a group's advantages grow with it."""
    for lease in driver.lease(2 * len(rewards)):
        reward = rewards[lease.group_id] if lease.episode_idx else 0.0
        driver.result(lease.id, make_facts(make_meta(reward=reward)))


def test_the_limiter_lowers_the_tickets_after_stale_groups_and_raises_them_again():
    driver = started(table_of("own_limiter", max_staleness=1), num_steps=9)
    late, *leases = driver.lease(99)
    assert len(leases) == 4 * 2 - 1  # two batches of two groups
    for lease in leases:
        driver.finish(lease)
    trained(driver, 0)  # groups 1 and 2, as group 0 is not complete
    driver.finish_groups(9)
    trained(driver, 1)  # groups 3 and 4
    driver.finish(late, version=0)
    driver.finish_groups(9)
    trained(driver, 2)  # group 0 is two versions old now
    assert driver.fates().stale == 1
    driver.finish_groups(9)
    assert driver.status().num_tickets == 3
    trained(driver, 3)
    driver.finish_groups(9)
    assert driver.status().num_tickets == 4


def trained(driver: Driver, step: int) -> None:
    assert driver.take(step) is not None
    driver.publish(step + 1)
    driver.commit(step)


def test_the_sampler_takes_the_groups_with_the_largest_advantages():
    table = table_of("own_sampler", max_staleness=3).model_copy(
        update={"credit": make_table(credit={"name": "group_relative", "scale": "none"}).credit}
    )
    driver = started(table, num_steps=4)
    finish_with(driver, [0.1, 0.4, 0.3, 0.2, 0.6, 0.5])
    assert driver.take(0) is not None
    assert batches(driver) == [(4, 5)]


def test_the_remover_evicts_the_groups_with_the_smallest_advantages():
    table = table_of("own_remover", max_staleness=3).model_copy(
        update={
            "credit": make_table(credit={"name": "group_relative", "scale": "none"}).credit,
            "remover": make_table(
                remover={"name": "use", "use": "own_remover:LeastToLearn", "args": {"num_groups": 3}}
            ).remover,
        }
    )
    driver = started(table, num_steps=4)
    finish_with(driver, [0.1, 0.4, 0.3, 0.2, 0.6])
    evicted = [group_id for group_id in range(5) if driver.fate_of(group_id) == ["evicted"]]
    assert evicted == [0, 3]


@pytest.mark.parametrize("name", ["own_limiter", "own_sampler", "own_remover"])
def test_a_run_with_each_of_them_ends(name: str):
    driver = started(table_of(name, max_staleness=2), num_steps=5)
    for step in range(5):
        driver.finish_groups(9)
        trained(driver, step)
    assert driver.core.state == "finished"
    counts = driver.fates()
    assert counts.trained == 10
    assert counts.drawn == counts.trained + counts.stale + counts.evicted + counts.cancelled


@pytest.mark.parametrize("name", ["own_limiter", "own_sampler", "own_remover"])
def test_each_of_them_has_fewer_than_40_lines(name: str):
    assert len((EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()) < 40

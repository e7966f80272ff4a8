"""Absurd but finite values: the core refuses or filters them, and goes on."""

import pytest

from astraflow.dataflow.core.finite import finite_mean, finite_sum, standard_error
from astraflow.errors import RefusedError
from astraflow.types.bounds import MAX_METRIC
from drivers.core_driver import Driver, make_core_plan, make_facts, make_meta, make_table


@pytest.mark.parametrize(
    "lease_id",
    [
        "1" * 5000 + ".0.0",
        "0." + "9" * 5000 + ".0",
        "e0.0." + "1" * 4301,
        "00.0.0",
        "0.0.00",
        "\u0660.0.0",
        "0.0.0\n",
        "-1.0.0",
        "",
        "e",
    ],
)
def test_a_lease_id_that_the_core_never_wrote_is_unknown(lease_id: str) -> None:
    driver = Driver(make_core_plan())
    driver.start()
    driver.lease(2)
    before = driver.core.snapshot()
    with pytest.raises(RefusedError, match="never issued") as caught:
        driver.result(lease_id, make_facts(make_meta()))
    assert caught.value.code == "unknown_lease"
    assert len(str(caught.value)) < 300
    assert driver.core.snapshot() == before


@pytest.mark.parametrize("reward", [1e308, -1.7e308, 1e200, 1e39])
def test_a_finite_reward_never_ends_a_run(reward: float) -> None:
    """Four of eight rewards whose sum, or square, is no float."""
    driver = Driver(make_core_plan(table=make_table(group_size=8)))
    driver.start()
    for lease in driver.lease(8):
        good = lease.episode_idx < 4
        facts = make_facts(make_meta(reward=reward if good else 0.0), score=reward if good else 0.0)
        driver.result(lease.id, facts)
    assert driver.core.state == "running"
    driver.finish_groups(2)
    assert driver.take(0) is not None


def test_sums_of_large_numbers_stay_finite_and_small_ones_are_plain() -> None:
    large = 1.7e308
    assert finite_sum([large, large, -large, -large, 5.0]) == 5.0
    assert finite_sum([large, large]) == finite_mean([large]) == MAX_METRIC
    assert finite_mean([large, large, -large]) == MAX_METRIC
    assert standard_error([large, -large]) == MAX_METRIC
    assert finite_sum([0.1, 0.2, 0.3]) == sum([0.1, 0.2, 0.3])
    assert standard_error([1.0, 2.0, 3.0]) == pytest.approx((1.0 / 3) ** 0.5)

"""What the sizer of a pool decides, one look after the other."""

from typing import Any

import pytest

from astraflow.addons.pool.pool_sizer import Change, PoolSizer, SeatState
from astraflow.config import parse_config
from astraflow.errors import ConfigError
from astraflow.processes.pool import seats_of
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.types import ScalingAdvice

KINDS = {
    "on_demand": {"most": 2, "cost": 3.0},
    "spot": {"most": 2, "cost": 1.0, "labels": {"pool": "spot"}},
}

AS_ADVISED = "no advice yet: too little was seen"
"""The words of the verdict that all looks give; nothing follows from it."""


def make_cluster(**fields: Any) -> ClusterConfig:
    pool = {"window_s": 100.0, "shrink_after_s": 100.0, "patience_s": 60.0} | fields.pop("pool", {})
    return parse_config({"max_services": 8, **fields, "pool": pool}, ClusterConfig, where="cluster")


def names(*numbers: int) -> tuple[str, ...]:
    return tuple(f"rollout-{number}" for number in numbers)


class Watched:
    """A pool under a virtual clock: a decision is carried out at once, and a service joins when told."""

    def __init__(self, num_services: int, **fields: Any) -> None:
        self.sizer = PoolSizer(make_cluster(**fields))
        self.now_s = 0.0
        self.states: dict[str, SeatState] = dict.fromkeys(self.sizer.choose_first(num_services), "working")
        self.needed = 0.0
        """Services that the training needs; 0: nobody knows."""
        self.per_hour = 0.0
        self.others = 0
        """Services that joined by hand."""

    def look(self, missing: int = 0) -> Change | None:
        working = sum(state == "working" for state in self.states.values())
        advice = ScalingAdvice(
            num_services=working + self.others if self.needed else self.num,
            missing_services=missing,
            needed_services=self.needed,
            needed_per_hour=self.per_hour,
            overlap=30.0 if self.needed else 0.0,
            verdict="too_early",
        )
        change = self.sizer.decide(self.now_s, advice, self.states)
        if change is not None:
            self.states |= dict.fromkeys(change.start, "starting")
            for name in change.stop:
                del self.states[name]
        return change

    def wait(self, seconds: float, missing: int = 0) -> list[Change]:
        """Looks every second; the advice is always the same. Returns what was decided."""
        found: list[Change] = []
        for _ in range(int(seconds)):
            self.now_s += 1.0
            found += filter(None, [self.look(missing)])
        return found

    def join(self) -> None:
        self.states = dict.fromkeys(self.states, "working")

    @property
    def num(self) -> int:
        return len(self.states)


def test_a_pool_grows_by_what_is_missing_once_it_has_been_missing_for_a_while() -> None:
    pool = Watched(3)
    assert pool.wait(10, missing=2) == []
    assert pool.wait(1, missing=2) == [Change(AS_ADVISED, start=names(3, 4))]


def test_a_break_in_the_advice_begins_the_wait_anew() -> None:
    pool = Watched(3)
    assert pool.wait(10, missing=2) == []
    pool.look(0)
    assert pool.wait(10, missing=2) == []


def test_services_that_are_starting_are_not_started_twice() -> None:
    pool = Watched(3)
    assert len(pool.wait(60, missing=2)) == 1
    pool.join()
    assert pool.wait(12, missing=1) == [Change(AS_ADVISED, start=names(5))]


def test_a_pool_at_most_doubles_at_once() -> None:
    pool = Watched(1)
    assert [change.start for change in pool.wait(12, missing=900)] == [names(1)]
    pool.join()
    assert [change.start for change in pool.wait(12, missing=900)] == [names(2, 3)]


def test_a_pool_never_passes_its_bounds() -> None:
    pool = Watched(7, min_services=2)
    pool.wait(30, missing=5)
    assert pool.num == 8
    pool.join()
    pool.wait(400, missing=-7)
    assert pool.num == 2


def test_a_pool_shrinks_by_the_fewest_that_were_too_many_all_the_time() -> None:
    pool = Watched(8)
    assert pool.wait(50, missing=-5) == []
    assert pool.wait(50, missing=-2) == []
    assert pool.wait(1, missing=-4) == [Change(AS_ADVISED, stop=names(7, 6))]


def test_one_look_without_a_surplus_keeps_the_pool() -> None:
    pool = Watched(8)
    assert pool.wait(100, missing=-5) == []
    pool.look(0)
    assert pool.wait(100, missing=-5) == []


def test_a_pool_below_its_least_is_filled_at_once() -> None:
    pool = Watched(3, min_services=3)
    del pool.states["rollout-1"]
    assert pool.look() == Change("fewer than cluster.min_services = 3", start=names(1))


@pytest.mark.parametrize(("asked", "begins"), [(0, 2), (3, 3), (99, 8)])
def test_a_run_begins_with_as_many_as_its_recipe_says_within_the_bounds(asked: int, begins: int) -> None:
    assert len(PoolSizer(make_cluster(min_services=2)).choose_first(asked)) == begins


# --- what the training needs ---


def test_a_pool_grows_to_what_is_needed_before_anybody_waits() -> None:
    pool = Watched(3)
    pool.needed = 5.1
    assert pool.wait(10) == []
    (change,) = pool.wait(1)
    assert change.start == names(3, 4)
    assert change.why == f"training needs 5.1 services, and 5.1 in 0 s; {AS_ADVISED}"
    assert pool.wait(100) == []
    pool.join()
    assert pool.wait(500) == []


def test_a_pool_shrinks_to_what_is_needed_although_trainer_and_services_take_turns() -> None:
    pool = Watched(8)
    pool.needed = 5.0
    assert pool.wait(100) == []
    assert [change.stop for change in pool.wait(1)] == [names(7, 6, 5)]
    assert pool.wait(500) == []


def test_what_will_be_needed_when_a_start_is_over_is_started_now() -> None:
    pool = Watched(3)
    pool.needed = 4.0
    assert [change.start for change in pool.wait(12)] == [names(3)]
    pool.wait(89)
    pool.join()  # a start takes 90 s
    pool.per_hour = 40.0
    assert [change.start for change in pool.wait(12)] == [names(4)]


def test_a_service_that_will_be_too_many_when_it_may_go_is_let_go() -> None:
    pool = Watched(6)
    pool.needed = 6.0
    pool.per_hour = -36.0  # one fewer each 100 s
    changes = pool.wait(102)
    assert [change.stop for change in changes] == [names(5)]


def test_need_that_varies_by_a_part_of_a_service_changes_nothing() -> None:
    pool = Watched(6)
    for second in range(1200):
        pool.needed = 6.0 + 0.2 * (-1) ** (second // 200)
        assert pool.wait(1) == []


def test_services_that_joined_by_hand_count() -> None:
    pool = Watched(3)
    pool.needed = 5.0
    pool.others = 2
    assert pool.wait(300) == []


def test_waits_that_the_need_does_not_explain_count_as_before() -> None:
    pool = Watched(3)
    pool.needed = 3.0
    assert [change.start for change in pool.wait(12, missing=2)] == [names(3, 4)]


@pytest.mark.parametrize(("trainer_cost", "num"), [(4.0, 5), (100.0, 6)])
def test_the_dearer_the_trainers_are_the_less_they_wait(trainer_cost: float, num: int) -> None:
    pool = Watched(3, pool={"trainer_cost": trainer_cost})
    pool.needed = 5.5
    pool.wait(12)
    pool.join()
    pool.wait(300)
    assert pool.num == num


def test_a_cheap_service_is_worth_less_of_a_wait_than_a_dear_one() -> None:
    sizes: list[int] = []
    for cost in (0.3, 3.0):
        pool = Watched(2, pool={"trainer_cost": 4.0, "kinds": {"any": {"most": 8, "cost": cost}}})
        pool.needed = 4.45
        pool.wait(12)
        pool.join()
        pool.wait(12)
        sizes.append(pool.num)
    assert sizes == [5, 4]


# --- kinds ----------------------------------------------------------------------------------------


def test_seats_are_numbered_kind_by_kind() -> None:
    cluster = make_cluster(pool={"kinds": KINDS})
    assert [(seat.name, seat.kind) for seat in seats_of(cluster)] == [
        ("rollout-0", "on_demand"),
        ("rollout-1", "on_demand"),
        ("rollout-2", "spot"),
        ("rollout-3", "spot"),
    ]


def test_the_cheapest_kind_is_started_first_and_stopped_last() -> None:
    pool = Watched(1, pool={"kinds": KINDS})
    assert list(pool.states) == ["rollout-2"]
    pool.wait(12, missing=1)
    pool.join()
    pool.wait(12, missing=2)
    pool.join()
    assert list(pool.states) == ["rollout-2", "rollout-3", "rollout-0", "rollout-1"]
    assert [change.stop for change in pool.wait(102, missing=-3)] == [names(1, 0, 3)]


def test_a_slow_kind_is_dearer_than_its_cost_says_and_counts_for_less() -> None:
    kinds = {"fast": {"most": 2, "cost": 1.0}, "slow": {"most": 8, "cost": 0.8, "speed": 0.5}}
    pool = Watched(2, pool={"kinds": kinds})
    assert list(pool.states) == ["rollout-0", "rollout-1"]
    assert [len(change.start) for change in pool.wait(12, missing=1)] == [2]


def test_a_kind_that_finds_no_machine_is_given_up_for_another_and_tried_again_later() -> None:
    pool = Watched(1, pool={"kinds": KINDS})
    pool.wait(12, missing=1)  # rollout-3 of kind spot never joins
    given_up, instead = pool.wait(75, missing=1)
    assert given_up == Change("not working after 60 s", stop=names(3))
    assert instead.start == names(0)
    pool.join()
    assert pool.wait(30) == []
    (tried,) = pool.wait(60)
    assert tried == Change("a cheaper kind is tried", start=names(3))
    pool.join()
    assert pool.look() == Change("a cheaper kind has taken the place", stop=names(0))


def test_without_another_kind_a_service_keeps_its_place_in_the_queue() -> None:
    pool = Watched(1)
    pool.wait(12, missing=1)
    assert pool.wait(1000, missing=1) == []


def test_a_machine_that_is_taken_away_counts_as_one_that_starts() -> None:
    pool = Watched(2, pool={"kinds": KINDS})
    pool.states = dict.fromkeys(pool.states, "starting")
    changes = pool.wait(62, missing=0)
    assert changes[0] == Change("not working after 60 s", stop=names(2, 3))
    assert changes[1] == Change("fewer than cluster.min_services = 1", start=names(0))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_services": 2, "min_services": 3}, "max_services = 2 is below min_services = 3"),
        (
            {"min_services": 5, "pool": {"kinds": KINDS}},
            "pool.kinds have room for 4 services, fewer than min_services = 5",
        ),
    ],
)
def test_bounds_that_cannot_be_kept_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_cluster(**fields)

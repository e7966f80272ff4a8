"""The choice of curators, and `shuffle`."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.curation import make_curation
from astraflow.algorithms.seeded import permute
from astraflow.algorithms.task_orders import Shuffle, ShuffleConfig, WeightedConfig
from astraflow.config import Use
from astraflow.errors import ConfigError


class Descending:
    """A curator of a user's own: from the last task to the first."""

    def __init__(self, *, num_tasks: int, seed: int, stride: int = 1) -> None:
        self.num_tasks, self.stride, self.position = num_tasks, stride, 0

    def next(self) -> int:
        self.position += self.stride
        return self.num_tasks - 1 - (self.position - self.stride) % self.num_tasks

    def observe(self, outcome: object) -> None:
        pass

    def state(self) -> dict[str, Any]:
        return {"position": self.position}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.position = int(state["position"])


def test_every_task_comes_once_an_epoch_in_another_order():
    curator = Shuffle(num_tasks=100, seed=3)
    first, second = ([curator.next() for _ in range(100)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second != list(range(100))


def test_another_seed_gives_another_order():
    orders = [[permute(i, size=50, seed=seed, epoch=0) for i in range(50)] for seed in range(2)]
    assert orders[0] != orders[1]


def test_a_draw_from_a_huge_source_is_as_cheap_as_from_a_small_one():
    curator = Shuffle(num_tasks=10**12, seed=0)
    drawn = [curator.next() for _ in range(100)]
    assert len(set(drawn)) == 100
    assert max(drawn) > 10**11


def test_a_restored_curator_goes_on_with_the_same_tasks():
    curator, other = Shuffle(num_tasks=7, seed=1), Shuffle(num_tasks=7, seed=1)
    for _ in range(10):
        curator.next()
    other.restore(curator.state())
    assert [other.next() for _ in range(10)] == [curator.next() for _ in range(10)]


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 300), seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_every_size_and_seed_gives_a_permutation(size: int, seed: int, epoch: int):
    order = [permute(i, size=size, seed=seed, epoch=epoch) for i in range(size)]
    assert sorted(order) == list(range(size))


def test_every_place_of_an_epoch_is_equally_likely():
    firsts = [permute(0, size=10, seed=0, epoch=epoch) for epoch in range(2000)]
    assert all(140 < firsts.count(task) < 260 for task in range(10))


def test_a_position_outside_is_refused():
    with pytest.raises(IndexError, match="position 5"):
        permute(5, size=5, seed=0, epoch=0)


def test_without_a_curator_tasks_are_shuffled():
    curation, shuffle = make_curation([], sources={"a": 3, "b": 4}, seed=5), Shuffle(num_tasks=7, seed=5)
    assert [curation.next() for _ in range(20)] == [shuffle.next() for _ in range(20)]
    assert curation.metrics() == ()


def test_a_users_own_curator_takes_its_args():
    use = Use(use=f"{__name__}:Descending", args={"stride": 2})
    curator = make_curation([use], sources={"train": 10}, seed=0)
    assert [curator.next(), curator.next()] == [9, 7]
    figures = {item.name: item.value for item in curator.metrics()}
    assert figures == {
        "curation/selected": 2.0,
        "curation/forced": 0.0,
        f"curation/{__name__}:Descending/position": 4.0,
    }


def test_a_users_own_curator_with_a_wrong_argument_is_refused_with_the_nearest():
    use = Use(use=f"{__name__}:Descending", args={"strid": 2})
    with pytest.raises(ConfigError, match='did you mean "stride"'):
        make_curation([use], sources={"train": 10}, seed=0)


def half_a_curator(*, num_tasks: int, seed: int) -> object:
    """Lacks every method."""
    return object()


def test_a_users_own_curator_without_a_method_is_refused():
    with pytest.raises(ConfigError, match="needs the method 'next'"):
        make_curation([Use(use=f"{__name__}:half_a_curator")], sources={"train": 10}, seed=0)


def test_two_curators_that_propose_tasks_are_refused():
    with pytest.raises(ConfigError, match="2 curators propose tasks"):
        make_curation([ShuffleConfig(), WeightedConfig()], sources={"train": 5}, seed=0)

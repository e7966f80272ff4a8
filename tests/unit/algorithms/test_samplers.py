"""Which groups samplers pick, removers evict and replay brings back."""

from collections import Counter
from dataclasses import dataclass

import pytest

from astraflow.algorithms.limiters import TicketLimiter
from astraflow.algorithms.removers import CapacityRemover, KeepRemover
from astraflow.algorithms.samplers import (
    EdfSampler,
    FifoSampler,
    OnPolicySampler,
    ReplayConfig,
    SweepSampler,
    WindowSampler,
)
from astraflow.errors import ConfigError
from astraflow.protocols import TableSizes, TableView
from drivers.core_driver import make_table


@dataclass(frozen=True)
class Ready:
    """A completed group."""

    oldest_version: int = 0
    num_trained_tokens: int = 4
    advantage_square_sum: float = 4.0


def ready(*group_ids: int, **versions: int) -> dict[int, Ready]:
    """Groups in completion order; `g5=3`: the oldest token of group 5 is of version 3."""
    return {i: Ready(oldest_version=versions.get(f"g{i}", 0)) for i in group_ids}


def test_fifo_waits_for_the_oldest_draw():
    sampler = FifoSampler()
    assert sampler.pick([4, 5, 6], ready(6, 5), 2) is None
    assert sampler.pick([4, 5, 6], ready(6, 4, 5), 2) == (4, 5)


def test_fifo_needs_as_many_groups_as_a_batch_holds():
    assert FifoSampler().pick([4], ready(4), 2) is None


def test_sweep_takes_what_completed_first():
    sampler = SweepSampler()
    assert sampler.pick([4, 5, 6], ready(6, 5), 2) == (6, 5)
    assert sampler.pick([4, 5, 6], ready(6), 2) is None


def test_each_sampler_states_its_worst_staleness():
    sizes = TableSizes(groups_per_batch=4, engine_lag=1, max_staleness=9)
    assert FifoSampler().worst_staleness(sizes, max_tickets=8) == 2
    assert FifoSampler().worst_staleness(sizes, max_tickets=9) == 3
    assert SweepSampler().worst_staleness(sizes, max_tickets=8) == 9


def test_fifo_never_passes_the_sweeps_bound():
    sizes = TableSizes(groups_per_batch=4, engine_lag=1, max_staleness=3)
    assert FifoSampler().worst_staleness(sizes, max_tickets=80) == 3


def test_tickets_are_what_the_staleness_allows_without_what_is_reserved():
    sizes = TableSizes(groups_per_batch=4, engine_lag=1, max_staleness=5, reserve=2)
    table = TableView(num_running=0, num_ready=0, num_in_batches=0, num_committed=0, newest_version=0)
    assert TicketLimiter().max_tickets(sizes) == TicketLimiter().tickets(table, sizes) == 3 * 4


def test_edf_takes_the_oldest_tokens_first():
    sampler = EdfSampler()
    assert sampler.pick([4, 5, 6], ready(4, 5, 6, g4=3, g5=1, g6=2), 2) == (5, 6)
    assert sampler.pick([4, 5, 6], ready(6, 5), 2) == (5, 6)
    assert sampler.pick([4, 5, 6], ready(6), 2) is None


def test_window_passes_over_a_slow_group_within_its_span_only():
    sampler = WindowSampler(span=4)
    assert sampler.pick(range(4, 10), ready(9, 8, 7, 6, 5), 2) == (5, 6)
    assert sampler.pick([4, 7, 8, 9], ready(9, 8, 7), 2) is None
    assert sampler.pick([4, 7, 8, 9], ready(9, 8, 7, 4), 2) == (4, 7)


def test_window_widens_to_a_batch_where_its_span_was_filtered_empty():
    sampler = WindowSampler(span=2)
    assert sampler.pick([4, 20, 30], ready(20, 4), 2) == (4, 20)
    assert sampler.pick([4, 20, 30], ready(20, 30), 2) is None


@pytest.mark.parametrize(("span", "num_groups"), [(1, 2), (4, 2), (7, 3), (3, 3)])
def test_a_group_that_never_completes_is_passed_by_fewer_than_the_span(span: int, num_groups: int):
    sampler = WindowSampler(span=span)
    waiting, passed = dict.fromkeys(range(20)), 0
    while (picked := sampler.pick(waiting, ready(*list(waiting)[1:]), num_groups)) is not None:
        assert 0 not in picked
        passed += len(picked)
        assert passed <= max(span, num_groups) - 1
        waiting = {i: None for i in range(20 + passed) if i == 0 or i > passed}
    assert sampler.pick(waiting, ready(*waiting), num_groups) is not None


def test_window_states_its_worst_staleness():
    sizes = TableSizes(groups_per_batch=4, engine_lag=1, max_staleness=9)
    assert WindowSampler(span=8).worst_staleness(sizes, max_tickets=8) == 4
    assert EdfSampler().worst_staleness(sizes, max_tickets=8) == 9


def test_on_policy_takes_what_is_there_and_is_never_stale():
    sampler = OnPolicySampler()
    assert sampler.pick([4, 5, 6], ready(6, 5), 2) == (6, 5)
    sizes = TableSizes(groups_per_batch=4, engine_lag=0, max_staleness=0)
    assert sampler.worst_staleness(sizes, max_tickets=4) == 0


def test_on_policy_needs_a_staleness_of_0():
    with pytest.raises(ConfigError, match="on_policy needs max_staleness 0"):
        make_table(max_staleness=1, sampler={"name": "on_policy"})


def test_capacity_evicts_the_stalest_or_the_first_drawn():
    groups = ready(6, 4, 5, g4=3, g5=1, g6=2)
    assert CapacityRemover(num_groups=2).remove(groups, 1) == (5,)
    assert CapacityRemover(num_groups=1, evict="oldest").remove(groups, 1) == (4, 5)
    assert CapacityRemover(num_groups=3).remove(groups, 1) == ()
    assert KeepRemover().remove(groups, 1) == ()


def test_capacity_must_hold_a_batch():
    with pytest.raises(ConfigError, match="must hold a batch"):
        make_table(groups_per_batch=4, remover={"name": "capacity", "num_groups": 3})


def test_replay_of_the_latest_takes_the_newest_tokens():
    assert ReplayConfig(select="latest").pick(ready(1, 2, 3, g1=5, g2=9, g3=5), 2, seed="") == (2, 3)


def test_uniform_replay_takes_each_group_equally_often():
    groups = ready(*range(5))
    counts = Counter(
        i for n in range(2000) for i in ReplayConfig(select="uniform").pick(groups, 2, seed=str(n))
    )
    assert all(700 < counts[i] < 900 for i in range(5))


def test_prioritised_replay_follows_the_size_of_the_advantages():
    groups = {0: Ready(advantage_square_sum=0.0), 1: Ready(), 2: Ready(advantage_square_sum=36.0)}
    firsts = Counter(ReplayConfig(select="priority").pick(groups, 1, seed=str(n))[0] for n in range(2000))
    # Root mean squares 0, 1 and 3.
    assert firsts[0] == 0
    assert firsts[2] / 2000 == pytest.approx(0.75, abs=0.04)


def test_there_may_be_less_to_replay_than_asked_for():
    assert sorted(ReplayConfig(select="uniform").pick(ready(1, 2), 5, seed="")) == [1, 2]
    assert ReplayConfig(select="latest").pick({}, 3, seed="") == ()

"""Each sampler's stated worst staleness holds against engines that lag as far as they may, and any order of
completion; without a restart `fifo` keeps it without discarding a group, unless `replay.share` leaves so few
fresh groups to a batch that the tickets of one full batch are too many."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.algorithms.limiters import TicketLimiter
from astraflow.algorithms.samplers import FifoSampler, SweepSampler, WindowSampler
from astraflow.dataflow.core.commands import BatchTaken
from drivers.core_driver import Driver, make_core_plan, make_table

_NUM_STEPS = 12
_OWN = {"name": "use", "use": "own_sampler:MostToLearn", "args": {"spare": 1}}
_OWN_LIMITER = {"name": "use", "use": "own_limiter:Careful", "args": {"most": 3}}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sampler=st.sampled_from(["fifo", "sweep", "edf", "window", "on_policy", "own"]),
    limiter=st.sampled_from([{"name": "tickets"}, _OWN_LIMITER]),
    span=st.integers(1, 6),
    engine_lag=st.integers(0, 2),
    slack=st.integers(0, 2),
    groups_per_batch=st.integers(1, 3),
    share=st.sampled_from([0.0, 0.4, 0.6]),
    is_ahead=st.booleans(),
)
def test_no_group_is_staler_at_take_than_its_sampler_states(
    *,
    seed: int,
    sampler: str,
    limiter: dict[str, object],
    span: int,
    engine_lag: int,
    slack: int,
    groups_per_batch: int,
    share: float,
    is_ahead: bool,
):
    if sampler == "on_policy":
        engine_lag = slack = 0
    table = make_table(
        group_size=1,
        groups_per_batch=groups_per_batch,
        max_staleness=engine_lag + slack,
        engine_lag=engine_lag,
        limiter=limiter,
        sampler={"window": {"name": sampler, "span": span}, "own": _OWN}.get(sampler, {"name": sampler}),
        replay={"share": share, "max_uses": 3},
    )
    driver = Driver(make_core_plan(table=table, num_steps=_NUM_STEPS))
    play(driver, seed=seed, is_ahead=is_ahead)
    batches = [event for event in driver.events if isinstance(event, BatchTaken)]
    assert len(batches) == _NUM_STEPS
    assert max(max(batch.staleness) for batch in batches) <= driver.status().staleness_bound
    assert driver.status().staleness_bound <= table.max_staleness
    assert {len(batch.group_ids) + len(batch.replayed_ids) for batch in batches} == {groups_per_batch}
    most_waiting = -(-driver.status().max_tickets // table.least_fresh) - 1 + engine_lag
    if sampler in {"fifo", "on_policy"} and most_waiting <= table.max_staleness:
        assert driver.fates().stale == 0


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    span=st.integers(1, 6),
    engine_lag=st.integers(0, 1),
    num_tickets=st.integers(1, 3),
    groups_per_batch=st.integers(1, 3),
)
def test_a_window_keeps_its_formula_without_the_sweep(
    *, seed: int, span: int, engine_lag: int, num_tickets: int, groups_per_batch: int
):
    """With `max_staleness` out of the way, the formula alone must hold; nothing is dropped as stale."""
    table = make_table(
        group_size=1,
        groups_per_batch=groups_per_batch,
        max_staleness=99,
        engine_lag=engine_lag,
        sampler={"name": "window", "span": span},
    )
    max_tickets = num_tickets * groups_per_batch
    driver = Driver(make_core_plan(table=table, num_steps=_NUM_STEPS))
    play(driver, seed=seed, is_ahead=False, max_tickets=max_tickets)
    bound = WindowSampler(span=span).worst_staleness(table.sizes, max_tickets=max_tickets)
    batches = [event for event in driver.events if isinstance(event, BatchTaken)]
    assert len(batches) == _NUM_STEPS
    assert max(max(batch.staleness) for batch in batches) <= bound
    assert driver.fates().stale == 0


def play(driver: Driver, *, seed: int, is_ahead: bool, max_tickets: int = 10**6) -> None:
    """A whole run in which engines lag as far as they may, and the newest lease tends to finish first."""
    engine_lag = driver.plan.policies["actor"].table.engine_lag
    driver.start()
    order = random.Random(seed)
    running: list[tuple[str, int]] = []
    in_hand: list[int] = []
    next_step = 0
    while driver.core.state == "running":
        oldest = max(0, driver.status().newest_version - engine_lag)
        num_free = min(order.randint(0, 4), max_tickets - driver.status().num_tickets)
        leases = driver.lease(num_free, served=driver.served(actor=oldest))
        running.extend((lease.id, oldest) for lease in leases)
        must_finish = not leases and not in_hand
        for _ in range(order.randint(int(must_finish and bool(running)), len(running))):
            # The newest lease tends to finish first: the worst order for those that wait.
            lease_id, version = running.pop(-order.randint(1, min(3, len(running))))
            driver.finish(lease_id, version=version)
        if len(in_hand) <= int(is_ahead) and next_step < _NUM_STEPS and driver.take(next_step) is not None:
            in_hand.append(next_step)
            next_step += 1
        elif in_hand:
            driver.publish(in_hand[0] + 1)
            driver.commit(in_hand.pop(0))


@given(data=st.data(), num_waiting=st.integers(0, 8), num_groups=st.integers(1, 4))
def test_samplers_pick_whole_batches_of_ready_groups_in_their_order(
    *, data: st.DataObject, num_waiting: int, num_groups: int
):
    waiting = dict.fromkeys(data.draw(st.permutations(range(num_waiting))))
    done = data.draw(st.permutations(tuple(waiting)))
    ready = dict.fromkeys(done[: data.draw(st.integers(0, num_waiting))])
    head = tuple(waiting)[:num_groups]
    is_whole = len(head) == num_groups and set(head) <= ready.keys()
    assert FifoSampler().pick(waiting, ready, num_groups) == (head if is_whole else None)
    first = tuple(ready)[:num_groups]
    assert SweepSampler().pick(waiting, ready, num_groups) == (first if len(first) == num_groups else None)


@given(
    groups_per_batch=st.integers(1, 9),
    engine_lag=st.integers(0, 5),
    slack=st.integers(0, 5),
    spare=st.integers(0, 9),
)
def test_the_stated_bounds_follow_from_the_tickets_and_never_pass_the_limit(
    *, groups_per_batch: int, engine_lag: int, slack: int, spare: int
):
    table = make_table(
        groups_per_batch=groups_per_batch, engine_lag=engine_lag, max_staleness=engine_lag + slack
    )
    sizes = table.sizes
    max_tickets = TicketLimiter().max_tickets(sizes)
    assert max_tickets == (slack + 1) * groups_per_batch
    assert FifoSampler().worst_staleness(sizes, max_tickets=max_tickets) == table.max_staleness
    assert SweepSampler().worst_staleness(sizes, max_tickets=max_tickets + spare) == table.max_staleness
    fewer = max(1, max_tickets - spare)
    assert engine_lag <= FifoSampler().worst_staleness(sizes, max_tickets=fewer) <= table.max_staleness

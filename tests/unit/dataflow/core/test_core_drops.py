"""A batch that cannot be trained is given up: what becomes of its groups, its step and its trainer."""

import pytest

from astraflow.algorithms.samplers import ReplayConfig
from astraflow.dataflow.core.commands import BatchDropped, BatchTaken, DropBatch
from astraflow.dataflow.core.core import Core
from astraflow.errors import FencedError, RefusedError
from drivers.core_driver import Driver, make_core_plan, make_table


def driver_at_step_1() -> Driver:
    """Step 0 is committed, the groups 2 and 3 are in the batch of step 1."""
    d = Driver(make_core_plan(table=make_table(max_staleness=4)))
    d.start()
    d.run_step()
    d.finish_groups(2)
    assert d.take(1) is not None
    return d


def test_the_groups_are_evicted_and_the_step_gets_others() -> None:
    d = driver_at_step_1()
    live = d.fates().live
    reply = d.drop_batch()
    assert (reply.steps, reply.num_groups) == ((1,), 2)
    assert [d.fate_of(group) for group in (2, 3)] == [["evicted"], ["evicted"]]
    assert d.fates().live == live - 2, "tickets return"
    assert BatchDropped(policy="actor", steps=(1,), reason="it does not fit") in d.events
    d.attach(durable_step=1)
    d.publish(1, has_files=True)
    d.finish_groups(2)
    d.take(1)
    batches = [event for event in d.events if isinstance(event, BatchTaken) and event.step == 1]
    assert [event.group_ids for event in batches] == [(2, 3), (4, 5)]
    d.publish(2)
    d.commit(1)
    assert [d.fate_of(group) for group in (4, 5)] == [["trained"], ["trained"]]
    metrics = {item.name: item.value for item in d.core.steps("actor")[-1].metrics}
    assert metrics["dropped_batches"] == 1.0


def test_a_batch_that_was_taken_ahead_goes_too() -> None:
    d = driver_at_step_1()
    d.finish_groups(2)
    assert d.take(2) is not None
    assert d.drop_batch().steps == (1, 2)
    assert d.fates().evicted == 4


def test_the_trainer_that_holds_it_is_fenced() -> None:
    d = driver_at_step_1()
    d.drop_batch()
    for call in (lambda: d.take(1), lambda: d.publish(2), lambda: d.commit(1)):
        with pytest.raises(FencedError):
            call()


def test_a_request_that_is_repeated_drops_nothing_more() -> None:
    d = driver_at_step_1()
    command = DropBatch(policy="actor", epoch=d.status().epoch, step=1, reason="")
    d.apply(command)
    d.attach(durable_step=1)
    d.publish(1, has_files=True)
    d.finish_groups(2)
    d.take(1)
    before = d.core.snapshot()
    with pytest.raises(FencedError):
        d.apply(command)
    assert d.core.snapshot() == before


@pytest.mark.parametrize("step", [0, 2, 3])
def test_only_the_oldest_step_that_is_not_committed_can_lose_its_batch(step: int) -> None:
    d = driver_at_step_1()
    before = d.core.snapshot()
    with pytest.raises(RefusedError, match=r"only that of the oldest step .* \(step 2\)"):
        d.drop_batch(step=step)
    assert d.core.snapshot() == before


def test_a_step_without_a_batch_has_none_to_drop() -> None:
    d = Driver(make_core_plan())
    d.start()
    with pytest.raises(RefusedError, match="none now"):
        d.drop_batch()


def test_groups_of_a_dropped_batch_are_not_replayed() -> None:
    table = make_table(max_staleness=4, replay=ReplayConfig(ratio=0.5, size=6).model_dump())
    d = Driver(make_core_plan(table=table))
    d.start()
    d.run_step()
    d.finish_groups(2)
    d.take(1)
    d.drop_batch()
    d.attach(durable_step=1)
    d.publish(1, has_files=True)
    d.finish_groups(4)
    d.take(1)
    d.publish(2)
    d.commit(1)
    d.take(2)
    replayed = {i for event in d.events if isinstance(event, BatchTaken) for i in event.replayed_ids}
    assert replayed
    assert not replayed & {2, 3}


def test_a_dropped_batch_survives_a_replay_and_a_snapshot() -> None:
    d = driver_at_step_1()
    d.drop_batch()
    core = Core(d.plan)
    for command, now_s, events in d.commands:
        assert core.apply(command, now_s).events == events
    assert core.snapshot() == d.core.snapshot()
    assert Core.from_snapshot(d.plan, core.snapshot()).snapshot() == core.snapshot()

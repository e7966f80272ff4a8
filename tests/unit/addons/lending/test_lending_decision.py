"""Which tenant of a shared device has the baton, and which devices join a step."""

import math
from dataclasses import replace

import pytest

from astraflow.addons.lending.decision import (
    Crew,
    Reason,
    Rules,
    Side,
    SwitchTimes,
    TrainerView,
    choose_side,
    num_joining,
)

WAITING = TrainerView(
    side=Side.TRAIN,
    step=5,
    steps_left=10,
    num_ready=0,
    period_s=30.0,
    since_s=10.0,
    step_s=10.0,
    times=SwitchTimes(2.0),
    lent_step=4,
)
LENT = replace(WAITING, side=Side.GENERATE, lent_step=5)


def test_a_device_is_lent_while_its_trainer_waits() -> None:
    choice = choose_side(WAITING)
    assert (choice.side, choice.reason) == (Side.GENERATE, Reason.LENT)


def test_a_device_is_lent_before_anything_is_known() -> None:
    view = replace(WAITING, step=0, lent_step=-1, period_s=0.0)
    assert math.isinf(view.wait_s)
    assert choose_side(view).side == Side.GENERATE


def test_a_wait_of_two_switches_is_too_short() -> None:
    view = replace(WAITING, times=SwitchTimes(10.0))
    assert choose_side(view).reason == Reason.TOO_SHORT


@pytest.mark.parametrize(("lent_step", "side"), [(4, Side.GENERATE), (3, Side.TRAIN)])
def test_lending_begins_only_with_a_margin(lent_step: int, side: Side) -> None:
    view = replace(WAITING, times=SwitchTimes(9.0), lent_step=lent_step)
    assert choose_side(view, Rules(margin=1.25)).side == side


def test_lending_needs_a_longer_wait_if_services_wait_for_tickets() -> None:
    view = replace(WAITING, times=SwitchTimes(5.0), waits_for_tickets=True)
    assert choose_side(view).reason == Reason.TOO_SHORT
    assert choose_side(replace(view, times=SwitchTimes(3.0))).side == Side.GENERATE


def test_the_longer_forecast_counts() -> None:
    assert replace(WAITING, missing_s=3.0).wait_s == 20.0
    assert replace(WAITING, missing_s=40.0).wait_s == 40.0
    assert replace(WAITING, since_s=50.0, missing_s=3.0).wait_s == 3.0


def test_a_ready_batch_takes_the_device_back() -> None:
    choice = choose_side(replace(LENT, num_ready=1))
    assert (choice.side, choice.reason) == (Side.TRAIN, Reason.BATCH_READY)


def test_a_device_returns_one_switch_early_only_if_services_wait_for_tickets() -> None:
    near = replace(LENT, missing_s=1.5)
    assert choose_side(near).side == Side.GENERATE
    assert choose_side(replace(near, waits_for_tickets=True)).reason == Reason.BATCH_NEAR
    assert choose_side(replace(near, waits_for_tickets=True, missing_s=2.5)).side == Side.GENERATE


def test_a_device_is_lent_once_per_step() -> None:
    assert choose_side(replace(WAITING, lent_step=5)).reason == Reason.LENT_ALREADY


def test_a_trainer_without_steps_gives_its_device_away() -> None:
    assert choose_side(replace(WAITING, steps_left=0, num_ready=1)).reason == Reason.DONE


def test_lending_pauses_longer_after_each_late_switch() -> None:
    times = SwitchTimes(2.0).after(3.0, step=5)
    assert (times.num_late, times.paused_until) == (0, 0)
    times = times.after(9.0, step=5)
    assert (times.num_late, times.paused_until) == (1, 9)
    assert choose_side(replace(WAITING, times=replace(times, mean_s=2.0))).reason == Reason.PAUSED
    assert times.after(90.0, step=9).paused_until == 17


def test_idle_devices_join_a_step_if_it_ends_earlier() -> None:
    assert num_joining(WAITING, Crew(num_own=1, num_idle=3)) == 3
    assert num_joining(replace(WAITING, times=SwitchTimes(10.0)), Crew(num_own=1, num_idle=3)) == 0
    assert num_joining(WAITING, Crew(num_own=1, num_idle=0)) == 0


def test_devices_join_for_a_small_gain_only_in_the_last_steps() -> None:
    costly = replace(WAITING, times=SwitchTimes(4.0))
    assert num_joining(costly, Crew(num_own=1, num_idle=3)) == 0
    assert num_joining(replace(costly, steps_left=2), Crew(num_own=1, num_idle=3)) == 3


def test_idle_devices_are_shared_by_need() -> None:
    free = replace(WAITING, times=SwitchTimes(0.0))
    equal = Crew(num_own=1, num_idle=4, others_s=(10.0,))
    assert num_joining(free, equal) == 2
    assert num_joining(free, replace(equal, others_s=(30.0,))) == 1
    assert num_joining(replace(free, step_s=30.0), equal) == 3


def test_busy_devices_join_only_if_all_wait_for_the_trainer() -> None:
    crew = Crew(num_own=1, num_idle=0, num_busy=8)
    behind = replace(WAITING, num_ready=1, waits_for_tickets=True)
    assert num_joining(behind, crew) == 4
    assert num_joining(replace(behind, num_ready=0), crew) == 0
    assert num_joining(replace(behind, waits_for_tickets=False), crew) == 0

"""Lending: devices change sides at most once per step, and no trainer starves."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from astraflow.addons.lending.decision import (
    Crew,
    Side,
    SwitchTimes,
    TrainerView,
    choose_side,
    num_joining,
)

_SECONDS = st.floats(0.001, 1e6)
_VIEWS = st.builds(
    TrainerView,
    side=st.sampled_from(Side),
    step=st.integers(0, 50),
    steps_left=st.integers(0, 3),
    num_ready=st.integers(0, 2),
    missing_s=_SECONDS | st.just(float("inf")),
    period_s=_SECONDS | st.just(0.0),
    since_s=_SECONDS,
    step_s=_SECONDS,
    times=st.builds(SwitchTimes, _SECONDS, st.integers(0, 3), st.integers(0, 60)),
    lent_step=st.integers(-1, 50),
    waits_for_tickets=st.booleans(),
)


@given(_VIEWS)
def test_a_trainer_with_a_ready_batch_gets_its_devices(view: TrainerView) -> None:
    if view.num_ready and view.steps_left:
        assert choose_side(view).side == Side.TRAIN


@given(_VIEWS)
def test_a_choice_stands_until_something_changes(view: TrainerView) -> None:
    chosen = choose_side(view).side
    step = view.step if chosen == Side.GENERATE and view.side == Side.TRAIN else view.lent_step
    assert choose_side(replace(view, side=chosen, lent_step=step)).side == chosen


@given(_VIEWS)
def test_devices_are_lent_only_if_the_wait_exceeds_two_switches(view: TrainerView) -> None:
    if view.side == Side.TRAIN and view.steps_left and choose_side(view).side == Side.GENERATE:
        assert view.wait_s > 2 * view.times.mean_s
        assert view.lent_step != view.step


@given(st.lists(st.floats(0.1, 1e4), min_size=1, max_size=6), st.integers(1, 64))
def test_idle_devices_are_shared_by_need_and_no_trainer_starves(steps_s: list[float], num_idle: int) -> None:
    base = TrainerView(side=Side.TRAIN, step=1, steps_left=1, num_ready=0, step_s=1.0, times=SwitchTimes(0.0))
    shares: list[int] = []
    for idx, step_s in enumerate(steps_s):
        others_s = (*steps_s[:idx], *steps_s[idx + 1 :])
        shares.append(
            num_joining(replace(base, step_s=step_s), Crew(num_own=1, num_idle=num_idle, others_s=others_s))
        )
    assert all(1 <= share <= num_idle for share in shares)
    assert sum(shares) < num_idle + len(shares), "no share is rounded up by more than one device"
    assert [share for _, share in sorted(zip(steps_s, shares, strict=True))] == sorted(shares)

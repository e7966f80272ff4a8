"""Advice on the size of the pool, under a virtual clock."""

import pytest

from astraflow.dataflow.service.scaling import WaitShares

SERVICES = tuple(f"rollout-{idx}" for idx in range(7))


def train(
    shares: WaitShares, *, wait_frac: float, step_s: float = 10.0, steps: int = 20, policy: str = "actor"
) -> float:
    """Steps of equal length, each with the same share of waiting. Returns: the time after the last one."""
    shares.note_session(policy, 0.0)
    for step in range(1, steps + 1):
        shares.note_step(policy, waited_s=wait_frac * step_s, now_s=step * step_s)
    return steps * step_s


def idle(shares: WaitShares, *, free_frac: float, until_s: float, is_held_back: bool = True) -> None:
    """Heartbeats of all services, every two seconds."""
    for beat in range(int(until_s / 2) + 1):
        for service in SERVICES:
            shares.note_beat(service, free_frac=free_frac, is_held_back=is_held_back, now_s=2.0 * beat)


def test_a_trainer_that_waits_asks_for_the_services_that_would_fill_it() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.22)
    idle(shares, free_frac=0.0, until_s=now_s)
    advice = shares.advice(now_s, {}, SERVICES)
    assert advice.verdict == "too_few"
    assert advice.missing_services == 2  # 7 * 0.22 / 0.78
    assert advice.trainer_wait_frac == {"actor": pytest.approx(0.22)}


def test_a_pool_that_waits_is_told_how_many_are_too_many() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.0)
    idle(shares, free_frac=0.2, until_s=now_s)
    advice = shares.advice(now_s, {}, SERVICES)
    assert advice.verdict == "too_many"
    assert advice.missing_services == -1
    assert advice.rollout_wait_frac == pytest.approx(0.2)


def test_the_last_service_is_never_too_many() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.0)
    for beat in range(100):
        shares.note_beat("rollout-0", free_frac=1.0, is_held_back=True, now_s=2.0 * beat)
    advice = shares.advice(now_s, {}, SERVICES[:1])
    assert advice.missing_services == 0
    assert (advice.verdict, advice.rollout_wait_frac) == ("balanced", 1.0)


def test_free_slots_that_no_trainer_keeps_empty_are_no_wait() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.02)
    idle(shares, free_frac=0.5, until_s=now_s, is_held_back=False)
    advice = shares.advice(now_s, {}, SERVICES)
    assert (advice.verdict, advice.rollout_wait_frac) == ("balanced", 0.0)
    assert advice.missing_services == 0


def test_the_time_in_which_a_service_loads_its_first_version_is_not_its_time() -> None:
    shares = WaitShares()
    for beat in range(40):
        shares.note_beat("rollout-0", free_frac=1.0, is_held_back=beat >= 30, now_s=0.5 * beat)
    assert shares.advice(20.0, {}, SERVICES[:1]).rollout_wait_frac == 0.0  # too little was seen
    for beat in range(40, 50):
        shares.note_beat("rollout-0", free_frac=1.0, is_held_back=True, now_s=0.5 * beat)
    assert shares.advice(25.0, {}, SERVICES[:1]).rollout_wait_frac == 1.0


def test_where_both_wait_the_schedule_is_named_instead() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.5)
    idle(shares, free_frac=0.4, until_s=now_s)
    advice = shares.advice(now_s, {}, SERVICES)
    assert advice.verdict == "take_turns"
    assert advice.missing_services == 0


def test_the_policy_that_waits_most_decides() -> None:
    shares = WaitShares()
    train(shares, wait_frac=0.1, policy="judge")
    now_s = train(shares, wait_frac=0.3, policy="solver")
    advice = shares.advice(now_s, {}, SERVICES)
    assert (advice.verdict, advice.missing_services) == ("too_few", 3)


def test_a_wait_that_goes_on_counts_before_its_step_is_committed() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.0)
    later_s = now_s + 50.0
    assert shares.advice(later_s, {}, SERVICES).trainer_wait_frac == {"actor": 0.0}
    waiting = shares.advice(later_s, {"actor": 0.0}, SERVICES)
    assert waiting.trainer_wait_frac == {"actor": pytest.approx(0.2)}
    assert waiting.missing_services == 2  # 7 * 0.2 / 0.8


def test_what_was_long_ago_is_forgotten() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.9, steps=30)
    for step in range(1, 40):
        shares.note_step("actor", waited_s=0.0, now_s=now_s + 10.0 * step)
    assert shares.advice(now_s + 390.0, {}, SERVICES).verdict == "balanced"


def test_services_that_left_count_no_more() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.0)
    idle(shares, free_frac=0.5, until_s=now_s)
    for beat in range(100):
        shares.note_beat("late", free_frac=0.0, is_held_back=True, now_s=2.0 * beat)
    advice = shares.advice(now_s, {}, ("late",))
    assert (advice.num_services, advice.rollout_wait_frac) == (1, 0.0)


def test_there_is_no_advice_from_a_few_seconds() -> None:
    shares = WaitShares()
    assert shares.advice(0.0, {}, SERVICES).verdict == "too_early"
    now_s = train(shares, wait_frac=0.9, steps=2)
    advice = shares.advice(now_s, {}, SERVICES)
    assert (advice.missing_services, advice.trainer_wait_frac) == (0, {})


def change(shares: WaitShares, *, at_s: float, before: int, after: int, until_s: float) -> None:
    """A pool of busy services, which grows or shrinks once. A beat every two seconds from each."""
    for beat in range(int(until_s / 2) + 1):
        for idx in range(before if 2.0 * beat < at_s else after):
            shares.note_beat(f"s{idx}", free_frac=0.0, is_held_back=False, now_s=2.0 * beat)


def test_advice_that_was_followed_is_not_given_again() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.5)
    change(shares, at_s=now_s - 10.0, before=4, after=8, until_s=now_s)
    advice = shares.advice(now_s, {}, [f"s{idx}" for idx in range(8)])
    assert advice.missing_services == 0  # four services made half of what the trainer could train
    assert advice.verdict == "has_grown"


def test_a_pool_that_has_shrunk_is_not_told_to_shrink_again() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.0)
    for beat in range(int(now_s / 2) + 1):
        for idx in range(8 if 2.0 * beat < now_s - 10.0 else 4):
            shares.note_beat(f"s{idx}", free_frac=0.5, is_held_back=True, now_s=2.0 * beat)
    advice = shares.advice(now_s, {}, [f"s{idx}" for idx in range(4)])
    assert advice.missing_services == 0


def test_a_wait_before_any_service_was_at_work_asks_for_no_more_of_them() -> None:
    shares = WaitShares()
    shares.note_session("actor", 0.0)
    for beat in range(61):  # both load their first version for two minutes
        for service in SERVICES[:2]:
            shares.note_beat(service, free_frac=1.0, is_held_back=False, now_s=2.0 * beat)
    advice = shares.advice(120.0, {"actor": 0.0}, SERVICES[:2])
    assert (advice.missing_services, advice.trainer_wait_frac) == (0, {})
    for beat in range(61, 71):
        for service in SERVICES[:2]:
            shares.note_beat(service, free_frac=0.0, is_held_back=False, now_s=2.0 * beat)
    shares.note_step("actor", waited_s=138.0, now_s=140.0)
    assert shares.advice(140.0, {}, SERVICES[:2]).trainer_wait_frac == {}  # 18 s are too little
    for step in range(1, 4):
        shares.note_step("actor", waited_s=5.0, now_s=140.0 + 10.0 * step)
    assert shares.advice(170.0, {}, SERVICES[:2]).trainer_wait_frac == {"actor": pytest.approx(15 / 48)}


def test_a_first_batch_that_takes_longer_than_the_window_asks_for_more_services() -> None:
    shares = WaitShares(100.0)
    shares.note_session("actor", 0.0)
    for beat in range(101):
        shares.note_beat("rollout-0", free_frac=0.0, is_held_back=False, now_s=2.0 * beat)
        assert beat > 50 or not shares.advice(2.0 * beat, {"actor": 0.0}, SERVICES[:1]).missing_services
    assert shares.advice(200.0, {"actor": 0.0}, SERVICES[:1]).missing_services > 0


def test_services_that_load_their_first_version_are_not_too_many() -> None:
    shares = WaitShares()
    now_s = train(shares, wait_frac=0.0)
    for beat in range(101):
        shares.note_beat("rollout-0", free_frac=0.3, is_held_back=True, now_s=2.0 * beat)
    assert shares.advice(now_s, {}, SERVICES).missing_services == 0


def test_a_shorter_window_gives_advice_earlier_and_forgets_earlier() -> None:
    shares = WaitShares(20.0)
    now_s = train(shares, wait_frac=0.5, steps=2)
    assert shares.advice(now_s, {}, SERVICES).missing_services == 7
    for step in range(1, 4):
        shares.note_step("actor", waited_s=0.0, now_s=now_s + 10.0 * step)
    assert shares.advice(now_s + 30.0, {}, SERVICES).missing_services == 0

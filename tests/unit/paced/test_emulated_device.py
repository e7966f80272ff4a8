"""The emulated accelerator under a virtual clock."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow_paced.emulated_device import PacedDevice, PacedJob


def make_job(num_tokens: int, *, owner: str = "actor", prefill: float = 0.0) -> PacedJob:
    return PacedJob(owner, num_tokens, prefill, ended=lambda: None)


def ends_of(device: PacedDevice) -> list[tuple[float, PacedJob]]:
    """Runs the device until nothing advances, looking only when something is due."""
    found: list[tuple[float, PacedJob]] = []
    while math.isfinite(due_s := device.due_s):
        found += [(due_s, job) for job in device.advance(due_s)]
    return found


def test_a_request_takes_its_tokens_at_its_speed() -> None:
    device, job = PacedDevice(num_slots=4, tokens_per_s=50.0), make_job(1000)
    device.submit(job)
    assert device.advance(10.0) == []
    assert device.tokens_done(job) == 500
    assert device.advance(20.0) == [job]
    assert device.tokens_done(job) == 1000


def test_requests_beside_each_other_do_not_slow_down_without_a_bound() -> None:
    device = PacedDevice(num_slots=4, tokens_per_s=50.0)
    jobs = [make_job(100), make_job(50)]
    for job in jobs:
        device.submit(job)
    assert ends_of(device) == [(1.0, jobs[1]), (2.0, jobs[0])]


def test_a_bound_of_all_together_slows_each_one_down() -> None:
    device = PacedDevice(num_slots=4, tokens_per_s=100.0, max_tokens_per_s=100.0)
    jobs = [make_job(100), make_job(50)]
    for job in jobs:
        device.submit(job)
    # Two: 1/100 + 2/100 s a token; 50 tokens each. Then one: 1/100 + 1/100 s for the other 50.
    assert [end for end, _ in ends_of(device)] == pytest.approx([1.5, 2.5])


def test_a_waiting_request_begins_when_the_slot_freed_however_late_anybody_looks() -> None:
    device = PacedDevice(num_slots=1, tokens_per_s=10.0)
    jobs = [make_job(10), make_job(20), make_job(30)]
    for job in jobs:
        device.submit(job)
    assert (device.num_running("actor"), device.num_waiting("actor")) == (1, 2)
    assert device.advance(4.0) == jobs[:2]
    assert device.tokens_done(jobs[2]) == 10
    assert device.due_s == pytest.approx(6.0)


def test_prefill_comes_before_the_first_token() -> None:
    device, job = PacedDevice(num_slots=1, tokens_per_s=10.0), make_job(10, prefill=5.0)
    device.submit(job)
    device.advance(0.5)
    assert device.tokens_done(job) == 0
    device.advance(0.6)
    assert device.tokens_done(job) == 1
    assert device.due_s == pytest.approx(1.5)


def test_a_held_owner_keeps_its_slots_and_the_others_go_on() -> None:
    device = PacedDevice(num_slots=3, tokens_per_s=10.0)
    held, other, late = make_job(10), make_job(10, owner="judge"), make_job(10)
    device.submit(held)
    device.submit(other)
    device.advance(0.5)
    device.hold("actor")
    device.submit(late)
    assert device.num_running("actor") == 2
    assert device.advance(3.0) == [other]
    assert device.tokens_done(held) == 5
    device.release("actor")
    assert ends_of(device) == [(3.5, held), (4.0, late)]


def test_a_removed_request_frees_its_slot() -> None:
    device = PacedDevice(num_slots=1, tokens_per_s=10.0)
    first, second, third = make_job(100), make_job(10), make_job(10)
    for job in (first, second, third):
        device.submit(job)
    device.advance(1.0)
    device.remove(first)
    device.remove(third)
    assert ends_of(device) == [(2.0, second)]
    assert (device.num_running("actor"), device.num_waiting("actor")) == (0, 0)
    device.remove(second)


def test_the_newest_request_is_preempted_when_the_cache_is_full_and_computes_its_tokens_again() -> None:
    device = PacedDevice(num_slots=4, tokens_per_s=10.0, kv_tokens=200)
    jobs = [PacedJob("actor", 100, 10.0, ended=lambda: None, num_context=20) for _ in range(2)]
    device.submit(jobs[0])
    assert device.advance(5.0) == []
    device.submit(jobs[1])
    assert device.kv_frac == pytest.approx((20 + 100 * 50 / 110 + 20) / 200)
    # Both need 120 tokens, and the first ends before the cache is full.
    assert [job for _, job in ends_of(device)] == jobs
    assert device.num_preemptions("actor") == 0

    device = PacedDevice(num_slots=4, tokens_per_s=10.0, kv_tokens=200)
    jobs = [PacedJob("actor", 100, 10.0, ended=lambda: None, num_context=20) for _ in range(2)]
    for job in jobs:
        device.submit(job)
    assert device.advance(9.0) == []  # 80 more tokens for each: full after 88 of 110
    assert (device.num_running("actor"), device.num_waiting("actor")) == (1, 1)
    assert device.tokens_done(jobs[1]) == 78
    (_, first), (end_s, second) = ends_of(device)
    assert [first, second] == jobs
    # After the first has ended, half of a prefill per token of context: 98 of them, then 22 new ones.
    assert end_s == pytest.approx(11.0 + 0.1 * (98 / 2 + 22))
    assert device.num_preemptions("actor") == 1
    assert device.kv_frac == 0.0


def test_a_single_request_may_exceed_the_cache() -> None:
    device, job = PacedDevice(num_slots=2, tokens_per_s=10.0, kv_tokens=50), make_job(100)
    device.submit(job)
    assert ends_of(device) == [(10.0, job)]


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    kv_tokens=st.integers(1, 120),
    holds=st.lists(st.floats(0.1, 5.0), max_size=6),
)
def test_the_cache_holds_what_runs_and_everything_ends(
    lengths: list[int], kv_tokens: int, holds: list[float]
) -> None:
    device = PacedDevice(num_slots=5, tokens_per_s=7.0, max_tokens_per_s=11.0, kv_tokens=kv_tokens)
    jobs = [PacedJob("actor", num, 1.0, ended=lambda: None, num_context=3) for num in lengths]
    for job in jobs:
        device.submit(job)
    ended: list[PacedJob] = []
    now_s = 0.0
    for pause_s in holds:
        now_s += pause_s
        ended += device.advance(now_s)
        device.hold("actor")
        running = device.num_running("actor")
        assert (device.kv_frac or 0.0) <= 1.0
        now_s += pause_s
        assert device.advance(now_s) == []
        assert device.num_running("actor") == running
        device.release("actor")
    ended += [job for _, job in ends_of(device)]
    assert len(ended) == len(set(ended)) == len(jobs)
    assert (device.kv_frac, device.num_running("actor"), device.num_waiting("actor")) == (0.0, 0, 0)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    num_slots=st.integers(1, 6),
    looks=st.lists(st.floats(0.0, 5.0), max_size=20),
)
def test_when_somebody_looks_changes_nothing(lengths: list[int], num_slots: int, looks: list[float]) -> None:
    def device_of(jobs: list[PacedJob]) -> PacedDevice:
        device = PacedDevice(num_slots=num_slots, tokens_per_s=7.0, max_tokens_per_s=11.0)
        for job in jobs:
            device.submit(job)
        return device

    jobs, watched = [make_job(n) for n in lengths], [make_job(n) for n in lengths]
    order = [jobs.index(job) for _, job in ends_of(device_of(jobs))]
    device, seen = device_of(watched), list[PacedJob]()
    for at_s in sorted(looks):
        seen += device.advance(at_s)
    seen += [job for _, job in ends_of(device)]
    # Requests that end together within rounding may change places.
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[watched.index(job)] for job in seen] == [lengths[idx] for idx in order]
    assert device.due_s == math.inf

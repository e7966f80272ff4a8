"""How many services the training needs, from what services and trainers report, under a virtual clock."""

import random
import statistics

import pytest

from astraflow.dataflow.service.demand import Demand, pace

SPEED = 100
"""Tokens per second of a service whose slots are full."""


class Watched:
    """A run in which `num` services work all the time, or a share of it, and batches take `batch` tokens."""

    def __init__(self, num: int = 4, *, train_s: float = 10.0, busy_frac: float = 1.0) -> None:
        self.demand = Demand(300.0)
        self.num = num
        self.train_s = train_s
        self.busy_frac = busy_frac
        self.now_s = 0.0
        self.tokens = 1.0
        self.batches = 0.0
        self.demand.note_session("actor")

    def step(self, batch: float, *, waited_s: float = 0.0) -> None:
        """Services report every second, and are full for a part of each step; then a step is committed."""
        length_s = self.train_s + waited_s
        for _ in range(int(length_s)):
            self.now_s += 1.0
            is_full = (self.now_s % 10) < 10 * self.busy_frac
            self.tokens += SPEED * is_full
            for idx in range(self.num):
                self.demand.note_beat(f"s{idx}", tokens=int(self.tokens), is_full=is_full, now_s=self.now_s)
        self.batches += self.num * SPEED * self.busy_frac * length_s / batch
        self.demand.note_step("actor", trained_s=self.train_s, batches=self.batches, now_s=self.now_s)

    @property
    def needed(self) -> float:
        found = self.demand.estimate(self.now_s)
        assert found is not None
        return found.number


def test_the_need_is_the_tokens_of_a_batch_by_what_a_service_generates_while_one_is_trained() -> None:
    run = Watched(num=4, train_s=10.0)
    for _ in range(20):
        run.step(6000.0, waited_s=5.0)
    assert run.needed == pytest.approx(6.0, rel=0.02)  # 6000 tokens / (10 s * 100 tokens/s)


@pytest.mark.parametrize(("num", "busy_frac"), [(2, 1.0), (12, 0.5), (7, 0.3)])
def test_the_need_does_not_depend_on_the_pool(num: int, busy_frac: float) -> None:
    run = Watched(num, busy_frac=busy_frac)
    for _ in range(40):
        run.step(6000.0)
    assert run.needed == pytest.approx(6.0, rel=0.12)


@pytest.mark.parametrize("seed", range(3))
def test_long_steps_with_batches_that_vary_move_the_need_by_less_than_half_a_service(seed: int) -> None:
    run = Watched(num=9, train_s=100.0)
    rng = random.Random(seed)
    told: list[float] = []
    for step in range(100):
        run.step(90_000.0 * rng.gauss(1.0, 0.1))
        if step >= 24:
            told.append(run.needed)
    assert statistics.mean(told) == pytest.approx(9.0, rel=0.05)
    assert statistics.pstdev(told) < 0.39  # with 8 steps instead of 24: 0.39, 0.46, 0.50


def test_a_need_that_grows_is_followed_and_told_ahead() -> None:
    run = Watched(num=4, train_s=20.0)
    for step in range(60):
        run.step(8000.0 + 200.0 * step)
    needed = run.demand.estimate(run.now_s)
    assert needed is not None
    assert needed.number == pytest.approx(20000.0 / 2000.0, rel=0.1)
    assert needed.after(200.0) - needed.number == pytest.approx(0.7, rel=0.2)  # 7/10 of 10 steps of 0.1
    assert needed.after(-1e9) == 0.0


def test_a_pool_of_which_too_little_was_seen_has_no_known_need() -> None:
    run = Watched()
    run.step(6000.0)
    run.step(6000.0)
    assert run.demand.estimate(run.now_s) is None


def test_services_that_report_no_tokens_or_are_never_full_tell_no_need() -> None:
    silent, idle = Demand(300.0), Demand(300.0)
    for step in range(1, 40):
        for beat in range(10):
            now_s = 10.0 * step + beat
            silent.note_beat("s0", tokens=0, is_full=True, now_s=now_s)
            idle.note_beat("s0", tokens=int(50 * now_s), is_full=False, now_s=now_s)
        for demand in (silent, idle):
            demand.note_step("actor", trained_s=5.0, batches=float(step), now_s=10.0 * step + 9)
    assert silent.estimate(400.0) is None
    assert idle.estimate(400.0) is None


def test_another_session_of_the_trainer_begins_anew() -> None:
    run = Watched()
    for _ in range(20):
        run.step(6000.0)
    run.demand.note_session("actor")
    assert run.demand.estimate(run.now_s) is None
    for _ in range(20):
        run.step(3000.0)
    assert run.needed == pytest.approx(3.0, rel=0.02)


def test_the_trainer_that_needs_most_decides() -> None:
    run = Watched()
    for step in range(1, 21):
        run.step(6000.0)
        run.demand.note_step("judge", trained_s=5.0, batches=run.batches, now_s=run.now_s + step * 0.01)
    assert run.needed == pytest.approx(12.0, rel=0.1)


def test_steps_that_take_turns_with_generation_overlap_less() -> None:
    apart = Watched(num=6, train_s=10.0, busy_frac=0.8)
    together = Watched(num=6, train_s=10.0)
    for _ in range(30):
        apart.step(6000.0, waited_s=2.0)
        together.step(6000.0)
    found = [run.demand.estimate(run.now_s) for run in (apart, together)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].overlap < 10 < found[1].overlap


@pytest.mark.parametrize("overlap", [6.0, 15.0, 40.0])
def test_a_pace_grows_with_the_pool_and_passes_neither_bound(overlap: float) -> None:
    paces = [pace(num, 8.0, overlap) for num in range(1, 17)]
    assert paces == sorted(paces)
    assert all(share <= min(1.0, num / 8.0) for num, share in enumerate(paces, start=1))
    assert pace(8, 8.0, 40.0) > pace(8, 8.0, 6.0)
    assert pace(0, 8.0, overlap) < 1e-5
    assert pace(3, 0.0, overlap) == 1.0

"""The speed of a service from the durations of its episodes, where the truth is known."""

import heapq
import itertools
import math
import random
from functools import partial

import pytest

from astraflow_paced.emulated_device import PacedDevice, PacedJob
from astraflow_paced.forecast.service_fit import EpisodeTime, fit_service

NUM_SLOTS = 16


class Service:
    """Episodes of one request and an environment, in waves, so that the long ones end almost alone."""

    def __init__(self, *, tokens_per_s: float, max_tokens_per_s: float, env_s: float, seed: int) -> None:
        self.episodes: list[EpisodeTime] = []
        self._device = PacedDevice(
            num_slots=NUM_SLOTS, tokens_per_s=tokens_per_s, max_tokens_per_s=max_tokens_per_s
        )
        self._env_s = env_s
        self._rng = random.Random(seed)
        self._now_s = 0.0
        self._events: list[tuple[float, int, partial[None]]] = []
        self._order = itertools.count()

    def run(self, *, waves: int, every_s: float) -> None:
        """Fills all slots every so often, and goes on until all episodes have ended."""
        for idx in range(waves):
            self._at(idx * every_s, partial(self._wave))
        while self._events or not math.isinf(self._device.due_s):
            self._now_s = min(self._device.due_s, self._events[0][0] if self._events else math.inf)
            for job in self._device.advance(self._now_s):
                job.ended()
            while self._events and self._events[0][0] <= self._now_s:
                heapq.heappop(self._events)[-1]()

    def _at(self, due_s: float, call: "partial[None]") -> None:
        heapq.heappush(self._events, (due_s, next(self._order), call))

    def _wave(self) -> None:
        for _ in range(NUM_SLOTS - self._device.num_running("all")):
            num_tokens = max(1, min(320, round(self._rng.lognormvariate(4.2, 0.6))))
            answered = partial(self._answered, num_tokens, self._now_s)
            self._device.submit(PacedJob(owner="all", num_tokens=num_tokens, prefill=0.0, ended=answered))

    def _answered(self, num_tokens: int, began_s: float) -> None:
        ended_s = self._now_s + self._env_s * self._rng.lognormvariate(0.0, 0.3)
        self._at(ended_s, partial(self._ended, num_tokens, began_s))

    def _ended(self, num_tokens: int, began_s: float) -> None:
        self.episodes.append(EpisodeTime("rollout-0", self._now_s, self._now_s - began_s, num_tokens, 1))


@pytest.mark.parametrize("every_s", [4.0, 12.0])
@pytest.mark.parametrize("env_s", [0.0, 0.2])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_speed_is_that_of_the_device(env_s: float, every_s: float, seed: int) -> None:
    service = Service(tokens_per_s=40.0, max_tokens_per_s=1280.0, env_s=env_s, seed=seed)
    service.run(waves=30, every_s=every_s)
    fixed_s, row_s, turn_s = fit_service(service.episodes, NUM_SLOTS)
    assert 1 / fixed_s == pytest.approx(40.0, rel=0.03)
    assert fixed_s + NUM_SLOTS * row_s == pytest.approx(1 / 40 + NUM_SLOTS / 1280, rel=0.03)
    assert turn_s == pytest.approx(env_s * math.exp(0.3**2 / 2), abs=0.05)


def test_a_device_that_others_do_not_slow_down_has_no_bound() -> None:
    service = Service(tokens_per_s=50.0, max_tokens_per_s=0.0, env_s=0.0, seed=0)
    service.run(waves=10, every_s=4.0)
    assert fit_service(service.episodes, NUM_SLOTS) == pytest.approx((1 / 50, 0.0, 0.0), abs=1e-6)


def test_a_device_whose_requests_share_all_of_it_is_slower_the_more_there_are() -> None:
    service = Service(tokens_per_s=1e9, max_tokens_per_s=400.0, env_s=0.0, seed=0)
    service.run(waves=10, every_s=6.0)
    fixed_s, row_s, _ = fit_service(service.episodes, NUM_SLOTS)
    assert fixed_s + row_s == pytest.approx(1 / 400, rel=0.05), "alone"
    assert fixed_s + NUM_SLOTS * row_s == pytest.approx(NUM_SLOTS / 400, rel=0.05)


def test_episodes_that_took_no_time_have_no_speed() -> None:
    episodes = [EpisodeTime("rollout-0", 1.0, 0.0, 10, 1)] * 4
    assert fit_service(episodes, NUM_SLOTS) == (0.0, 0.0, 0.0)

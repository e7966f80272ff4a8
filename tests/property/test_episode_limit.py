"""EpisodeLimit by load against any load, and against engines that behave steadily."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.protocols import Capacity
from astraflow.rollout.episode_limit import EpisodeLimit


def capacity(kv_frac: float | None, waiting: int, preempted: int, running: int = 8) -> Capacity:
    return Capacity(
        num_slots=512,
        num_running=running,
        num_waiting=waiting,
        max_context=1024,
        generated_tokens=0,
        kv_frac=kv_frac,
        num_preemptions=preempted,
    )


class Loop:
    """A service that always has leases, and an engine whose cache every episode takes the same share of.

    What doesn't fit is preempted, and waits in the engine.
    """

    def __init__(self, ceiling: int, share: float, *, num_slots: int = 10_000) -> None:
        self.episode_limit = EpisodeLimit(ceiling)
        self.share = share
        self.num_slots = num_slots
        self.num_preemptions = 0
        self.num_running = 0
        self.episode_limit.observe([self._look()], num_running=0)
        self._fill()

    def run(self, num: int) -> list[int]:
        """Lets `num` episodes end one after the other. Returns the limits."""
        limits: list[int] = []
        for _ in range(num):
            self.num_running -= 1
            self.episode_limit.observe([self._look()], num_running=self.num_running, num_ended=1)
            self._fill()
            limits.append(self.episode_limit.num_slots)
        return limits

    def _fill(self) -> None:
        self.num_running += max(0, self.episode_limit.num_free(self.num_running))
        self.num_running = max(1, self.num_running)

    def _look(self) -> Capacity:
        fitting = min(self.num_running, self.num_slots, max(1, int(1 / self.share)))
        waiting = self.num_running - fitting
        if self.num_running > 1 / self.share:
            self.num_preemptions += 1
        return capacity(min(1.0, fitting * self.share), waiting, self.num_preemptions, fitting)


@given(
    ceiling=st.integers(1, 500),
    looks=st.lists(
        st.tuples(
            st.none() | st.floats(0, 1), st.integers(0, 600), st.integers(0, 50), st.integers(0, 500),
            st.integers(0, 9),
        ),
        max_size=200,
    ),
)  # fmt: skip
def test_the_limit_is_never_above_the_ceiling_and_never_below_one(
    ceiling: int, looks: list[tuple[float | None, int, int, int, int]]
) -> None:
    episode_limit = EpisodeLimit(ceiling)
    for kv_frac, waiting, preempted, running, ended in looks:
        episode_limit.observe([capacity(kv_frac, waiting, preempted)], num_running=running, num_ended=ended)
        assert 1 <= episode_limit.num_slots <= ceiling
        assert 1 <= running + episode_limit.num_free(running) <= ceiling


@given(ceiling=st.integers(1, 60), share=st.floats(0.01, 0.45))
@settings(max_examples=25, deadline=None)
def test_a_steady_load_ends_in_a_steady_limit(ceiling: int, share: float) -> None:
    loop = Loop(ceiling, share)
    loop.run(80 * ceiling)
    before = loop.num_preemptions
    limits = loop.run(20 * ceiling)
    assert max(limits) - min(limits) <= 1
    assert sum(a != b for a, b in itertools.pairwise(limits)) <= 1
    assert loop.num_preemptions == before
    # It uses what there is: one more would not leave room to grow.
    assert max(limits) == ceiling or (max(limits) + 2) * share >= 0.9


@given(ceiling=st.integers(8, 60), storm=st.integers(1, 200), share=st.floats(0.002, 0.05))
@settings(max_examples=25, deadline=None)
def test_the_limit_recovers_after_a_storm_of_preemptions(ceiling: int, storm: int, share: float) -> None:
    loop = Loop(ceiling, share)
    loop.run(60 * ceiling)
    before = loop.episode_limit.num_slots
    calm = loop.share
    loop.share = calm * 4  # episodes that are four times as long
    loop.run(storm)
    loop.share = calm
    assert max(loop.run(100 * ceiling)[-ceiling:]) >= before - 1

"""A pool that sizes itself by the dataflow's advice, under a given load: it finds its size and stays.

Both parts are the real ones. What is modelled is who waits: a trainer that could train what `demand` services
generate waits for the share that is missing; services wait for the share that is too much. Services that tell
their tokens let the dataflow know what is needed, too.
"""

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from astraflow.addons.pool.pool_sizer import PoolSizer, SeatState
from astraflow.config import parse_config
from astraflow.dataflow.service.scaling import WaitShares
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.types import ScalingAdvice

WINDOW_S = 60.0
EVERY_S = 2.0
JOIN_S = 14.0
MOST = 12


class Loop:
    """The pool, the waits of a demand, the advice on them, and what the sizer makes of it."""

    def __init__(self, *, least: int, first: int, tells_tokens: bool = False) -> None:
        pool = {"window_s": WINDOW_S, "shrink_after_s": 30.0}
        self.tells_tokens = tells_tokens
        self.tokens: dict[str, int] = {}
        self.batches = 0.0
        self.waited_s = 0.0
        fields = {"min_services": least, "max_services": MOST, "pool": pool}
        self.sizer = PoolSizer(parse_config(fields, ClusterConfig, where="cluster"))
        self.shares = WaitShares(WINDOW_S)
        self.shares.note_session("actor", 0.0)
        self.now_s = 0.0
        self.since_s = dict.fromkeys(self.sizer.choose_first(first), -JOIN_S)
        self.sizes = [len(self.since_s)]

    def run(self, demand: float, duration_s: float, noise: float = 0.0) -> None:
        """Lets time pass; `noise` is what every other step of the trainer waits more or less."""
        until_s = self.now_s + duration_s
        while self.now_s < until_s:
            self.now_s += EVERY_S
            working = [name for name, since_s in self.since_s.items() if self.now_s - since_s >= JOIN_S]
            num = len(working)
            odd = noise if round(self.now_s / EVERY_S) % 2 else -noise
            waited = min(1.0, max(0.0, 1 - num / demand + odd))
            free = max(0.0, 1 - demand / num) if num else 0.0
            self._train(waited)
            is_full = round(self.now_s / EVERY_S) % 10 < 10 * (1 - free)
            for name in working:
                self.tokens[name] = self.tokens.get(name, 1) + 200 * is_full
                self.shares.note_beat(
                    name,
                    free_frac=float(not is_full) if self.tells_tokens else free,
                    is_held_back=True,
                    now_s=self.now_s,
                    tokens=self.tokens[name] if self.tells_tokens else 0,
                )
            self._follow(self.shares.advice(self.now_s, {}, working), working)

    def _train(self, waited: float) -> None:
        """A step takes `EVERY_S` of training, and longer if the trainer waits."""
        before = int(self.batches)
        self.waited_s += waited * EVERY_S
        self.batches += 1 - waited
        if not self.tells_tokens or int(self.batches) > before:
            done = self.batches if self.tells_tokens else 0.0
            self.shares.note_step("actor", waited_s=self.waited_s, now_s=self.now_s, batches=done)
            self.waited_s = 0.0

    def _follow(self, advice: ScalingAdvice, working: list[str]) -> None:
        states: dict[str, SeatState] = {n: "working" if n in working else "starting" for n in self.since_s}
        change = self.sizer.decide(self.now_s, advice, states)
        if change is None:
            return
        self.since_s |= dict.fromkeys(change.start, self.now_s)
        for name in change.stop:
            del self.since_s[name]
        self.sizes.append(len(self.since_s))


def is_monotone(sizes: list[int]) -> bool:
    return sizes in (sorted(sizes), sorted(sizes, reverse=True))


demands = st.floats(0.3, 16.0)
bounds = st.tuples(st.integers(1, MOST), st.integers(1, MOST))


@settings(max_examples=30)
@given(demands, bounds)
def test_a_pool_finds_a_size_for_its_load_without_turning_round_and_stays(
    demand: float, sizes: tuple[int, int]
) -> None:
    least, first = min(sizes), max(sizes)
    loop = Loop(least=least, first=first)
    loop.run(demand, 900.0)
    assert is_monotone(loop.sizes), loop.sizes
    num = loop.sizes[-1]
    assert num <= least or num - demand < 1 + 1e-6 or num * 0.05 > num - demand, "too many are left"
    assert num == MOST or 1 - num / demand < 0.05 + 1e-6, "too few were started"
    settled = len(loop.sizes)
    loop.run(demand, 300.0)
    assert len(loop.sizes) == settled


@settings(max_examples=20)
@given(st.floats(1.0, 11.0), st.integers(1, MOST))
def test_a_pool_whose_need_is_known_finds_its_size_and_stays(demand: float, first: int) -> None:
    loop = Loop(least=1, first=first, tells_tokens=True)
    loop.run(demand, 900.0)
    assert -1 <= loop.sizes[-1] - demand <= 2, loop.sizes
    settled = len(loop.sizes)
    loop.run(demand, 300.0)
    assert len(loop.sizes) <= settled + 1


@settings(max_examples=20)
@given(demands, st.integers(1, MOST), st.floats(0.0, 0.04))
def test_variation_between_steps_does_not_make_a_pool_flap(demand: float, first: int, noise: float) -> None:
    loop = Loop(least=1, first=first)
    loop.run(demand, 900.0, noise)
    changes = [after - before for before, after in itertools.pairwise(loop.sizes)]
    num_turns = sum((before > 0) != (after > 0) for before, after in itertools.pairwise(changes))
    assert num_turns <= 1, loop.sizes


@settings(max_examples=20)
@given(st.lists(demands, min_size=2, max_size=4), bounds)
def test_a_pool_stays_within_its_bounds_whatever_the_load_does(
    loads: list[float], sizes: tuple[int, int]
) -> None:
    least, first = min(sizes), max(sizes)
    loop = Loop(least=least, first=first)
    for demand in loads:
        loop.run(demand, 200.0)
    assert all(least <= num <= MOST for num in loop.sizes), loop.sizes


@settings(max_examples=50)
@given(st.integers(1, MOST), st.integers(-20, 20), st.integers(-20, 20))
def test_advice_for_more_never_leads_to_fewer(first: int, some: int, other: int) -> None:
    def size_after(missing: int) -> int:
        loop = Loop(least=1, first=first)
        names = list(loop.since_s)
        advice = ScalingAdvice(num_services=len(names), missing_services=missing)
        num = len(names)
        for _ in range(math.ceil(40.0 / EVERY_S)):
            loop.now_s += EVERY_S
            change = loop.sizer.decide(loop.now_s, advice, dict.fromkeys(names, "working"))
            if change is not None:
                return num + len(change.start) - len(change.stop)
        return num

    assert size_after(min(some, other)) <= size_after(max(some, other))

"""Decides how many rollout services a run should have, and which, from the dataflow's advice.

Passive: time is an argument, in seconds of any one clock, and who calls carries out what is decided. One look
decides one thing at most, in this order:

1. A service that has not joined within the patience is given up if there is another kind to turn to; its
   own kind is not tried for as long.
2. A service that took the place of a dearer one has joined: the dearer one goes.
3. Fewer than the least there should be: more are started.
4. There have been too few without a break: more are started, less those that are on their way, and at most as
   many as are at work.
5. There have been too many without a break: the fewest that were too many go.
6. A cheaper kind might take the place of a dearer one: one service for each is started.

How many there should be follows from what the training needs, if the dataflow knows it
(`dataflow/service/demand.py`): the number with which a batch costs least, trainers included, for the need of
the time when a service that is started now will be at work, or one that is too many will be let go. That is
known before anybody waits. Otherwise, or if trainers wait for more than the need explains, the waits say it
(`dataflow/service/scaling.py`).

Why this does not flap: another number has to be better by `_GAIN`, which is about a quarter of a service. The
waits count whole services, round a surplus down, and do not repeat what was followed. So a pool of the right
size has no reason to leave it.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from astraflow.dataflow.service.demand import pace
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.types import ScalingAdvice
from astraflow.types.wait_words import scaling_text

__all__ = ["Change", "PoolSizer", "Seat", "SeatState", "seats_of"]

_GROW_AFTER_FRAC = 0.1
"""Share of the window for which there must have been too few: one slow step is no reason."""
_GAIN = 0.01
"""Another number of services must be cheaper by this share."""
_NUM_JOINS = 9
"""The last starts tell how long the next one will take."""
_SMALL_FRAC = 0.05
"""Smaller waits are the ordinary variation between steps, as in the dataflow's advice."""
_UNEXPLAINED = 1.0
"""Services that the waits must call for beyond the need, to count."""

SeatState = Literal["off", "starting", "working", "leaving"]


@dataclass(frozen=True, slots=True)
class Seat:
    """A service that the pool may have."""

    name: str
    kind: str = ""
    price: float = 1.0
    """Cost of a unit of speed."""
    speed: float = 1.0


@dataclass(frozen=True, slots=True)
class Change:
    """What is to be done to the pool, and why."""

    why: str
    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


def seats_of(cluster: ClusterConfig) -> tuple[Seat, ...]:
    """The services that a pool may have, kind by kind: `rollout-0`, `rollout-1` ..."""
    kinds = [(name, kind) for name, kind in cluster.kinds.items() for _ in range(kind.most)]
    return tuple(
        Seat(f"rollout-{idx}", name, kind.price, kind.speed) for idx, (name, kind) in enumerate(kinds)
    )


class _Streak:
    """For how long without a break services were missing, or too many, and the fewest that were."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self.least = 0
        self.now = 0

    def note(self, now_s: float, number: int) -> None:
        """`number` is how many; 0 breaks the streak."""
        self.now = number
        if number <= 0:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
            self.least = number
        else:
            self.least = min(self.least, number)

    def has_lasted(self, now_s: float, length_s: float) -> bool:
        """Whether it is that long."""
        return self._since_s is not None and now_s - self._since_s >= length_s

    def reset(self) -> None:
        """Begins anew."""
        self._since_s = None


class PoolSizer:
    """Example: `change = sizer.decide(now_s, status.scaling, {"rollout-0": "working"})`."""

    def __init__(self, cluster: ClusterConfig) -> None:
        self._least = cluster.min_services
        self._most = cluster.max_services
        self._rules = cluster.pool
        self._seats = {seat.name: seat for seat in seats_of(cluster)}
        self._states: dict[str, SeatState] = {}
        self._starting_since_s: dict[str, float] = {}
        self._no_kind_until_s: dict[str, float] = {}
        """Kind -> until when it is not tried, because one of its services was given up."""
        self._in_place_of: dict[str, str] = {}
        """A cheaper service on its way -> the dearer one that goes when it has joined."""
        self._too_few = _Streak()
        self._too_many = _Streak()
        self._joins_s: deque[float] = deque(maxlen=_NUM_JOINS)
        """How long the last services took from their start until they were at work."""

    def first(self, num_services: int) -> tuple[str, ...]:
        """The services that a run begins with."""
        num = max(self._least, min(self._most, num_services))
        return tuple(seat.name for seat in sorted(self._seats.values(), key=_price)[:num])

    def decide(self, now_s: float, advice: ScalingAdvice, states: Mapping[str, SeatState]) -> Change | None:
        """What to do now; None if the pool stays as it is. Seats that `states` leaves out are off."""
        self._observe(now_s, advice, states)
        steps: tuple[Callable[[float, ScalingAdvice], Change | None], ...] = (
            self._given_up,
            self._replaced,
            self._floor,
            self._growth,
            self._shrinkage,
            self._exchange,
        )
        for step in steps:
            change = step(now_s, advice)
            if change is not None:
                self._too_few.reset()
                self._too_many.reset()
                return change
        return None

    def _observe(self, now_s: float, advice: ScalingAdvice, states: Mapping[str, SeatState]) -> None:
        self._states = {name: states.get(name, "off") for name in self._seats}
        starting = self._names("starting")
        before = self._starting_since_s
        self._joins_s.extend(
            now_s - since_s for name, since_s in before.items() if self._states[name] == "working"
        )
        self._starting_since_s = {name: before.get(name, now_s) for name in starting}
        self._too_few.note(now_s, self._num_missing(now_s, advice))
        self._too_many.note(now_s, self._num_spare(now_s, advice))

    # --- how many there should be ---

    def _num_missing(self, now_s: float, advice: ScalingAdvice) -> int:
        """Services that are not at work and should be, with those that are on their way."""
        wanted_by_waits = advice.num_services + advice.missing_services
        if not advice.needed_services or wanted_by_waits > advice.needed_services + _UNEXPLAINED:
            return advice.missing_services
        best = self._best(now_s, advice, self._join_s) / self._mean_speed
        return math.ceil(best - len(self._names("working")) - _ROUNDING)

    def _num_spare(self, now_s: float, advice: ScalingAdvice) -> int:
        """Services that are at work and will be too many when one may be let go for it."""
        if not advice.needed_services:
            return -advice.missing_services
        waited = max(advice.trainer_wait_frac.values(), default=0.0)
        is_saturated = waited >= _SMALL_FRAC > advice.rollout_wait_frac
        if is_saturated or self._names("starting"):
            return 0  # whatever the need says: a trainer waits, and no service does
        best = self._best(now_s, advice, self._rules.shrink_after_s) / self._mean_speed
        return math.floor(len(self._names("working")) - best + _ROUNDING)

    def _best(self, now_s: float, advice: ScalingAdvice, ahead_s: float) -> float:
        """The speed of the pool with which a batch costs least, for what is needed so much later. That of the
        services that there are, unless another number is better by `_GAIN`."""
        needed = _needed(advice, ahead_s)
        others = max(0, advice.num_services - len(self._names("working")))
        kept = sorted((self._seats[name] for name in self._asked_for), key=_price)
        seats = [*kept, *self._cheapest_off(now_s)][: max(self._least, self._most)]
        costs = [0.0, *itertools.accumulate(seat.price * seat.speed for seat in seats)]
        speeds = [0.0, *itertools.accumulate(seat.speed for seat in seats)]

        def cost(number: int) -> float:
            services = others + speeds[number] / self._mean_speed
            return (self._rules.trainer_cost + costs[number]) / pace(services, needed, advice.overlap)

        present = len(kept)
        best = min(range(min(self._least, len(seats)), len(seats) + 1), key=cost)
        return speeds[best if cost(best) * (1 + _GAIN) < cost(present) else present]

    @property
    def _join_s(self) -> float:
        """How long a start takes."""
        return statistics.median(self._joins_s) if self._joins_s else 0.0

    # --- the steps, in their order ---

    def _given_up(self, now_s: float, _advice: ScalingAdvice) -> Change | None:
        patience_s = self._rules.patience_s
        late = [name for name, since_s in self._starting_since_s.items() if now_s - since_s >= patience_s]
        others = {seat.kind for seat in self._cheapest_off(now_s)}
        # Without another kind to turn to, it keeps its place in the queue.
        given_up = [name for name in late if others - {self._seats[name].kind}]
        if not given_up:
            return None
        for name in given_up:
            self._no_kind_until_s[self._seats[name].kind] = now_s + patience_s
        return Change(f"not at work after {patience_s:.0f} s", stop=tuple(given_up))

    def _replaced(self, _now_s: float, _advice: ScalingAdvice) -> Change | None:
        self._in_place_of = {
            cheap: dear for cheap, dear in self._in_place_of.items() if self._states[cheap] in _ASKED_FOR
        }
        done = [cheap for cheap in self._in_place_of if self._states[cheap] == "working"]
        dear = [self._in_place_of.pop(cheap) for cheap in done]
        num_spare = max(0, len(self._asked_for) - self._least)
        staying = tuple(name for name in dear if self._states[name] in _ASKED_FOR)[:num_spare]
        return Change("a cheaper kind has taken the place", stop=staying) if staying else None

    def _floor(self, now_s: float, _advice: ScalingAdvice) -> Change | None:
        num_missing = self._least - len(self._asked_for)
        if num_missing <= 0:
            return None
        chosen = self._cheapest_off(now_s)[:num_missing]
        names = tuple(seat.name for seat in chosen)
        return Change(f"fewer than cluster.min_services = {self._least}", start=names) if names else None

    def _growth(self, now_s: float, advice: ScalingAdvice) -> Change | None:
        if not self._too_few.has_lasted(now_s, _GROW_AFTER_FRAC * self._rules.window_s):
            return None
        working = self._speed(self._names("working"))
        lacking = self._too_few.now * self._mean_speed
        wanted = min(lacking, max(working, self._mean_speed)) - self._speed(self._names("starting"))
        chosen: list[str] = []
        for seat in self._cheapest_off(now_s)[: self._room]:
            if wanted <= 0:
                break
            chosen.append(seat.name)
            wanted -= seat.speed
        return Change(_why(advice, self._join_s), start=tuple(chosen)) if chosen else None

    def _shrinkage(self, now_s: float, advice: ScalingAdvice) -> Change | None:
        if not self._too_many.has_lasted(now_s, self._rules.shrink_after_s):
            return None
        surplus = self._too_many.least * self._mean_speed
        num_spare = len(self._asked_for) - self._least
        chosen: list[str] = []
        for seat in self._dearest(self._names("working")):
            if len(chosen) < num_spare and seat.speed <= surplus + _ROUNDING:
                chosen.append(seat.name)
                surplus -= seat.speed
        why = _why(advice, self._rules.shrink_after_s)
        return Change(why, stop=tuple(chosen)) if chosen else None

    def _exchange(self, now_s: float, advice: ScalingAdvice) -> Change | None:
        if advice.missing_services or self._names("starting"):
            return None
        dearest = self._dearest(self._names("working"))
        pairs = zip(self._cheapest_off(now_s)[: self._room], dearest, strict=False)
        cheaper = {cheap.name: dear.name for cheap, dear in pairs if cheap.price < dear.price}
        if not cheaper:
            return None
        self._in_place_of |= cheaper
        return Change("a cheaper kind is tried", start=tuple(cheaper))

    # --- the seats ---

    def _names(self, state: SeatState) -> list[str]:
        return [name for name, now in self._states.items() if now == state]

    @property
    def _asked_for(self) -> list[str]:
        return [name for name, state in self._states.items() if state in _ASKED_FOR]

    @property
    def _room(self) -> int:
        """How many more may be asked for."""
        return max(0, self._most - len(self._asked_for))

    @property
    def _mean_speed(self) -> float:
        """Speed of the average service, of which the advice counts so many."""
        working = self._names("working")
        return self._speed(working) / len(working) if working else 1.0

    def _speed(self, names: Iterable[str]) -> float:
        return sum(self._seats[name].speed for name in names)

    def _cheapest_off(self, now_s: float) -> Sequence[Seat]:
        """Services that may be started, the cheapest first."""
        seats = [self._seats[name] for name in self._names("off")]
        allowed = [seat for seat in seats if self._no_kind_until_s.get(seat.kind, now_s) <= now_s]
        return sorted(allowed, key=_price)

    def _dearest(self, names: Iterable[str]) -> Sequence[Seat]:
        """The dearest first; of equal ones the last."""
        return sorted((self._seats[name] for name in names), key=_price, reverse=True)


_ASKED_FOR: frozenset[SeatState] = frozenset({"starting", "working"})
_ROUNDING = 1e-9


def _why(advice: ScalingAdvice, ahead_s: float) -> str:
    """What a decision follows from, in words."""
    if not advice.needed_services:
        return scaling_text(advice)
    now = _needed(advice, 0.0)
    later = _needed(advice, ahead_s)
    return f"training needs {now:.1f} services, and {later:.1f} in {ahead_s:.0f} s; {scaling_text(advice)}"


def _needed(advice: ScalingAdvice, ahead_s: float) -> float:
    """Services that the training will need so much later."""
    return max(0.0, advice.needed_services + advice.needed_per_hour * ahead_s / 3600)


def _price(seat: Seat) -> tuple[float, int]:
    """Order of seats: by price, then by number."""
    return seat.price, int(seat.name.rpartition("-")[2])

"""Decides how many rollout services a run should have, and which, from the dataflow's advice.

Passive: time is an argument, in seconds of any one clock, and the caller carries out the decisions. Each call
of `decide` makes at most one decision, by the first of these rules that applies:

1. A service that hasn't joined within `patience_s` is given up if another kind is available. Its own kind
   isn't tried again for as long.
2. If a cheaper service that was started in place of an expensive one has joined, the expensive one leaves.
3. If there are fewer services than the minimum, more are started.
4. If there have been too few without a break, more are started. Services that are already starting count. At
   most as many are started as are working, so the pool at most doubles.
5. If there have been too many without a break, the smallest surplus of that time leaves.
6. If a cheaper kind might replace an expensive one, one cheaper service per expensive one is started.

The right number follows from the demand of the training, if the dataflow knows it
(`dataflow/service/demand.py`). It is the number with the lowest cost per batch, trainers included. When the
pool grows, the demand is that of the time at which a service that starts now will be working; when it
shrinks, that of the time at which a surplus service will leave. The demand is known before anybody waits. If
it isn't known, or if trainers wait for longer than it explains, the number follows from the waits
(`dataflow/service/scaling.py`).

The number doesn't oscillate. Another number has to be better by `_GAIN`, which is about a quarter of a
service. The advice from waits counts whole services, rounds a surplus down, and isn't repeated after it was
followed. So a pool of the right size has no reason to change.
"""

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from astraflow.dataflow.service.demand import pace
from astraflow.processes.pool import Seat, seats_of
from astraflow.recipe.cluster_config import ClusterConfig
from astraflow.types import ScalingAdvice
from astraflow.types.wait_words import scaling_text

__all__ = ["Change", "PoolSizer", "SeatState"]

_GROW_AFTER_FRAC = 0.1
"""Share of the window for which services must have been missing. One slow step isn't a reason to grow."""
_GAIN = 0.01
"""Share by which another number of services must be cheaper."""
_NUM_JOINS = 9
"""Number of recent starts from which the duration of the next start is estimated."""
_SMALL_FRAC = 0.05
"""Smaller waits are the ordinary variation between steps, as in the dataflow's advice."""
_UNEXPLAINED = 1.0
"""The waits count if they call for at least this many services more than the demand."""

SeatState = Literal["off", "starting", "working", "leaving"]


@dataclass(frozen=True, slots=True)
class Change:
    """A decision: the services to start and to stop, and why."""

    why: str
    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()


class _Streak:
    """A time without a break in which services were missing, or in which there was a surplus."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self.smallest = 0
        """Smallest number of services during the streak."""
        self.current = 0
        """Newest number of services."""

    def note(self, now_s: float, number: int) -> None:
        """Records how many services are missing, or too many. A number of 0 or less ends the streak."""
        self.current = number
        if number <= 0:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
            self.smallest = number
        else:
            self.smallest = min(self.smallest, number)

    def has_lasted(self, now_s: float, length_s: float) -> bool:
        """Whether the streak is at least `length_s` long."""
        return self._since_s is not None and now_s - self._since_s >= length_s

    def reset(self) -> None:
        """Ends the streak."""
        self._since_s = None


class PoolSizer:
    """Decides on the size of a pool.

    Example: `change = sizer.decide(now_s, status.scaling, {"rollout-0": "working"})`.
    """

    def __init__(self, cluster: ClusterConfig) -> None:
        self._min_services = cluster.min_services
        self._max_services = cluster.max_services
        self._rules = cluster.pool
        self._seats = {seat.name: seat for seat in seats_of(cluster)}
        self._states: dict[str, SeatState] = {}
        self._starting_since_s: dict[str, float] = {}
        self._no_kind_until_s: dict[str, float] = {}
        """Kind -> time until which it isn't tried, because one of its services was given up."""
        self._replaces: dict[str, str] = {}
        """Name of a cheaper service that is starting -> the expensive one that leaves once it has joined."""
        self._too_few = _Streak()
        self._too_many = _Streak()
        self._joins_s: deque[float] = deque(maxlen=_NUM_JOINS)
        """Durations of the last starts, until the service was working."""

    def choose_first(self, num_services: int) -> tuple[str, ...]:
        """The names of the services with which a run starts: the cheapest ones, within the pool's bounds."""
        num = max(self._min_services, min(self._max_services, num_services))
        return tuple(seat.name for seat in sorted(self._seats.values(), key=_price)[:num])

    def decide(self, now_s: float, advice: ScalingAdvice, states: Mapping[str, SeatState]) -> Change | None:
        """The decision at `now_s`; None if the pool stays as it is. Services missing in `states` are off."""
        self._observe(now_s, advice, states)
        steps: tuple[Callable[[float, ScalingAdvice], Change | None], ...] = (
            self._give_up_late,
            self._stop_replaced,
            self._fill_minimum,
            self._grow,
            self._shrink,
            self._try_cheaper,
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

    def _num_missing(self, now_s: float, advice: ScalingAdvice) -> int:
        """Number of services that should be working and aren't; those that are starting are included."""
        wanted_by_waits = advice.num_services + advice.missing_services
        if not advice.needed_services or wanted_by_waits > advice.needed_services + _UNEXPLAINED:
            return advice.missing_services
        best = self._best(now_s, advice, self._join_s) / self._mean_speed
        return math.ceil(best - len(self._names("working")) - _ROUNDING)

    def _num_spare(self, now_s: float, advice: ScalingAdvice) -> int:
        """Number of working services that will be too many at the time at which one could leave."""
        if not advice.needed_services:
            return -advice.missing_services
        waited = max(advice.trainer_wait_frac.values(), default=0.0)
        is_saturated = waited >= _SMALL_FRAC > advice.rollout_wait_frac
        if is_saturated or self._names("starting"):
            return 0  # whatever the demand says: a trainer waits and no service does, or a start is under way
        best = self._best(now_s, advice, self._rules.shrink_after_s) / self._mean_speed
        return math.floor(len(self._names("working")) - best + _ROUNDING)

    def _best(self, now_s: float, advice: ScalingAdvice, ahead_s: float) -> float:
        """The speed of the pool with the lowest cost per batch for the demand `ahead_s` from now.

        This is the present pool's speed unless another number of services is better by `_GAIN`. Speeds are
        in units of `Seat.speed`. A pool of another size consists of the present services, cheapest first, and
        then of the cheapest ones that are off.
        """
        needed = _demand(advice, ahead_s)
        others = max(0, advice.num_services - len(self._names("working")))
        present_seats = sorted((self._seats[name] for name in self._active), key=_price)
        seats = [*present_seats, *self._cheapest_off(now_s)][: max(self._min_services, self._max_services)]
        costs = [0.0, *itertools.accumulate(seat.price * seat.speed for seat in seats)]
        speeds = [0.0, *itertools.accumulate(seat.speed for seat in seats)]

        def cost(number: int) -> float:
            services = others + speeds[number] / self._mean_speed
            return (self._rules.trainer_cost + costs[number]) / pace(services, needed, advice.overlap)

        present = len(present_seats)
        best = min(range(min(self._min_services, len(seats)), len(seats) + 1), key=cost)
        return speeds[best if cost(best) * (1 + _GAIN) < cost(present) else present]

    @property
    def _join_s(self) -> float:
        """Typical duration of a start, until the service is working."""
        return statistics.median(self._joins_s) if self._joins_s else 0.0

    def _give_up_late(self, now_s: float, _advice: ScalingAdvice) -> Change | None:
        patience_s = self._rules.patience_s
        late = [name for name, since_s in self._starting_since_s.items() if now_s - since_s >= patience_s]
        others = {seat.kind for seat in self._cheapest_off(now_s)}
        # Without another kind, a service keeps its place in the cluster's queue.
        given_up = [name for name in late if others - {self._seats[name].kind}]
        if not given_up:
            return None
        for name in given_up:
            self._no_kind_until_s[self._seats[name].kind] = now_s + patience_s
        return Change(f"not working after {patience_s:.0f} s", stop=tuple(given_up))

    def _stop_replaced(self, _now_s: float, _advice: ScalingAdvice) -> Change | None:
        # A replacement that was given up, or has ended, replaces nothing.
        self._replaces = {
            cheap: expensive for cheap, expensive in self._replaces.items() if self._states[cheap] in _ACTIVE
        }
        done = [cheap for cheap in self._replaces if self._states[cheap] == "working"]
        replaced = [self._replaces.pop(cheap) for cheap in done]
        num_spare = max(0, len(self._active) - self._min_services)
        stop = tuple(name for name in replaced if self._states[name] in _ACTIVE)[:num_spare]
        return Change("a cheaper kind has taken the place", stop=stop) if stop else None

    def _fill_minimum(self, now_s: float, _advice: ScalingAdvice) -> Change | None:
        num_missing = self._min_services - len(self._active)
        if num_missing <= 0:
            return None
        chosen = self._cheapest_off(now_s)[:num_missing]
        names = tuple(seat.name for seat in chosen)
        return (
            Change(f"fewer than cluster.min_services = {self._min_services}", start=names) if names else None
        )

    def _grow(self, now_s: float, advice: ScalingAdvice) -> Change | None:
        if not self._too_few.has_lasted(now_s, _GROW_AFTER_FRAC * self._rules.window_s):
            return None
        working = self._speed(self._names("working"))
        lacking = self._too_few.current * self._mean_speed
        wanted = min(lacking, max(working, self._mean_speed)) - self._speed(self._names("starting"))
        chosen: list[str] = []
        for seat in self._cheapest_off(now_s)[: self._room]:
            if wanted <= 0:
                break
            chosen.append(seat.name)
            wanted -= seat.speed
        return Change(_explain(advice, self._join_s), start=tuple(chosen)) if chosen else None

    def _shrink(self, now_s: float, advice: ScalingAdvice) -> Change | None:
        if not self._too_many.has_lasted(now_s, self._rules.shrink_after_s):
            return None
        surplus = self._too_many.smallest * self._mean_speed
        num_spare = len(self._active) - self._min_services
        chosen: list[str] = []
        for seat in self._most_expensive(self._names("working")):
            if len(chosen) < num_spare and seat.speed <= surplus + _ROUNDING:
                chosen.append(seat.name)
                surplus -= seat.speed
        why = _explain(advice, self._rules.shrink_after_s)
        return Change(why, stop=tuple(chosen)) if chosen else None

    def _try_cheaper(self, now_s: float, advice: ScalingAdvice) -> Change | None:
        if advice.missing_services or self._names("starting"):
            return None
        expensive = self._most_expensive(self._names("working"))
        pairs = zip(self._cheapest_off(now_s)[: self._room], expensive, strict=False)
        cheaper = {cheap.name: other.name for cheap, other in pairs if cheap.price < other.price}
        if not cheaper:
            return None
        self._replaces |= cheaper
        return Change("a cheaper kind is tried", start=tuple(cheaper))

    def _names(self, state: SeatState) -> list[str]:
        return [name for name, now in self._states.items() if now == state]

    @property
    def _active(self) -> list[str]:
        return [name for name, state in self._states.items() if state in _ACTIVE]

    @property
    def _room(self) -> int:
        """Number of services that may still be started."""
        return max(0, self._max_services - len(self._active))

    @property
    def _mean_speed(self) -> float:
        """Mean speed of the working services. The advice counts services of this speed."""
        working = self._names("working")
        return self._speed(working) / len(working) if working else 1.0

    def _speed(self, names: Iterable[str]) -> float:
        return sum(self._seats[name].speed for name in names)

    def _cheapest_off(self, now_s: float) -> Sequence[Seat]:
        """The services that may be started, cheapest first."""
        seats = [self._seats[name] for name in self._names("off")]
        allowed = [seat for seat in seats if self._no_kind_until_s.get(seat.kind, now_s) <= now_s]
        return sorted(allowed, key=_price)

    def _most_expensive(self, names: Iterable[str]) -> Sequence[Seat]:
        """These services, most expensive first; among equal ones, the highest number first."""
        return sorted((self._seats[name] for name in names), key=_price, reverse=True)


_ACTIVE: frozenset[SeatState] = frozenset({"starting", "working"})
_ROUNDING = 1e-9
"""Sums of speeds have rounding errors, which must not make a whole service."""


def _explain(advice: ScalingAdvice, ahead_s: float) -> str:
    """The reason for a decision, in words."""
    if not advice.needed_services:
        return scaling_text(advice)
    now = _demand(advice, 0.0)
    later = _demand(advice, ahead_s)
    return f"training needs {now:.1f} services, and {later:.1f} in {ahead_s:.0f} s; {scaling_text(advice)}"


def _demand(advice: ScalingAdvice, ahead_s: float) -> float:
    """Number of services that the training will need `ahead_s` from now."""
    return max(0.0, advice.needed_services + advice.needed_per_hour * ahead_s / 3600)


def _price(seat: Seat) -> tuple[float, int]:
    """Sort key of services: price, then number."""
    return seat.price, int(seat.name.rpartition("-")[2])

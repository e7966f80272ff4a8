"""Decides how many rollout services a run should have, and which, from the dataflow's advice.

Passive: time is an argument, in seconds of any one clock, and who calls carries out what is decided. One look
decides one thing at most, in this order:

1. A service that has not joined within the patience is given up if there is another kind to turn to; its
   own kind is not tried for as long.
2. A service that took the place of a dearer one has joined: the dearer one goes.
3. Fewer than the least there should be: more are started.
4. The advice has called for more without a break: more are started, as many as it says, less those that are
   on their way, and at most as many as are at work.
5. The advice has said without a break that there are too many: the fewest that were too many go.
6. A cheaper kind might take the place of a dearer one: one service for each is started.

Why this does not flap: the advice counts whole services, rounds a surplus down, and does not repeat what was
followed (see `dataflow/scaling.py`). So a pool of the size that was advised gets no advice to leave it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from astraflow.launch.cluster_config import ClusterConfig
from astraflow.types import ScalingAdvice

__all__ = ["Change", "PoolSizer", "Seat", "SeatState", "seats_of"]

_GROW_AFTER_FRAC = 0.1
"""Share of the window for which the advice must have called for more: one slow step is no reason."""

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
    """For how long without a break the advice has said the same, and the least that it asked for."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self.least = 0

    def note(self, now_s: float, number: int) -> None:
        """`number` is what was asked for; 0 breaks the streak."""
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
        self._least = cluster.least_services
        self._most = cluster.most_services
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
        self._starting_since_s = {name: self._starting_since_s.get(name, now_s) for name in starting}
        self._too_few.note(now_s, advice.missing_services)
        self._too_many.note(now_s, -advice.missing_services)

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
        return Change(f"fewer than cluster.least_services = {self._least}", start=names) if names else None

    def _growth(self, now_s: float, advice: ScalingAdvice) -> Change | None:
        if not self._too_few.has_lasted(now_s, _GROW_AFTER_FRAC * self._rules.window_s):
            return None
        working = self._speed(self._names("working"))
        lacking = advice.missing_services * self._mean_speed
        wanted = min(lacking, max(working, self._mean_speed)) - self._speed(self._names("starting"))
        chosen: list[str] = []
        for seat in self._cheapest_off(now_s)[: self._room]:
            if wanted <= 0:
                break
            chosen.append(seat.name)
            wanted -= seat.speed
        return Change(advice.text, start=tuple(chosen)) if chosen else None

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
        return Change(advice.text, stop=tuple(chosen)) if chosen else None

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


def _price(seat: Seat) -> tuple[float, int]:
    """Order of seats: by price, then by number."""
    return seat.price, int(seat.name.rpartition("-")[2])

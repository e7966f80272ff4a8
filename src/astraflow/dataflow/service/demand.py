"""How many rollout services the training needs, from what it takes and what they give: known before anybody
waits, so a pool can follow a load that grows or shrinks.

Passive, as `scaling.py`, which it belongs to. Three figures make it up:

- the tokens of a batch: what all services generated between two commits, divided by the batches that were
  completed meanwhile, so groups that are filtered count as what they cost;
- the seconds that the trainer trains for a batch, without its waits;
- the tokens per second of a service whose slots are full.

The first divided by the other two is the number of services that generate a batch in the time in which one is
trained. It is formed over the older and the newer half of the last commits; the difference is the trend. Both
are unknown while services report no tokens, or none had its slots full.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Demand", "Needed", "pace"]

_WINDOWS = 4.0
"""Commits of so many windows are looked at, half of them for each of the two values."""
_LEAST_INTERVALS = 24
"""At least so many, if steps take long: the lengths of one batch move the need by about a tenth."""
_INTERVALS_PER_WINDOW = 8.0
"""Steps that are shorter than this share of a window are taken together."""
_KNOWN_S = 8.0
"""A service's speed is known after so much time with full slots."""
_TREND = 0.7
"""Share of the trend that is believed: the end of one is seen late."""
_OVERLAPS = (6.0, 40.0)
"""The least and the largest that is believed: what lies beyond is noise."""
_MOST_RATIO = 1e6
"""Bounds what is computed for a pool that is hopelessly small."""
_NEAR = 1.3
"""How far supply and demand may be apart for telling how well they overlap."""


@dataclass(frozen=True, slots=True)
class Needed:
    """Services that the training needs at a time, and how many more each second later."""

    number: float
    per_s: float
    overlap: float
    """How well trainer and services work at the same time; see `pace`."""

    def after(self, seconds: float) -> float:
        """How many there should be then; never negative."""
        return max(0.0, self.number + self.per_s * seconds)


@dataclass(frozen=True, slots=True)
class _Point:
    """Sums since the start, at a commit."""

    at_s: float
    steps: int
    trained_s: float
    batches: float
    """Committed ones, and the complete groups that wait for a trainer."""
    tokens: float
    full_tokens: float
    """Those that services generated while their slots were full."""
    full_s: float
    service_s: float
    """Time of all services together."""


@dataclass(slots=True)
class _Service:
    """The last heartbeat of a service."""

    at_s: float
    tokens: int
    is_full: bool


class Demand:
    """Example: `demand.beat("rollout-0", tokens=4000, is_full=True, now_s=8.0)`, then
    `demand.committed("actor", trained_s=50.0, batches=7.5, now_s=9.0)` and `demand.needed(10.0)`."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._services: dict[str, _Service] = {}
        self._tokens = 0.0
        self._full_tokens = 0.0
        self._full_s = 0.0
        self._service_s = 0.0
        self._steps: dict[str, int] = {}
        self._trained_s: dict[str, float] = {}
        self._points: dict[str, deque[_Point]] = {}

    def beat(self, service: str, *, tokens: int, is_full: bool, now_s: float) -> None:
        """Records a heartbeat: what the service has generated so far, and whether its slots are full."""
        before = self._services.get(service)
        if not tokens:
            return  # it loads its first version
        self._services[service] = _Service(now_s, tokens, is_full)
        if before is None:
            return
        generated = max(0, tokens - before.tokens)
        self._tokens += generated
        self._service_s += now_s - before.at_s
        if is_full and before.is_full:
            self._full_tokens += generated
            self._full_s += now_s - before.at_s

    def forget(self, service: str) -> None:
        """Forgets a rollout service that is gone."""
        self._services.pop(service, None)

    def attached(self, policy: str) -> None:
        """Records that a trainer begins a session: what it did before is no measure of what it does."""
        self._points.pop(policy, None)

    def committed(self, policy: str, *, trained_s: float, batches: float, now_s: float) -> None:
        """Records a step: the time that it trained, and how many batches there have been so far, with the
        complete groups that wait as parts of one."""
        steps = self._steps[policy] = self._steps.get(policy, 0) + 1
        total_s = self._trained_s[policy] = self._trained_s.get(policy, 0.0) + trained_s
        points = self._points.setdefault(policy, deque())
        if len(points) > 1 and now_s - points[-2].at_s < self._window_s / _INTERVALS_PER_WINDOW:
            points.pop()
        full = (self._full_tokens, self._full_s)
        points.append(_Point(now_s, steps, total_s, batches, self._tokens, *full, self._service_s))
        while len(points) > _LEAST_INTERVALS + 1 and points[1].at_s < now_s - _WINDOWS * self._window_s:
            points.popleft()

    def needed(self, now_s: float) -> Needed | None:
        """What the trainer needs that needs most; None if that is not known."""
        found = [needed for points in self._points.values() if (needed := _needed(points, now_s))]
        return max(found, key=lambda needed: needed.number, default=None)


def _needed(points: Sequence[_Point], now_s: float) -> Needed | None:
    if len(points) < 3:
        return None
    first = points[0]
    middle = points[len(points) // 2]
    last = points[-1]
    full_s = last.full_s - first.full_s
    if full_s < _KNOWN_S:
        return None
    speed = (last.full_tokens - first.full_tokens) / full_s
    older = _ratio(first, middle, speed)
    newer = _ratio(middle, last, speed)
    if not (math.isfinite(older) and math.isfinite(newer)):
        return None
    centre_s = (middle.at_s + last.at_s) / 2
    per_s = _TREND * 2 * (newer - older) / (last.at_s - first.at_s)
    return Needed(newer + per_s * (now_s - centre_s), per_s, _overlap(middle, last, newer))


def pace(num_services: float, needed: float, overlap: float) -> float:
    """Share of its full pace that the trainer reaches with so many services.

    With a perfect overlap it is the smaller of `num_services / needed` and 1. Where batches wait for their
    longest episodes, both sides wait in turns, and it is less than either, most where they are equal.
    """
    if needed <= 0:
        return 1.0
    ratio = min(_MOST_RATIO, needed / max(num_services, 1e-6))
    return (ratio**overlap + 1) ** (-1 / overlap)


def _overlap(begin: _Point, end: _Point, needed: float) -> float:
    """The exponent with which `pace` gives the measured one."""
    low, high = _OVERLAPS
    passed_s = end.at_s - begin.at_s
    measured = (end.trained_s - begin.trained_s) / passed_s
    num_services = (end.service_s - begin.service_s) / passed_s
    if not needed / _NEAR < num_services < needed * _NEAR:
        return high
    for _ in range(20):
        overlap = (low + high) / 2
        if pace(num_services, needed, overlap) < measured:
            low = overlap
        else:
            high = overlap
    return low


def _ratio(begin: _Point, end: _Point, speed: float) -> float:
    """Services that would have generated the batches in the time in which they were trained."""
    batches = end.batches - begin.batches
    trained_s = end.trained_s - begin.trained_s
    steps = end.steps - begin.steps
    if batches <= 0 or trained_s <= 0 or speed <= 0:
        return math.inf
    return (end.tokens - begin.tokens) / batches / speed * steps / trained_s

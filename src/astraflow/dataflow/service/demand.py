"""Estimates how many rollout services the training needs, from the tokens that both sides process.

The estimate is known before anyone waits, so a pool can follow a load that grows or shrinks.
Passive, like `scaling.py`, which uses it. It is made of three figures:

- the tokens per batch: what all services generated between two commits, divided by the number of batches
  completed in that time, so that the cost of filtered groups is included;
- the seconds for which the trainer trains a batch, without its waits;
- the tokens per second of a service whose slots are full.

The first divided by the other two is the number of services that generate a batch in the time that training
one takes. It is computed over the older and the newer half of the last commits; the difference is the trend.
Both are unknown while services report no tokens, or none of them has had its slots full.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Demand", "ServiceNeed", "pace"]

_WINDOWS = 4.0
"""Number of windows whose commits are used, half of them for each of the two values."""
_MIN_INTERVALS = 24
"""Fewest commits to use, even for long steps: the lengths in one batch change the need by about a tenth."""
_INTERVALS_PER_WINDOW = 8.0
"""Steps shorter than the window divided by this are combined."""
_KNOWN_S = 8.0
"""Time with full slots after which a service's speed is known."""
_TREND = 0.7
"""Share of the trend that is extrapolated, because the end of a trend shows late."""
_OVERLAPS = (6.0, 40.0)
"""Smallest and largest plausible overlap; values beyond are noise."""
_MAX_RATIO = 1e6
"""Bounds the result for a pool that is far too small."""
_NEAR = 1.3
"""Largest ratio of supply and demand at which their overlap can be measured."""


@dataclass(frozen=True, slots=True)
class ServiceNeed:
    """The number of services that the training needs, and its change per second."""

    number: float
    per_s: float
    overlap: float
    """How well trainer and services work in parallel; see `pace`."""

    def after(self, seconds: float) -> float:
        """The number needed that much later; never negative."""
        return max(0.0, self.number + self.per_s * seconds)


@dataclass(frozen=True, slots=True)
class _Point:
    """Sums from the start to one commit."""

    at_s: float
    steps: int
    trained_s: float
    batches: float
    """Committed batches, plus the complete groups that wait for a trainer as fractions of a batch."""
    tokens: float
    full_tokens: float
    """Tokens that services generated while their slots were full."""
    full_s: float
    service_s: float
    """Sum of the times of all services."""


@dataclass(slots=True)
class _Service:
    """The last heartbeat of a service."""

    at_s: float
    tokens: int
    is_full: bool


class Demand:
    """Example: `demand.note_beat("rollout-0", tokens=4000, is_full=True, now_s=8.0)`, then
    `demand.note_step("actor", trained_s=50.0, batches=7.5, now_s=9.0)` and `demand.estimate(10.0)`."""

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

    def note_beat(self, service: str, *, tokens: int, is_full: bool, now_s: float) -> None:
        """Records a heartbeat: the tokens generated so far, and whether the service's slots are full."""
        before = self._services.get(service)
        if not tokens:
            return  # it is loading its first version
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

    def note_session(self, policy: str) -> None:
        """Records that a trainer begins a session. Its earlier steps don't count: its speed may differ."""
        self._points.pop(policy, None)

    def note_step(self, policy: str, *, trained_s: float, batches: float, now_s: float) -> None:
        """Records a step.

        `trained_s`: time spent on training. `batches`: number of batches so far, including the complete
        groups that wait, as fractions of a batch.
        """
        steps = self._steps[policy] = self._steps.get(policy, 0) + 1
        total_s = self._trained_s[policy] = self._trained_s.get(policy, 0.0) + trained_s
        points = self._points.setdefault(policy, deque())
        if len(points) > 1 and now_s - points[-2].at_s < self._window_s / _INTERVALS_PER_WINDOW:
            points.pop()
        full = (self._full_tokens, self._full_s)
        points.append(_Point(now_s, steps, total_s, batches, self._tokens, *full, self._service_s))
        while len(points) > _MIN_INTERVALS + 1 and points[1].at_s < now_s - _WINDOWS * self._window_s:
            points.popleft()

    def estimate(self, now_s: float) -> ServiceNeed | None:
        """The need of the trainer that needs the most services; None if unknown."""
        demands = [needed for points in self._points.values() if (needed := _estimate(points, now_s))]
        return max(demands, key=lambda needed: needed.number, default=None)


def _estimate(points: Sequence[_Point], now_s: float) -> ServiceNeed | None:
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
    return ServiceNeed(newer + per_s * (now_s - centre_s), per_s, _overlap(middle, last, newer))


def pace(num_services: float, needed: float, overlap: float) -> float:
    """Share of its full speed that the trainer reaches with this many services.

    With perfect overlap, it is the smaller of `num_services / needed` and 1. If batches wait for their
    longest episodes, the two sides wait in turns, and the share is lower, most of all where both are equal.
    """
    if needed <= 0:
        return 1.0
    ratio = min(_MAX_RATIO, needed / max(num_services, 1e-6))
    return (ratio**overlap + 1) ** (-1 / overlap)


def _overlap(begin: _Point, end: _Point, needed: float) -> float:
    """The exponent with which `pace` yields the measured pace."""
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
    """Number of services that would have generated the batches in the time that training them took."""
    batches = end.batches - begin.batches
    trained_s = end.trained_s - begin.trained_s
    steps = end.steps - begin.steps
    if batches <= 0 or trained_s <= 0 or speed <= 0:
        return math.inf
    return (end.tokens - begin.tokens) / batches / speed * steps / trained_s

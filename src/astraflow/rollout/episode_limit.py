"""Decides how many episodes a rollout service runs, by what its engines hold.

`rollout.max_episodes` is the ceiling. An engine whose KV cache is full preempts requests and computes them
again later, and an engine with a long queue gains nothing from further requests. So the limit grows while
there is room, slowly after the first sign of overload. It falls while the KV cache is full, at preemptions,
and if requests always queue. All steps are measured in episodes that end, because load follows at that pace.
"""

import math
from collections.abc import Sequence

from astraflow.protocols import Capacity

__all__ = ["EpisodeLimit"]

_START_FRAC = 0.25
"""Share of the ceiling at which a service with a bounded KV cache starts. Nobody knows yet how long episodes
get, and those that start together reach their greatest lengths together."""
_FULL_FRAC = 0.95
"""While this share of the KV cache is in use, no episode starts. The rest is for those that run."""
_ROOM_FRAC = 0.9
"""The limit grows only if the KV cache would stay below this share with one more episode."""
_HALF_FRAC = 0.45
"""If the KV cache stays below this share, twice as many episodes fit, so growth need not be slow."""
_USED_FRAC = 0.95
"""The limit doesn't grow if fewer of its episodes run, because nothing is known about more of them."""
_SLOW_GROWTH = 0.02
"""Growth per ended episode after a sign of overload: 2% each time that all episodes were replaced."""
_DECLINE = 0.125
"""Decline per ended episode while the KV cache is full."""
_CUT = 0.9
"""What a preemption leaves of the limit."""
_QUEUE_FRAC = 0.25
"""Queued requests per running one that keep an engine busy while leases and results are in transit."""


class EpisodeLimit:
    """The number of episodes that a service may run. Passive: call `observe` when an episode has ended.

    Example: after `limit.observe(capacities, num_running=7, num_ended=1)`, `limit.num_free(7)` more episodes
    may start.
    """

    def __init__(self, ceiling: int) -> None:
        self._ceiling = ceiling
        self._limit = float(ceiling)
        self._allowed = float(ceiling)
        """Falls to the number of running episodes while the KV cache is full, and rises by one per ended
        episode. So episodes don't start together when there is room again."""
        self._growth = 1.0
        self._is_bounded = False
        """Whether an engine reports its KV cache."""
        self._is_draining = False
        """Whether more episodes run than a cut allows. Preemptions cause no further cut meanwhile."""
        self._num_preemptions = 0
        self._num_ended = 0
        """Number of episodes that ended in the current period, which lasts until all were replaced once."""
        self._least_excess = math.inf
        """Smallest number of needlessly queued requests in the period."""
        self._most_kv_frac = 0.0

    @property
    def num_slots(self) -> int:
        """Number of episodes that the service can run, from 1 to the ceiling."""
        return max(1, int(self._limit))

    def num_free(self, num_running: int) -> int:
        """Number of episodes that may start now."""
        return max(1, int(min(self._limit, self._allowed))) - num_running

    def observe(self, capacities: Sequence[Capacity], *, num_running: int, num_ended: int = 0) -> None:
        """Adapts the limit. `num_ended`: number of episodes that have ended since the last call."""
        kv_frac = max((c.kv_frac for c in capacities if c.kv_frac is not None), default=0.0)
        if not self._is_bounded and any(c.kv_frac is not None for c in capacities):
            self._is_bounded = True
            self._limit *= _START_FRAC
        num_preemptions = sum(c.num_preemptions for c in capacities)
        if num_preemptions > self._num_preemptions and not self._is_draining:
            self._reduce(_CUT * self._limit)
            self._allowed = num_running
        self._num_preemptions = num_preemptions
        self._is_draining = num_running > self._limit
        excess = sum(c.num_waiting - _QUEUE_FRAC * c.num_running for c in capacities)
        if kv_frac >= _FULL_FRAC:
            self._allowed = min(self._allowed, num_running)
            self._reduce(self._limit - _DECLINE * num_ended)
        else:
            is_used = self._allowed >= self._limit and num_running + num_ended >= _USED_FRAC * self.num_slots
            self._allowed = min(self._limit, max(self._allowed, num_running) + num_ended)
            has_room = kv_frac * (num_running + 1) < _ROOM_FRAC * max(1, num_running)
            if is_used and has_room and excess <= 0:
                self._limit = min(self._ceiling, self._limit + num_ended * self._growth)
                self._allowed = self._limit
        self._note_period(num_ended, excess, kv_frac)

    def _note_period(self, num_ended: int, excess: float, kv_frac: float) -> None:
        self._num_ended += num_ended
        self._least_excess = min(self._least_excess, excess)
        self._most_kv_frac = max(self._most_kv_frac, kv_frac)
        if self._num_ended < self._limit:
            return
        if self._least_excess >= 1:
            self._reduce(self._limit - self._least_excess)
        elif self._is_bounded and self._most_kv_frac < _HALF_FRAC:
            self._growth = 1.0
        self._num_ended = 0
        self._least_excess = math.inf
        self._most_kv_frac = 0.0

    def _reduce(self, limit: float) -> None:
        self._limit = max(1.0, limit)
        self._growth = _SLOW_GROWTH

"""Advises how many rollout services a run could use, based on who waited for whom recently.

Passive: time is an argument, in seconds of any one clock. The shares are not stored, so they start from zero
after a restart. A pool that sizes itself may act on the advice.

- A trainer's wait share is the time for which it waited for batches, divided by its total time. It covers the
  steps committed in the window and the current wait. The time before the first service was at work doesn't
  count, and neither does the wait for the first batch unless it exceeds the window, because a pool of any
  size must first make its episodes. If a trainer waits for a share `w`, a pool of `n` services makes only `1
  - w` of what the trainer could train. So `n / (1 - w)` services would keep it busy.
- The pool's wait share is the share of its slots (`rollout.max_episodes` of each service) that are empty
  because no group may begin before a trainer takes a batch. A service that loads its first version has no
  slots yet. If a share `r` is empty, `n * (1 - r)` services would be enough.

In both formulas, `n` is the mean number of services over the window, because the shares are means, too. So
advice that was followed isn't repeated while the window still covers the time before.

If both wait, they take turns, because the staleness bound forces them to. Then more services change little.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping

import msgspec

from astraflow.dataflow.service.demand import Demand
from astraflow.types import ScalingAdvice
from astraflow.types.status import ScalingVerdict

__all__ = ["WaitShares"]

_BALANCED_FRAC = 0.05
"""Smaller shares are normal variation between steps."""
_TOO_EARLY_FRAC = 0.1
"""No advice is given while less than this share of the window is known."""
_KNOWN_S = 8.0
"""The pool's share is known once the window covers this much time of a service. It is less than what advice
needs, so that a warning can come earlier."""
_PART_FRAC = 1 / 15
"""Shorter periods are combined into parts of this share of the window, which are forgotten as a whole."""
_COUNT_EVERY_S = 1.0
"""Least time between two counts of services. Each service sends a heartbeat every few seconds."""
_FULL_FREE_FRAC = 0.1
"""A service with at most this share of free slots generates as fast as it can."""
_MIN_NEED = 0.01
"""Lower bound of a known need, because 0 means that the need is unknown."""
_MIN_USE = 1e-3
"""Lower bound of `1 - w`, so that the advice stays finite if a trainer always waits."""
_ROUNDING = 1e-9


class _Share:
    """The mean of a value over the last `window_s`, weighted by time. Running sums make reading cheap."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._parts: deque[float] = deque()
        """Per part: end, length, value times length. Tuples would keep the garbage collector busy."""
        self._known_s = 0.0
        self._weighted_s = 0.0

    def add(self, now_s: float, length_s: float, value: float) -> None:
        """Adds a period: for the last `length_s`, the value was `value`."""
        if length_s > 0:
            self._known_s += length_s
            self._weighted_s += length_s * value
            if self._parts and self._parts[-2] + length_s <= self._window_s * _PART_FRAC:
                self._parts[-3] = now_s
                self._parts[-2] += length_s
                self._parts[-1] += length_s * value
            else:
                self._parts.extend((now_s, length_s, length_s * value))
        self._forget(now_s)

    def totals(self, now_s: float) -> tuple[float, float]:
        """(known seconds, value times seconds) within the window."""
        self._forget(now_s)
        return max(0.0, self._known_s), max(0.0, self._weighted_s)

    def _forget(self, now_s: float) -> None:
        while self._parts and self._parts[0] < now_s - self._window_s:
            self._parts.popleft()
            self._known_s -= self._parts.popleft()
            self._weighted_s -= self._parts.popleft()


class WaitShares:
    """The wait shares of all trainers and of the pool.

    Example: `shares.note_step("actor", waited_s=2.2, now_s=10.0)`, then `shares.advice(11.0, {}, ids)`.
    """

    def __init__(self, window_s: float = 300.0) -> None:
        """`window_s`: the time that the shares cover. 5 minutes are long enough for several steps of most
        runs, and short enough to follow changes of the pool."""
        self._window_s = window_s
        self._demand = Demand(window_s)
        self._trainers: dict[str, _Share] = {}
        self._last_commit_s: dict[str, float] = {}
        self._services: dict[str, _Share] = {}
        self._last_beat_s: dict[str, float] = {}
        self._size = _Share(window_s)
        """The number of services at work."""
        self._counted = 0
        self._counted_s: float | None = None
        """Time of the last count; None before the first service was at work."""
        self._first_work_s: float | None = None

    def note_session(self, policy: str, now_s: float) -> None:
        """Records that a trainer begins a session. Earlier time doesn't count as its time."""
        self._last_commit_s[policy] = now_s
        self._demand.note_session(policy)

    def note_step(self, policy: str, *, waited_s: float, now_s: float, batches: float = 0.0) -> None:
        """Records that a trainer committed a step after it had waited `waited_s` for the batch.

        `batches`: number of batches so far, including the complete groups that wait, as fractions of a batch.
        """
        if policy in self._last_commit_s:
            trained_s = max(0.0, now_s - self._last_commit_s[policy] - waited_s)
            self._demand.note_step(policy, trained_s=trained_s, batches=batches, now_s=now_s)
        since_s = self._last_commit_s.get(policy, now_s)
        if self._first_work_s is not None and since_s <= self._first_work_s:
            waited_s = 0.0  # the wait for the first batch does not count
            since_s = self._first_work_s
        length_s = now_s - since_s
        self._last_commit_s[policy] = now_s
        share = self._trainers.setdefault(policy, _Share(self._window_s))
        share.add(now_s, length_s, min(1.0, waited_s / length_s) if length_s > 0 else 0.0)

    def note_beat(
        self, service: str, *, free_frac: float, is_held_back: bool, now_s: float, tokens: int = 0
    ) -> None:
        """Records a heartbeat of a rollout service.

        `free_frac`: share of its slots that are free. `is_held_back`: they are free because no group may
        begin. `tokens`: generated so far. The time before its first episode only counts if it is held back.
        """
        self._demand.note_beat(service, tokens=tokens, is_full=free_frac <= _FULL_FREE_FRAC, now_s=now_s)
        if service not in self._services and free_frac >= 1.0 and not is_held_back:
            return  # it is loading its first version
        if self._first_work_s is None:
            self._first_work_s = now_s
        length_s = now_s - self._last_beat_s.get(service, now_s)
        self._last_beat_s[service] = now_s
        share = self._services.setdefault(service, _Share(self._window_s))
        share.add(now_s, length_s, free_frac if is_held_back else 0.0)
        self._count(now_s)

    def forget(self, service: str) -> None:
        """Forgets a rollout service that is gone."""
        self._demand.forget(service)
        self._services.pop(service, None)
        self._last_beat_s.pop(service, None)

    def advice(
        self, now_s: float, waiting_since_s: Mapping[str, float], services: Collection[str]
    ) -> ScalingAdvice:
        """The advice that follows from the shares.

        `waiting_since_s`: start of the current wait for a batch, for each policy whose trainer waits.
        `services`: the existing services; all others are forgotten.
        """
        for gone in self._services.keys() - set(services):
            self.forget(gone)
        self._count(now_s)
        trainers: dict[str, float] = {}
        for policy in self._last_commit_s:
            known_s, waited_s = self._trainers.setdefault(policy, _Share(self._window_s)).totals(now_s)
            if policy in waiting_since_s:
                ongoing_s = now_s - max(waiting_since_s[policy], self._waits_since_s(policy, now_s))
                known_s = known_s + max(0.0, ongoing_s)
                waited_s = waited_s + max(0.0, ongoing_s)
            if known_s >= _TOO_EARLY_FRAC * self._window_s:
                trainers[policy] = waited_s / known_s
        parts = [share.totals(now_s) for share in self._services.values()]
        known_s = sum(known for known, _ in parts)
        is_known = max((known for known, _ in parts), default=0.0) >= _KNOWN_S
        rollout = sum(free for _, free in parts) / known_s if is_known else 0.0
        counted_s, size_s = self._size.totals(now_s)
        mean_size = size_s / counted_s if counted_s else float(len(services))
        advice = _advice(trainers, rollout, mean_size, len(services), len(self._services))
        needed = self._demand.estimate(now_s)
        if needed is None:
            return advice
        return msgspec.structs.replace(
            advice,
            needed_services=max(_MIN_NEED, needed.number),
            needed_per_hour=3600 * needed.per_s,
            overlap=needed.overlap,
        )

    def _waits_since_s(self, policy: str, now_s: float) -> float:
        """The time from which a trainer's current wait counts."""
        last_commit_s = self._last_commit_s[policy]
        if self._first_work_s is not None and last_commit_s <= self._first_work_s:
            return self._first_work_s + self._window_s  # the first batch
        if self._first_work_s is not None:
            return last_commit_s
        has_trained = self._trainers[policy].totals(now_s)[0] > 0
        return last_commit_s if has_trained else now_s

    def _count(self, now_s: float) -> None:
        """Records the number of services at work since the last count."""
        if self._counted_s is None:
            if not self._services:
                return
        elif len(self._services) == self._counted and now_s - self._counted_s < _COUNT_EVERY_S:
            return
        else:
            self._size.add(now_s, now_s - self._counted_s, float(self._counted))
        self._counted_s = now_s
        self._counted = len(self._services)


def _advice(
    trainers: dict[str, float], rollout: float, mean_size: float, num_services: int, num_at_work: int
) -> ScalingAdvice:
    """Derives the verdict. `mean_size`: mean number of services at work over the window. `num_at_work`: their
    number now; the other services are loading their first version."""
    waited = max(trainers.values(), default=0.0)
    surplus = num_at_work - mean_size * (1 - rollout)
    missing = 0
    verdict: ScalingVerdict = "balanced"
    if not trainers or not num_services:
        verdict = "too_early"
    elif waited >= _BALANCED_FRAC and rollout >= _BALANCED_FRAC:
        verdict = "take_turns"
    elif waited >= _BALANCED_FRAC:
        wanted = mean_size / max(1 - waited, _MIN_USE)
        # The pool may have grown while the shares were measured.
        verdict = "has_grown" if 1 - num_services / wanted < _BALANCED_FRAC - _ROUNDING else "too_few"
        if verdict == "too_few":
            missing = max(1, math.ceil(wanted - num_services - 0.5))
    elif rollout >= _BALANCED_FRAC and surplus + _ROUNDING >= 1 and num_services > 1:
        missing = -min(num_services - 1, math.floor(surplus + _ROUNDING))
        verdict = "too_many"
    return ScalingAdvice(
        verdict=verdict,
        trainer_wait_frac=trainers,
        rollout_wait_frac=rollout,
        num_services=num_services,
        missing_services=missing,
    )

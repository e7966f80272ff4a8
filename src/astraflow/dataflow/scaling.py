"""Advice on how many rollout services a run could use, from who waited for whom lately.

It is passive, and time is an argument, in seconds of any one clock. The shares are not stored: after a
restart they start from zero. Nothing acts on the advice.

- A trainer's wait share is the time that it waited for batches, divided by all of its time. It covers the
  steps committed in the window and the wait that is going on now. If a trainer waits a share `w`, a pool of
  `n` services makes only `1 - w` of what the trainer could train. So `n * w / (1 - w)` more services would
  keep it busy.
- The pool's wait share is the share of its slots (`rollout.max_episodes` of each service) that are empty
  because no group may begin before a trainer takes a batch; while a service loads its first version, it has
  none. If a share `r` is empty, `n * r` services are too many.

If both wait, they take turns, because the staleness bound forces them to. More services change little then.
"""

import math
from collections import deque
from collections.abc import Collection, Mapping

from astraflow.types import ScalingAdvice

__all__ = ["WaitShares"]

_WINDOW_S = 300.0
"""Long enough for several steps of most runs, short enough to follow a pool that changes."""
_BALANCED_FRAC = 0.05
"""Smaller shares are the ordinary variation between steps."""
_TOO_EARLY_S = 30.0
"""There is no advice while the window holds less than this."""
_KNOWN_S = 8.0
"""The pool's share is told once the window holds this much of a service: a warning may come earlier than
advice."""


class _Share:
    """The mean of a value over the last `_WINDOW_S`, weighted by time. Sums are kept, so reading is cheap."""

    def __init__(self) -> None:
        self._parts: deque[tuple[float, float, float]] = deque()
        """(end, length, value) of each stretch of time."""
        self._known_s = 0.0
        self._weighted_s = 0.0

    def add(self, now_s: float, length_s: float, value: float) -> None:
        """Adds a stretch of time: the value was this for `length_s` until now."""
        if length_s > 0:
            self._parts.append((now_s, length_s, value))
            self._known_s += length_s
            self._weighted_s += length_s * value
        self._forget(now_s)

    def totals(self, now_s: float) -> tuple[float, float]:
        """(known seconds, value times seconds) within the window."""
        self._forget(now_s)
        return max(0.0, self._known_s), max(0.0, self._weighted_s)

    def _forget(self, now_s: float) -> None:
        while self._parts and self._parts[0][0] < now_s - _WINDOW_S:
            _, length_s, value = self._parts.popleft()
            self._known_s -= length_s
            self._weighted_s -= length_s * value


class WaitShares:
    """The wait shares of all trainers and of the pool.

    Example: `shares.committed("actor", waited_s=2.2, now_s=10.0)`, then `shares.advice(11.0, {}, ids)`.
    """

    def __init__(self) -> None:
        self._trainers: dict[str, _Share] = {}
        self._last_commit_s: dict[str, float] = {}
        self._services: dict[str, _Share] = {}
        self._last_beat_s: dict[str, float] = {}

    def attached(self, policy: str, now_s: float) -> None:
        """Records that a trainer begins a session. The time before does not count as its time."""
        self._last_commit_s[policy] = now_s

    def committed(self, policy: str, *, waited_s: float, now_s: float) -> None:
        """Records that a trainer committed a step, after it had waited `waited_s` for the batch."""
        length_s = now_s - self._last_commit_s.get(policy, now_s)
        self._last_commit_s[policy] = now_s
        share = self._trainers.setdefault(policy, _Share())
        share.add(now_s, length_s, min(1.0, waited_s / length_s) if length_s > 0 else 0.0)

    def beat(self, service: str, *, free_frac: float, is_held_back: bool, now_s: float) -> None:
        """Records a heartbeat of a rollout service.

        `free_frac` is the share of its slots that are free; `is_held_back` says that they are free because no
        group may begin. The time before its first episode does not count as its time, unless it is held back.
        """
        if service not in self._services and free_frac >= 1.0 and not is_held_back:
            return  # it loads its first version
        length_s = now_s - self._last_beat_s.get(service, now_s)
        self._last_beat_s[service] = now_s
        share = self._services.setdefault(service, _Share())
        share.add(now_s, length_s, free_frac if is_held_back else 0.0)

    def forget(self, service: str) -> None:
        """Forgets a rollout service that is gone."""
        self._services.pop(service, None)
        self._last_beat_s.pop(service, None)

    def advice(
        self, now_s: float, waiting_since_s: Mapping[str, float], services: Collection[str]
    ) -> ScalingAdvice:
        """The advice that follows from the shares.

        `waiting_since_s` says, by policy, since when a trainer has been waiting for a batch; policies whose
        trainer does not wait are left out. `services` are those that are still there; all others are
        forgotten.
        """
        for gone in self._services.keys() - set(services):
            self.forget(gone)
        trainers: dict[str, float] = {}
        for policy in self._last_commit_s:
            known_s, waited_s = self._trainers.setdefault(policy, _Share()).totals(now_s)
            if policy in waiting_since_s:
                ongoing_s = now_s - max(waiting_since_s[policy], self._last_commit_s[policy])
                known_s = known_s + max(0.0, ongoing_s)
                waited_s = waited_s + max(0.0, ongoing_s)
            if known_s >= _TOO_EARLY_S:
                trainers[policy] = waited_s / known_s
        parts = [share.totals(now_s) for share in self._services.values()]
        known_s = sum(known for known, _ in parts)
        is_known = max((known for known, _ in parts), default=0.0) >= _KNOWN_S
        rollout = sum(free for _, free in parts) / known_s if is_known else 0.0
        return _advice(trainers, rollout, len(services))


def _advice(trainers: dict[str, float], rollout: float, num_services: int) -> ScalingAdvice:
    policy = max(trainers, key=lambda name: trainers[name], default="")
    waited = trainers.get(policy, 0.0)
    who = f"trainer {policy} waits {waited:.0%}" if len(trainers) > 1 else f"trainer waits {waited:.0%}"
    missing = 0
    text = ""
    if not trainers or not num_services:
        text = "no advice yet: too little was seen"
    elif waited >= _BALANCED_FRAC and rollout >= _BALANCED_FRAC:
        text = (
            f"{who}, rollouts wait {rollout:.0%}: they take turns; a larger max_staleness lets them overlap"
        )
    elif waited >= _BALANCED_FRAC:
        # Rounded to the nearest number; the smallest divisor bounds the advice if the trainer always waits.
        missing = max(1, math.ceil(num_services * waited / max(1 - waited, 1e-3) - 0.5))
        text = f"{who}: about {missing} more {_services(missing)}"
    elif rollout >= _BALANCED_FRAC and num_services * rollout >= 1:
        missing = -min(num_services - 1, math.floor(num_services * rollout))
        text = f"rollouts wait {rollout:.0%}: {-missing} {_services(-missing)} too many"
    if not text:
        text = f"balanced: {who}, rollouts wait {rollout:.0%}"
    return ScalingAdvice(
        trainer_wait_frac=trainers,
        rollout_wait_frac=rollout,
        num_services=num_services,
        missing_services=missing,
        text=text,
    )


def _services(count: int) -> str:
    return "service" if count == 1 else "services"

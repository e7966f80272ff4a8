"""Estimates the speed of rollout services from the durations of their episodes, since requests are not timed.

An episode's duration has three parts, with n(t) requests on its service and k of them in a slot, where k is
the smaller of n and the number of slots:

    duration = a * integral of q w dt + b * integral of q k w dt + c * turns

where a is the time per token, b the time that each request in a slot adds to it, c the time per turn that
doesn't depend on tokens, q = n / k the factor for waiting for slots, and w(t) = 1 / ((a + b k) q) the tokens
per second of the episode. A long episode that has the device to itself near its end gets most of its tokens
then. So the mean of k is taken over tokens; a mean over time would make the device look faster. Since w
depends on a and b, they are fitted several times.

The model assumes that the wait for a slot grows with the length of the request, which isn't true for a queue.
So a is overestimated if many more episodes run than there are slots.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

__all__ = ["EpisodeTime", "fit_service", "least_squares"]

_ROUNDS = 8
"""Number of fits. Another one would change the figures by less than a thousandth."""
_MIN_FIXED = 0.01
"""Minimum fixed time per token, as a share of what each request adds: a single request takes time, too."""

_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class EpisodeTime:
    """The duration of an episode, and what it depends on."""

    service: str
    ended_s: float
    duration_s: float
    num_tokens: int
    num_turns: int
    """Number of requests, which ran one after the other."""


def fit_service(episodes: Sequence[EpisodeTime], num_slots: int) -> tuple[float, float, float]:
    """Returns the seconds per token, the seconds that each request in a slot adds to it, and the seconds per
    turn.

    All are >= 0, and the first is > 0 unless all durations are 0. `num_slots` is the number of requests that
    a service can process at once.
    """
    tokens = np.array([episode.num_tokens for episode in episodes], float)
    turns = np.array([episode.num_turns for episode in episodes], float)
    durations = np.array([episode.duration_s for episode in episodes])
    concurrency = _Concurrency(episodes)
    fixed_s = 1.0
    row_s = turn_s = 0.0
    for _ in range(_ROUNDS):
        # The other episodes are between two requests as often as this one is.
        generating = max(0.0, 1 - turn_s * turns.sum() / max(1e-9, durations.sum()))
        numbers = [1 + generating * np.maximum(0, number - 1) for number in concurrency.numbers]
        running = [np.minimum(number, num_slots) for number in numbers]
        queued = [number / k for number, k in zip(numbers, running, strict=True)]
        step_s = [fixed_s + row_s * k for k in running]
        got = concurrency.integral([1 / (q * s) for q, s in zip(queued, step_s, strict=True)])
        fixed = concurrency.integral([1 / s for s in step_s]) * tokens / got
        rows = concurrency.integral([k / s for k, s in zip(running, step_s, strict=True)]) * tokens / got
        fixed_s, row_s, turn_s = least_squares(np.stack([fixed, rows, turns], axis=1), durations)
        if fixed_s <= 0:  # all of the time grows with the number of requests
            fixed_s = _MIN_FIXED * row_s
        if fixed_s <= 0:
            return float(durations.sum() / fixed.sum()), 0.0, 0.0
    return fixed_s, row_s, turn_s


def least_squares(columns: _Floats, values: _Floats) -> list[float]:
    """Returns the coefficients >= 0 that fit the values best. Tries all subsets of the few columns."""
    num = columns.shape[1]
    best = [0.0] * num
    least = float((values**2).sum())
    for chosen in (idxs for size in range(1, num + 1) for idxs in combinations(range(num), size)):
        factors, *_ = np.linalg.lstsq(columns[:, chosen], values, rcond=None)
        error = float(((columns[:, chosen] @ factors - values) ** 2).sum())
        if (factors >= 0).all() and error < least:
            least = error
            by_column = dict(zip(chosen, map(float, factors), strict=True))
            best = [by_column.get(idx, 0.0) for idx in range(num)]
    return best


class _Concurrency:
    """The number of episodes on each service, between any two starts or ends of episodes."""

    def __init__(self, episodes: Sequence[EpisodeTime]) -> None:
        by_service: dict[str, list[int]] = defaultdict(list)
        for idx, episode in enumerate(episodes):
            by_service[episode.service].append(idx)
        self._idxs = [np.array(idxs) for idxs in by_service.values()]
        self._ends = [np.array([episodes[idx].ended_s for idx in idxs]) for idxs in by_service.values()]
        self._begins = [
            ends - np.array([max(1e-9, episodes[idx].duration_s) for idx in idxs])
            for ends, idxs in zip(self._ends, by_service.values(), strict=True)
        ]
        self._times: list[_Floats] = []
        self.numbers: list[_Floats] = []
        """For each service, the number of episodes from each time on."""
        for begins, ends in zip(self._begins, self._ends, strict=True):
            times = np.concatenate([begins, ends])
            order = np.argsort(times, kind="stable")
            changes = np.repeat([1.0, -1.0], len(begins))
            self._times.append(times[order])
            self.numbers.append(np.cumsum(changes[order]))

    def integral(self, values: Sequence[_Floats]) -> _Floats:
        """Returns the integral of a value over the duration of each episode.

        `values` has the shape of `numbers`: the value of each service from each time on.
        """
        sums_of_spans = np.zeros(sum(map(len, self._idxs)))
        parts = zip(self._idxs, self._begins, self._ends, self._times, values, strict=True)
        for idxs, begins, ends, times, value in parts:
            sums = np.concatenate([[0.0], np.cumsum(value[:-1] * np.diff(times))])
            sums_of_spans[idxs] = np.interp(ends, times, sums) - np.interp(begins, times, sums)
        return sums_of_spans

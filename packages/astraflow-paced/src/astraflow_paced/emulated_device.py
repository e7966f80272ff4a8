"""Emulates an accelerator: computes how fast the requests on it advance.

The device is passive: the time, in emulated seconds, is an argument.

All running requests advance at the same speed, which depends on their number. A decoding step takes
`1 / tokens_per_s` for reading the weights, and `1 / max_tokens_per_s` more for each request in it. A single
number is therefore enough to find the end of every request: the progress, which is the number of tokens of a
request that would have run since the start. A heap has the progress at which each request ends, so its
smallest entry is the next end.

With a bounded KV cache, requests occupy it from their prompts to their last token. If it's full, the request
that began last is preempted: it loses its tokens there, waits before all others, and computes them again.

Ends are processed in order and at their exact times, however late `advance` is called. A request that waits
for a slot begins when the slot becomes free, not at the next call of `advance`.
"""

import heapq
import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["PacedDevice", "PacedJob"]

_ROUNDING = 1e-6
"""In tokens. Progress is a sum of floats, so a token that lacks no more than this counts as done."""
_WATERMARK = 0.01
"""Share of the KV cache that has to stay free when a request begins. Otherwise, a request that was preempted
would begin again at once."""

_Entry = tuple[float, int, "PacedJob"]


@dataclass(slots=True, eq=False)
class PacedJob:
    """A request on the device. The caller of `advance` calls `ended`."""

    owner: str
    """The policy of the request. `hold` stops all requests of an owner."""
    num_tokens: int
    prefill: float
    """Time before the first token, measured in tokens."""
    ended: Callable[[], None]
    num_context: int = 0
    """Tokens of its prompt, which occupy the KV cache."""
    num_kept: int = 0
    """Tokens that it had generated when it was last preempted."""
    left: float = field(init=False)
    """Tokens until its end, including the prefill, as of when it last stopped advancing."""
    entry: _Entry | None = None
    """Its entry in the heap while it advances."""
    is_running: bool = False
    """Whether it has a slot."""
    kv_rate: float = 0.0
    """Growth of its part of the KV cache per token of progress while it advances, prefill included."""

    def __post_init__(self) -> None:
        self.left = self.prefill + self.num_tokens

    @property
    def kv_tokens(self) -> float:
        """Its part of the KV cache, as of when it last stopped advancing."""
        return self.num_context + self.num_tokens - self.left * self.kv_rate

    def begin(self) -> None:
        """Notes that it gets a slot."""
        self.is_running = True
        self.kv_rate = (self.num_tokens - self.num_kept) / self.left if self.left else 0.0

    def restart(self, num_kept: int) -> None:
        """Notes that it was preempted after `num_kept` tokens, which need a prefill like the prompt's."""
        per_token = self.prefill / self.num_context if self.num_context else 0.0
        self.num_kept = num_kept
        self.left = per_token * (self.num_context + num_kept) + self.num_tokens - num_kept


class PacedDevice:
    """An accelerator with a number of slots. Requests beyond that number, or beyond the KV cache, wait.

    Example: `device.submit(job)`; then `device.advance(device.due_s)` returns `[job]`.
    """

    def __init__(
        self, *, num_slots: int, tokens_per_s: float, max_tokens_per_s: float = 0.0, kv_tokens: int = 0
    ) -> None:
        """`tokens_per_s` is the speed of a request that runs alone. `max_tokens_per_s` bounds the speed of
        all requests together, `kv_tokens` the tokens in the KV cache; 0 means no bound."""
        self._num_slots = num_slots
        self._max_kv = kv_tokens or math.inf
        self._kv = 0.0
        """Tokens in the KV cache now."""
        self._kv_rate = 0.0
        self._fixed_s = 1 / tokens_per_s
        self._row_s = 1 / max_tokens_per_s if max_tokens_per_s else 0.0
        self._now_s = 0.0
        self._progress = 0.0
        """Number of tokens of a request that would have run since the start."""
        self._heap: list[_Entry] = []
        """(progress at the end, order, job). An entry that is not its job's current one is skipped, because
        removing it from the middle of the heap would cost more."""
        self._order = itertools.count()
        self._running: dict[PacedJob, None] = {}
        self._waiting: deque[PacedJob] = deque()
        self._num_running: Counter[str] = Counter()
        self._num_waiting: Counter[str] = Counter()
        self._num_preemptions: Counter[str] = Counter()
        self._num_advancing = 0
        self._holds: Counter[str] = Counter()

    def num_running(self, owner: str) -> int:
        """Returns the number of an owner's requests that have a slot."""
        return self._num_running[owner]

    def num_waiting(self, owner: str) -> int:
        """Returns the number of an owner's requests that wait for a slot."""
        return self._num_waiting[owner]

    def num_preemptions(self, owner: str) -> int:
        """Returns how often a request of an owner was preempted."""
        return self._num_preemptions[owner]

    @property
    def kv_frac(self) -> float | None:
        """Share of the KV cache that is in use; None if it is unbounded."""
        return None if math.isinf(self._max_kv) else min(1.0, self._kv / self._max_kv)

    def is_held(self, owner: str) -> bool:
        """Returns whether the owner's requests are held."""
        return self._holds[owner] > 0

    @property
    def rate(self) -> float:
        """Tokens per second of all requests that advance."""
        return self._num_advancing / self._step_s

    @property
    def waiting(self) -> tuple[PacedJob, ...]:
        """The requests that wait for a slot, in order."""
        return tuple(self._waiting)

    @property
    def due_s(self) -> float:
        """When the next request ends or is preempted if nothing else happens; infinite if none advances."""
        due = min(self._next_end, self._full_at)
        return self._now_s + max(0.0, due - self._progress) * self._step_s if self._heap else math.inf

    def advance(self, now_s: float) -> list[PacedJob]:
        """Advances the clock, and returns the requests that have ended since then, in order."""
        jobs: list[PacedJob] = []
        while (due_s := self.due_s) <= now_s:
            self._now_s = due_s
            if self._full_at < self._next_end:
                self._move(self._full_at)
                self._preempt()
                continue
            end, _, job = heapq.heappop(self._heap)
            self._move(max(end, self._progress))
            self._stop(job)
            job.left = 0.0
            self._leave(job)
            self._admit()
            jobs.append(job)
        if now_s > self._now_s:
            if self._num_advancing:
                self._move(self._progress + (now_s - self._now_s) / self._step_s)
            self._now_s = now_s
        return jobs

    def submit(self, job: PacedJob, *, is_first: bool = False) -> None:
        """Queues a request at the time of the last `advance`, before all others if `is_first`."""
        if is_first:
            self._waiting.appendleft(job)
        else:
            self._waiting.append(job)
        self._num_waiting[job.owner] += 1
        self._admit()

    def remove(self, job: PacedJob) -> None:
        """Removes a running or waiting request. Has no effect after its end."""
        if job.is_running:
            self._stop(job)
            self._leave(job)
            self._admit()
        elif job in self._waiting:
            self._waiting.remove(job)
            self._num_waiting[job.owner] -= 1

    def hold(self, owner: str) -> None:
        """Stops an owner's requests, which keep their slots. Each `hold` needs its own `release`."""
        self._holds[owner] += 1
        if self._holds[owner] == 1:
            for job in self._of(owner):
                self._stop(job)

    def release(self, owner: str) -> None:
        """Undoes one `hold`. The owner's requests continue after the last one."""
        self._holds[owner] -= 1
        if not self._holds[owner]:
            for job in self._of(owner):
                self._go(job)

    def tokens_done(self, job: PacedJob) -> int:
        """Returns the number of tokens that a request has generated."""
        left = job.left if job.entry is None else job.entry[0] - self._progress
        return max(job.num_kept, min(job.num_tokens, math.floor(job.num_tokens - left + _ROUNDING)))

    # --- parts ---

    @property
    def _step_s(self) -> float:
        """Time per token of each request that advances."""
        return self._fixed_s + self._num_advancing * self._row_s

    @property
    def _next_end(self) -> float:
        """Progress at which the next request ends; infinite if no request advances."""
        while self._heap and self._heap[0][2].entry is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else math.inf

    @property
    def _full_at(self) -> float:
        """Progress at which the KV cache is full. The last request may exceed it, so that it can end."""
        if self._kv_rate <= 0 or len(self._running) < 2 or math.isinf(self._max_kv):
            return math.inf
        return self._progress + max(0.0, self._max_kv - self._kv) / self._kv_rate

    def _move(self, progress: float) -> None:
        self._kv += (progress - self._progress) * self._kv_rate
        self._progress = progress

    def _preempt(self) -> None:
        job = next(reversed(self._running))
        self._stop(job)
        self._leave(job)
        job.restart(self.tokens_done(job))
        self._waiting.appendleft(job)
        self._num_waiting[job.owner] += 1
        self._num_preemptions[job.owner] += 1

    def _has_room(self, job: PacedJob) -> bool:
        kv = self._kv + job.num_context + job.num_kept
        return not self._running or kv <= (1 - _WATERMARK) * self._max_kv

    def _of(self, owner: str) -> list[PacedJob]:
        return [job for job in self._running if job.owner == owner]

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._num_slots and self._has_room(self._waiting[0]):
            job = self._waiting.popleft()
            self._num_waiting[job.owner] -= 1
            self._num_running[job.owner] += 1
            self._running[job] = None
            job.begin()
            self._kv += job.kv_tokens
            if not self.is_held(job.owner):
                self._go(job)

    def _go(self, job: PacedJob) -> None:
        job.entry = (self._progress + job.left, next(self._order), job)
        self._num_advancing += 1
        self._kv_rate += job.kv_rate
        heapq.heappush(self._heap, job.entry)

    def _stop(self, job: PacedJob) -> None:
        if job.entry is not None:
            job.left = max(0.0, job.entry[0] - self._progress)
            job.entry = None
            self._num_advancing -= 1
            self._kv_rate -= job.kv_rate

    def _leave(self, job: PacedJob) -> None:
        del self._running[job]
        job.is_running = False
        self._num_running[job.owner] -= 1
        self._kv -= job.kv_tokens
        if not self._running:  # what rounding has left
            self._kv = self._kv_rate = 0.0

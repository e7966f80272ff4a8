"""Predicts when a trainer's next batch is complete: its missing tokens divided by their pace.

Both are known from the dataflow's status. The services report the tokens that they have generated, and the
pace at which they generate now. A batch needs as many tokens as lay between the last batches, filtered groups
included, and the groups that are ready already are the part that isn't missing.
"""

import math
from collections import deque

from astraflow.types import PolicyStatus, StatusReply

__all__ = ["BatchForecast"]

_BATCHES = 5
"""Batches over which the tokens of one are averaged."""


class BatchForecast:
    """Example: `forecast.note_status(status)` for each status, `forecast.note_batch("actor")` when its
    trainer takes a batch, and then `forecast.missing_s(policy)`."""

    def __init__(self) -> None:
        self._generated: dict[str, int] = {}
        """Service id -> its tokens as of the last status."""
        self._num_tokens = 0
        self._tokens_per_s = 0.0
        self._marks: dict[str, deque[int]] = {}
        """Policy -> all tokens so far, as of its last batches."""

    def note_status(self, status: StatusReply) -> None:
        """Reads the tokens and the pace of all services."""
        for worker in status.workers:
            num = worker.load.generated_tokens
            self._num_tokens += max(0, num - self._generated.get(worker.id, 0))
            self._generated[worker.id] = num
        self._tokens_per_s = sum(worker.load.tokens_per_s for worker in status.workers)

    def note_batch(self, policy: str) -> None:
        """Notes that the trainer of a policy takes a batch."""
        self._marks.setdefault(policy, deque(maxlen=_BATCHES + 1)).append(self._num_tokens)

    def missing_s(self, policy: PolicyStatus) -> float:
        """Returns the seconds until the next batch is complete; infinity if that isn't known."""
        marks = self._marks.get(policy.name, ())
        if len(marks) < 2 or self._tokens_per_s <= 0:
            return math.inf
        num_tokens = (marks[-1] - marks[0]) / (len(marks) - 1)
        missing_frac = 1 - policy.num_ready_groups / max(1, policy.groups_per_batch)
        return max(0.0, missing_frac) * num_tokens / self._tokens_per_s

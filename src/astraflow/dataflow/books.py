"""What the books of a run hold: plain structs, which can be carried from one compaction to the next."""

import msgspec

from astraflow.dataflow.core.commands import BatchTaken, FateDecided, PayloadRef, RunEnded
from astraflow.dataflow.records import ClosedFates, FateRow
from astraflow.types import StepRecord

__all__ = ["Books", "Brought", "EpisodeBooks", "GroupBooks", "PolicyBooks", "Replayed", "TakenBatch"]


class Brought(msgspec.Struct, array_like=True, gc=False):
    """What one group brought for one policy."""

    oldest_version: int = -1
    num_samples: int = 0
    num_trained_tokens: int = 0
    payloads: list[PayloadRef] = []
    first_step: int = -1
    """Whose batch was the first to hold it."""
    num_uses: int = 0
    """Batches that hold it."""


class EpisodeBooks(msgspec.Struct, array_like=True):
    """The leases of a group or evaluation round, and which of them won."""

    leases: set[str] = set()
    accepted: dict[int, str] = {}
    """Episode -> winning lease."""


class GroupBooks(EpisodeBooks, array_like=True):
    """One draw."""

    drawn: list[str] = []
    """Policies that it was drawn for."""
    fates: dict[str, FateDecided] = {}
    brought: dict[str, Brought] = {}

    @property
    def is_decided(self) -> bool:
        """Whether it ended for every policy."""
        return len(self.fates) >= len(self.drawn) > 0

    def of(self, policy: str) -> Brought:
        """What it brought for a policy."""
        return self.brought.get(policy) or Brought()

    def fate_row(self, policy: str, group_id: int) -> FateRow:
        """How it ended for a policy. Raises: KeyError if it is undecided."""
        event, brought = self.fates[policy], self.of(policy)
        figures = (event.step, event.staleness, event.num_tokens)
        return FateRow(
            policy, group_id, event.fate, *figures, brought.num_samples, brought.num_trained_tokens
        )


class TakenBatch(msgspec.Struct, frozen=True, array_like=True):
    """A batch, and the record that took it: the plan of that moment covers it."""

    event: BatchTaken
    seq: int

    @property
    def all_ids(self) -> tuple[int, ...]:
        """Its groups, fresh ones first."""
        return (*self.event.group_ids, *self.event.replayed_ids)

    @property
    def all_staleness(self) -> tuple[int, ...]:
        """Of the groups in the order of `all_ids`."""
        return (*self.event.staleness, *self.event.replayed_staleness)


class Replayed(msgspec.Struct, frozen=True, array_like=True):
    """What a closed step trained on again."""

    staleness: tuple[int, ...] = ()
    """One a group."""
    num_samples: int = 0
    num_trained_tokens: int = 0


class PolicyBooks(msgspec.Struct):
    """The books of one policy."""

    batches: dict[int, TakenBatch] = {}
    """Those that are not closed, by step."""
    committed: dict[int, StepRecord] = {}
    """Those that are not closed, by step."""
    num_committed: int = 0
    released: int = 0
    """Steps whose batches no trainer will ask for again."""
    newest_version: int = -1
    num_redone: int = 0
    num_dropped: int = 0
    """Batches that a person gave up."""
    closed: ClosedFates = msgspec.field(default_factory=ClosedFates)
    num_closed_steps: int = 0
    replayed: dict[int, Replayed] = {}
    """By closed step, for those that replayed groups."""
    first_segments: dict[int, int] = {}
    """Closed step whose payloads may be kept -> the first segment that holds some of them."""


class Books(msgspec.Struct):
    """All but the groups that are open."""

    policies: dict[str, PolicyBooks]
    seq: int = 0
    """Newest record in them."""
    chain: bytes = b""
    """Of that record."""
    rounds: dict[int, EpisodeBooks] = {}
    """Evaluation rounds."""
    drawn_below: int = 0
    """No group with a smaller number is drawn from here on."""
    pushed: set[str] = set()
    """Ids of accepted tasks from outside; the run's limits bound them."""
    pushed_waiting: set[str] = set()
    """Those that were not drawn."""
    num_push_refused: int = 0
    num_results: int = 0
    num_dropped: int = 0
    num_failed_attempts: int = 0
    num_evals: int = 0
    num_records: int = 0
    ended: RunEnded | None = None
    first_lease_s: float = 0.0
    """When the first training lease went out; 0 if none did."""
    last_commit_s: float = 0.0

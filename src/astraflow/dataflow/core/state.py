"""The core's state: plain mutable structs, so that a snapshot is one encoding of them.

Dicts keep insertion order and serve as ordered sets and queues. Whatever is decided is dropped: a group stays
only until it completes, and a complete group only until its step is released. The size of the state therefore
depends on the tickets and the retained steps, not on the length of the run. The exceptions are one record per
step and one per finished evaluation.

The structs form a tree without cycles, so the garbage collector skips them (`gc=False`). With 100,000 live
items, a collection would stop the service for half a second.
"""

import math
from typing import Literal

import msgspec

from astraflow.dataflow.core.commands import EpisodeFacts, SampleView
from astraflow.dataflow.core.plan import Schedule
from astraflow.types import (
    EvalRecord,
    Fate,
    LeaseKind,
    Manifest,
    Reduction,
    RunState,
    SampleRules,
    StepRecord,
    Task,
    TensorInfo,
)

__all__ = [
    "BatchState",
    "BestState",
    "EpisodeState",
    "EpisodeSums",
    "EvalRound",
    "FailureStreak",
    "GroupState",
    "LeaseState",
    "MetricSum",
    "PolicyState",
    "ReadyGroup",
    "ReplayEntry",
    "RunStateData",
    "SessionState",
    "WorkerState",
]


class EpisodeState(msgspec.Struct, gc=False):
    """One episode of a group or of an evaluation round."""

    attempt: int = 0
    """The attempt that is pending or running."""
    status: Literal["pending", "running", "good", "failed"] = "pending"
    winner: int = -1
    """The attempt whose result counts, once `good`."""
    score: float = 0.0
    facts: EpisodeFacts | None = None
    """The facts of a training episode, until its group completes."""
    failed_on: tuple[str, ...] = ()
    """Services whose attempts at the episode failed."""
    failed_s: float = 0.0
    """When the latest attempt failed."""
    holders: tuple[str, ...] = ()
    """For each attempt, the only service that may send its result. Empty or missing if any service may."""
    num_lost: int = 0
    """Attempts whose service reported no result: it left, died, or was silent for too long."""
    num_handed_in: int = 0
    """Attempts that their services gave back."""


class LeaseState(msgspec.Struct, gc=False):
    """An open lease. For kind `eval`, `group_id` is the id of the round."""

    id: str
    kind: LeaseKind
    worker_id: str
    group_id: int
    episode_idx: int
    attempt: int
    strikes: int = 0
    """Strikes of the service when the lease was issued."""


class FailureStreak(msgspec.Struct, gc=False):
    """A service's recent failures; see `strikes`."""

    strikes: int = 0
    """Failures in a row. Failures of leases that ran together count once."""
    struck_s: float = 0.0
    """When the latest strike came."""
    last_failure: str = ""
    """Error class and message."""
    num_good: int = 0
    """Good episodes since it joined."""


class WorkerState(msgspec.Struct, gc=False):
    """A rollout service and the leases that it holds."""

    id: str
    name: str
    hosts: tuple[str, ...]
    leases: dict[str, None] = {}
    failures: FailureStreak = msgspec.field(default_factory=FailureStreak)
    active_s: float = -math.inf
    """When it last got a lease or ended one."""
    key: str = ""
    """Digest of the secret in its id."""


class GroupState(msgspec.Struct, gc=False):
    """A drawn task whose episodes are not all done."""

    id: int
    task_id: str
    task_idx: int
    """Position in all sources joined; -1 for a pushed task."""
    source: str
    source_idx: int
    undecided: list[str]
    """Policies that the group may still serve."""
    preferred_worker: str
    """The service that gets the group's episodes unless other services would be idle."""
    episodes: list[EpisodeState]
    num_open: int
    num_failed: int = 0


class ReadyGroup(msgspec.Struct, gc=False, frozen=True):
    """A complete group for one policy, after filters and credit. Frozen, as a user's own samplers get it."""

    group_id: int
    samples: tuple[SampleView, ...]
    oldest_version: int
    num_tokens: int
    num_trained_tokens: int
    advantage_sum: float
    advantage_square_sum: float
    reward_sum: float
    """Sum of the rewards over samples."""
    episode_reward_sum: float
    """Sum over episodes of the weighted mean reward of their trajectories."""
    num_episodes: int
    """Episodes in which the policy acts, counted once per role."""
    num_zeroed_tokens: int = 0
    """Tokens of samples that a rule set to zero. They take part in no statistic, and aren't in
    `num_trained_tokens`."""

    @property
    def num_sampled_tokens(self) -> int:
        """Both together: what totals and the audit count."""
        return self.num_trained_tokens + self.num_zeroed_tokens


class BatchState(msgspec.Struct, gc=False):
    """The groups of one step, kept until the step is released."""

    step: int
    trainer_version: int
    groups: list[ReadyGroup]
    staleness: list[int]
    replayed: list[ReadyGroup] = []
    """Groups of earlier steps that this step trains on again."""
    replayed_staleness: list[int] = []


class ReplayEntry(msgspec.Struct, gc=False):
    """A group that was in a batch and may be in another one."""

    group: ReadyGroup
    uses: int
    """Number of batches that held it."""


class SessionState(msgspec.Struct, gc=False):
    """The trainer's current session. It trains step `step` from version `base_version + step - base_step`."""

    trainer_id: str
    base_step: int
    base_version: int
    done: int
    """Steps that this session's weights contain and that are committed, counted from the run's start."""
    since_s: float

    def version_at(self, step: int) -> int:
        """Version of the weights to which this session applies the first gradient of `step`."""
        return self.base_version + step - self.base_step


class BestState(msgspec.Struct, gc=False, frozen=True):
    """The best version of a policy so far."""

    version: int
    value: float
    """Value of the metric that the plan's rule compares."""


class MetricSum(msgspec.Struct, gc=False):
    """The running sum of one metric over episodes."""

    value: float
    num: int
    reduction: Reduction
    bins: dict[int, int] = {}
    """Number of values per bin. Used by percentiles only; see `metric_sums`."""


class EpisodeSums(msgspec.Struct, gc=False):
    """Sums over the good training episodes since the last commit, whether they will be trained on or not."""

    num: int = 0
    score_sum: float = 0.0
    duration_sum_s: float = 0.0
    duration_max_s: float = 0.0
    metrics: dict[str, MetricSum] = {}
    num_left_out: int = 0
    """Values of metrics for whose name there was no room in `metrics`."""


class PolicyState(msgspec.Struct, gc=False):
    """One trained policy: its table, versions and steps."""

    waiting: dict[int, None] = {}
    """Undecided groups that are not in a batch, in draw order."""
    ready: dict[int, ReadyGroup] = {}
    """The complete ones among them, in order of completion."""
    batches: dict[int, BatchState] = {}
    """Batches of steps that are not released."""
    replay: dict[int, ReplayEntry] = {}
    """Groups that later batches may hold again, in order of their first batch."""
    num_replayed: int = 0
    """Replayed groups in all batches since the run's start."""
    drawn: int = 0
    fates: dict[Fate, int] = {}
    filtered_by: dict[str, int] = {}
    """Filter -> number of groups that it dropped."""
    num_discarded: int = 0
    """Groups with a fate other than `trained` since the last commit."""
    unusable_in_a_row: int = 0
    """Groups with nothing to train on since the last usable one."""
    unusable_s: float = 0.0
    """The time over which these groups ended, without interruptions of the run."""
    unusable_at_s: float = 0.0
    """When the latest of them ended."""
    outcomes: dict[str, dict[str, int]] = {}
    """How groups ended since the last batch was taken: `ready` or a fate -> the filter that dropped them
    (empty for other fates) -> number."""
    failed_in_a_row: int = 0
    failed_on: dict[str, None] = {}
    """Services on which an attempt failed since the last group that gave something to train on."""
    taken: int = 0
    """Steps that have their batch."""
    stops_at: int | None = None
    """Number of steps after which the plan's `stop` ends the training; None until that is certain."""
    committed: int = 0
    released: int = 0
    redone: int = 0
    num_dropped_batches: int = 0
    """Batches dropped by a person."""
    epoch: int = 0
    session: SessionState | None = None
    rules: SampleRules = SampleRules()
    """Requirements of the newest session's trainer for trajectories. Kept while the trainer is away."""
    newest: int = -1
    manifests: dict[int, Manifest] = {}
    """Versions that someone may still need, without their tensors, which are in `tensors`."""
    tensors: tuple[TensorInfo, ...] = ()
    """The tensor table of all versions."""
    steps_of: dict[int, int] = {}
    """Kept version -> number of steps that its weights contain."""
    evaluated_step: int = -1
    """Largest number of steps for which an evaluation is due or done."""
    best: BestState | None = None
    """The best version by its evaluation, if the plan keeps one."""
    records: list[StepRecord] = []
    episodes: EpisodeSums = msgspec.field(default_factory=EpisodeSums)
    changed_s: float = 0.0
    """When its trainer last attached, took a batch, published, or committed; 0 before that."""


class EvalRound(msgspec.Struct, gc=False):
    """One evaluation set at pinned versions."""

    id: int
    policy: str
    version: int
    step: int
    eval_set: str
    pinned: dict[str, int]
    samples: int
    episodes: list[EpisodeState]
    num_open: int
    opened_s: float
    deadline_s: float
    next_fresh: int = 0
    """Position of the first episode that was never leased."""
    retries: dict[int, None] = {}
    metrics: dict[str, MetricSum] = {}
    num_late: int = 0
    """Episodes that failed because they took too long."""
    longest_s: float = 0.0
    """Duration of the longest episode that has a score."""
    longest_tokens: float = 0.0
    """Largest number of tokens that was sampled in an episode that has a score."""


class RunStateData(msgspec.Struct, gc=False):
    """The root of the state."""

    policies: dict[str, PolicyState]
    schedule: Schedule
    """The schedule in force."""
    run_state: RunState = "running"
    reason: str = ""
    next_group_id: int = 0
    groups: dict[int, GroupState] = {}
    fresh: dict[int, None] = {}
    """Groups with episodes that were never leased, in draw order."""
    retries: dict[int, None] = {}
    """Groups with episodes that wait for another attempt."""
    leases: dict[str, LeaseState] = {}
    workers: dict[str, WorkerState] = {}
    frozen: dict[str, Manifest] = {}
    """Frozen policy -> its published version."""
    num_pushed: int = 0
    pushed: dict[int, Task] = {}
    pushed_queue: dict[int, None] = {}
    """Pushed tasks that have not been drawn yet."""
    pushed_ids: dict[str, None] = {}
    num_pushed_again: int = 0
    num_push_refused: int = 0
    """Pushed tasks beyond the plan's limits."""
    next_round_id: int = 0
    rounds: dict[int, EvalRound] = {}
    rounds_to_open: list[tuple[str, int, int]] = []
    """(policy, version, step) of rounds that are due as soon as every policy has a version."""
    eval_records: list[EvalRecord] = []
    last_failure: str = ""
    """Error class and message of the latest failed attempt."""
    num_good: int = 0
    """Good episodes, evaluation included, since the run began or was resumed."""
    last_good_s: float = 0.0
    num_handed_in: int = 0
    absent: dict[str, FailureStreak] = {}
    """Name -> failure streak of a departed service that had strikes."""
    gone_keys: dict[str, str] = {}
    """Id -> key of recently departed services, whose results may still arrive."""

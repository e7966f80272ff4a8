"""Everything that the core remembers: plain mutable structs, so that a snapshot is one encoding of them.

Dicts keep insertion order and serve as ordered sets and queues. What is decided is dropped: groups live here
only until they complete, and completed ones only until they are released. The size of the state therefore
follows the tickets and the retained steps, not the length of the run. The exceptions are one record per step
and one per finished evaluation.

The structs form a tree without cycles, so the garbage collector is told to skip them (`gc=False`). With
100,000 live items, it would stop the service for half a second.
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
    "Conduct",
    "EpisodeState",
    "EpisodeSums",
    "EvalRound",
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
    """For each attempt, the service that it was granted to; empty or missing where anybody may answer."""
    num_lost: int = 0
    """Attempts that ended without a word of their services: these left, died, or were silent for too long."""


class LeaseState(msgspec.Struct, gc=False):
    """A lease that is out. `group_id` is the round's id for `eval`."""

    id: str
    kind: LeaseKind
    worker_id: str
    group_id: int
    episode_idx: int
    attempt: int
    strikes: int = 0
    """Number of strikes that its service had when the lease was issued."""


class Conduct(msgspec.Struct, gc=False):
    """How a service has done lately; see `conduct`."""

    strikes: int = 0
    """Failures in a row; those of leases that ran together count once."""
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
    conduct: Conduct = msgspec.field(default_factory=Conduct)
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
    home: str
    """The service that its episodes go to, unless others would idle."""
    episodes: list[EpisodeState]
    num_open: int
    num_failed: int = 0


class ReadyGroup(msgspec.Struct, gc=False, frozen=True):
    """What a complete group holds for one policy, after filters and credit. Samplers and removers see it, so
    it is frozen."""

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
    """Sum of the rewards over episodes; the reward of an episode is the weighted mean of its trajectories'
    rewards."""
    num_episodes: int
    """Episodes in which the policy acts, counted once per role."""


class BatchState(msgspec.Struct, gc=False):
    """The groups of one step, kept until the step is released."""

    step: int
    trainer_version: int
    groups: list[ReadyGroup]
    staleness: list[int]
    replayed: list[ReadyGroup] = []
    """Groups of earlier steps that are trained on again."""
    replayed_staleness: list[int] = []


class ReplayEntry(msgspec.Struct, gc=False):
    """A group that was taken and may come again."""

    group: ReadyGroup
    uses: int
    """Number of steps that hold it."""


class SessionState(msgspec.Struct, gc=False):
    """The trainer's current session. It trains step `step` from version `base_version + step - base_step`."""

    trainer_id: str
    base_step: int
    base_version: int
    done: int
    """Steps that the session's weights have done and that it has committed, counted from the run's start."""
    since_s: float


class BestState(msgspec.Struct, gc=False, frozen=True):
    """The best version of a policy so far."""

    version: int
    value: float
    """By the metric of the plan."""


class MetricSum(msgspec.Struct, gc=False):
    """A metric of several episodes so far."""

    value: float
    num: int
    reduction: Reduction
    bins: dict[int, int] = {}
    """Number of values by bin, for a percentile alone; see `metric_sums`."""


class EpisodeSums(msgspec.Struct, gc=False):
    """Sums over the good training episodes since the last commit, whether they will be trained on or not."""

    num: int = 0
    score_sum: float = 0.0
    duration_sum_s: float = 0.0
    duration_max_s: float = 0.0
    metrics: dict[str, MetricSum] = {}
    num_left_out: int = 0
    """Values of metrics whose name had no room in `metrics`."""


class PolicyState(msgspec.Struct, gc=False):
    """One trained policy: its table, versions and steps."""

    waiting: dict[int, None] = {}
    """Undecided groups in no batch, in draw order."""
    ready: dict[int, ReadyGroup] = {}
    """The completed ones among them, in completion order."""
    batches: dict[int, BatchState] = {}
    """Steps that have their batch and are not released."""
    replay: dict[int, ReplayEntry] = {}
    """In order of their first take."""
    num_replayed: int = 0
    """Groups that batches held for another time, since the run's start."""
    drawn: int = 0
    fates: dict[Fate, int] = {}
    filtered_by: dict[str, int] = {}
    """Filter -> groups that it dropped."""
    num_discarded: int = 0
    """Groups with another fate than trained since the last commit."""
    lost_in_a_row: int = 0
    """Groups that gave nothing to train on since the last one that did."""
    lost_s: float = 0.0
    """For how long they were lost, in seconds; interruptions of the run do not count."""
    lost_at_s: float = 0.0
    """When the last one was lost."""
    outcomes: dict[str, dict[str, int]] = {}
    """How groups ended since the last batch was taken: `ready` or a fate -> filter that dropped them, empty
    for other fates -> number."""
    failed_in_a_row: int = 0
    failed_on: dict[str, None] = {}
    """Services on which attempts failed since the last group that gave something to train on."""
    taken: int = 0
    """Steps that have their batch."""
    committed: int = 0
    released: int = 0
    redone: int = 0
    num_dropped_batches: int = 0
    """Batches that a person dropped."""
    epoch: int = 0
    session: SessionState | None = None
    rules: SampleRules = SampleRules()
    """What the newest session's trainer needs of trajectories; kept while it is away."""
    newest: int = -1
    manifests: dict[int, Manifest] = {}
    """Versions that someone may still need, without their tensors: those are in `tensors`."""
    tensors: tuple[TensorInfo, ...] = ()
    """The table of all versions. In snapshots of versions that kept it in each manifest, it is there."""
    steps_of: dict[int, int] = {}
    """Steps done by the weights of each kept version."""
    evaluated_step: int = -1
    """Largest number of steps done for which an evaluation was planned."""
    best: BestState | None = None
    """The version that is kept for its evaluation, if the plan asks for that and there is one."""
    records: list[StepRecord] = []
    episodes: EpisodeSums = msgspec.field(default_factory=EpisodeSums)
    changed_s: float = 0.0
    """When its trainer last attached, took a batch, published or committed; 0 before the first time."""


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


class RunStateData(msgspec.Struct, gc=False):
    """The root: everything that the core remembers of a run."""

    policies: dict[str, PolicyState]
    schedule: Schedule | None = None
    """What holds now of the part of the plan that may change. None in snapshots of versions that could not
    change it."""
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
    """The version of each frozen policy that was published."""
    num_pushed: int = 0
    pushed: dict[int, Task] = {}
    pushed_queue: dict[int, None] = {}
    """Pushed tasks that have not been drawn yet."""
    pushed_ids: dict[str, None] = {}
    num_pushed_again: int = 0
    num_push_refused: int = 0
    """Pushed tasks over the plan's limits."""
    next_round_id: int = 0
    rounds: dict[int, EvalRound] = {}
    rounds_to_open: list[tuple[str, int, int]] = []
    """(policy, version, step): due as soon as every policy has a version."""
    eval_records: list[EvalRecord] = []
    last_failure: str = ""
    """Error class and message of the latest failed attempt."""
    num_good: int = 0
    """Good episodes, evaluation included, since the run began or was resumed."""
    last_good_s: float = 0.0
    absent: dict[str, Conduct] = {}
    """Name -> conduct of a service that is gone and had strikes."""
    gone_keys: dict[str, str] = {}
    """Id -> key of the services that left last, whose results may still arrive."""
    changed_s: float = 0.0

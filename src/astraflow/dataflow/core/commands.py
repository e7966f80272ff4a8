"""What goes into the core, and what comes out: the journal's records.

A command is anything that may change the run's state. It carries its ids; its time is given with it. A
decision holds the core's answer, the events that the accounting consists of, and the waiters to wake. The
journal stores commands and events. Replaying the commands must give the same events again; the audit counts
the events alone.
"""

from typing import Any

from astraflow.dataflow.core.plan import Schedule
from astraflow.types import (
    BatchTotals,
    BusySpan,
    EvalRecord,
    Failure,
    Fate,
    FinishReason,
    Item,
    LeaseKind,
    Manifest,
    MetricItem,
    SampleRules,
    ServedVersions,
    StepRecord,
    Task,
)

__all__ = [
    "AddWorker",
    "AttachTrainer",
    "AttemptFailed",
    "BatchDropped",
    "BatchTaken",
    "BatchView",
    "ChangeSchedule",
    "Command",
    "CommitStep",
    "Decision",
    "DropBatch",
    "DropWorker",
    "EpisodeFacts",
    "EvalFinished",
    "Event",
    "ExpireEval",
    "ExpireLeases",
    "FateDecided",
    "GroupDrawn",
    "IssueLeases",
    "LeaseIssued",
    "LeaseView",
    "PayloadRef",
    "PublishFrozen",
    "PublishVersion",
    "PushTaskIds",
    "RecordResult",
    "ReleaseSteps",
    "ResultDropped",
    "ResumeRun",
    "RunEnded",
    "RunResumed",
    "SampleView",
    "ScheduleChanged",
    "ServiceRestored",
    "ServiceSetAside",
    "StepCommitted",
    "StepRedone",
    "StopRun",
    "Stored",
    "TakeBatch",
    "TasksPushed",
    "TrajectoryMeta",
    "VersionPublished",
]


class Stored(Item, frozen=True, array_like=True, gc=False):
    """Base of what journal and snapshots hold: fields by position, without their names.

    These objects are frozen, so they are never part of a cycle. The garbage collector therefore skips them
    (`gc=False`); to look at them, it would have to stop the service.
    """


class PayloadRef(Stored, frozen=True):
    """Where an encoded `Trajectory` is stored in the journal's segments."""

    segment: int
    offset: int
    length: int


class TrajectoryMeta(Stored, frozen=True, kw_only=True):
    """What the core knows of a trajectory: about 1 KB, no tokens."""

    policy: str
    role: str
    reward: float
    num_tokens: int
    num_trained_tokens: int
    oldest_version: int
    newest_version: int
    finish_reason: FinishReason
    turn_spans: tuple[tuple[int, int], ...]
    turn_rewards: tuple[float, ...]
    num_trained_by_turn: tuple[int, ...]
    """Tokens with mask 1 in each turn: the weight of an advantage of that turn."""
    payload: PayloadRef
    state_keys: tuple[int, ...] = ()
    repeated_frac: float = 0.0


class EpisodeFacts(Item, frozen=True, kw_only=True, tag="episode", gc=False):
    """What the core knows of an episode."""

    trajectories: tuple[TrajectoryMeta, ...]
    score: float
    metrics: tuple[MetricItem, ...]
    duration_s: float


# --- commands -------------------------------------------------------------------------------------


class AddWorker(Stored, frozen=True, kw_only=True, tag=True):
    """A rollout service joins; its id is chosen by the service layer.

    Here, and wherever the core speaks of a service, `worker_id` is the id's handle: see `worker_ids`.
    """

    worker_id: str
    name: str
    hosts: tuple[str, ...]
    key: str = ""
    """Digest of the id's secret. If it is empty, as in old journals, anybody may answer the leases."""


class DropWorker(Stored, frozen=True, kw_only=True, tag=True):
    """A rollout service left or vanished; its leases are issued again."""

    worker_id: str
    reason: str


class IssueLeases(Stored, frozen=True, kw_only=True, tag=True):
    """A service asks for leases. The command is journaled only if the service got some."""

    worker_id: str
    num_free: int
    served: tuple[ServedVersions, ...]


class ExpireLeases(Stored, frozen=True, kw_only=True, tag=True):
    """Heartbeats of these leases stopped."""

    lease_ids: tuple[str, ...]
    never_arrived: bool = False
    """The service never got the answer that granted the leases, so it is not to blame."""


class RecordResult(Stored, frozen=True, kw_only=True, tag=True):
    """The result of a lease. It has been checked, and its payloads are written."""

    lease_id: str
    worker_id: str
    outcome: EpisodeFacts | Failure


class PushTaskIds(Stored, frozen=True, kw_only=True, tag=True):
    """Tasks from outside. The core keeps them, because they are in no source."""

    tasks: tuple[Task, ...]


class AttachTrainer(Stored, frozen=True, kw_only=True, tag=True):
    """A trainer opens a session. It gets a new epoch, and older sessions are fenced."""

    policy: str
    trainer_id: str
    durable_step: int
    rules: SampleRules = SampleRules()


class TakeBatch(Stored, frozen=True, kw_only=True, tag=True):
    """The trainer takes step `step`. The command is journaled only when it decides something new."""

    policy: str
    epoch: int
    step: int


class PublishVersion(Stored, frozen=True, kw_only=True, tag=True):
    """A version can be downloaded."""

    policy: str
    epoch: int
    step: int
    manifest: Manifest


class PublishFrozen(Stored, frozen=True, kw_only=True, tag=True):
    """The one version of a frozen policy can be downloaded."""

    policy: str
    manifest: Manifest


class CommitStep(Stored, frozen=True, kw_only=True, tag=True):
    """A step is trained and its version is published. Its groups are `trained` for ever, and their tickets
    come back."""

    policy: str
    epoch: int
    step: int
    version: int
    metrics: tuple[MetricItem, ...]
    spans: tuple[BusySpan, ...] = ()


class ReleaseSteps(Stored, frozen=True, kw_only=True, tag=True):
    """The first `step` steps are in a durable checkpoint."""

    policy: str
    epoch: int
    step: int


class DropBatch(Stored, frozen=True, kw_only=True, tag=True):
    """A person gives up the batch of step `step`, which no trainer can train."""

    policy: str
    epoch: int
    step: int
    reason: str


class ExpireEval(Stored, frozen=True, kw_only=True, tag=True):
    """An evaluation round passed its deadline and is reported with what it has."""

    round_id: int


class StopRun(Stored, frozen=True, kw_only=True, tag=True):
    """Ends the run early: live groups are cancelled."""

    reason: str
    is_failure: bool


class ResumeRun(Stored, frozen=True, kw_only=True, tag=True):
    """A person starts a run again that had ended with a failure."""


class ChangeSchedule(Stored, frozen=True, kw_only=True, tag=True):
    """A person resumes the run with other numbers of steps, or another evaluation. A finished run goes on if
    a policy has more steps to do now."""

    schedule: Schedule


Command = (
    AddWorker
    | DropWorker
    | IssueLeases
    | ExpireLeases
    | RecordResult
    | PushTaskIds
    | AttachTrainer
    | TakeBatch
    | PublishFrozen
    | PublishVersion
    | CommitStep
    | ReleaseSteps
    | DropBatch
    | ExpireEval
    | StopRun
    | ResumeRun
    | ChangeSchedule
)


# --- events: what the audit counts ----------------------------------------------------------------


class GroupDrawn(Stored, frozen=True, kw_only=True, tag=True):
    """A task was drawn and charged to the policies in `admitted`; those in `unadmitted` had no ticket."""

    group_id: int
    task_id: str
    task_idx: int
    """Position in all sources joined; -1 for a pushed task."""
    admitted: tuple[str, ...]
    unadmitted: tuple[str, ...]


class TasksPushed(Stored, frozen=True, kw_only=True, tag=True):
    """Tasks came from outside, or from a workflow."""

    accepted: tuple[str, ...]
    """Ids."""
    num_known: int
    num_refused: int


class LeaseIssued(Stored, frozen=True, kw_only=True, tag=True):
    """An attempt at an episode began."""

    lease_id: str
    kind: LeaseKind
    group_id: int
    worker_id: str


class AttemptFailed(Stored, frozen=True, kw_only=True, tag=True):
    """An attempt ended without a result; `is_final` if there will be no other."""

    lease_id: str
    error_class: str
    is_final: bool


class ServiceSetAside(Stored, frozen=True, kw_only=True, tag=True):
    """A rollout service failed too often in a row: it gets a single lease now and then until one succeeds."""

    worker_id: str
    name: str
    strikes: int
    last_failure: str


class ServiceRestored(Stored, frozen=True, kw_only=True, tag=True):
    """A service that was set aside brought a good episode."""

    worker_id: str
    name: str


class ResultDropped(Stored, frozen=True, kw_only=True, tag=True):
    """A result came late or again."""

    lease_id: str
    reason: str


class FateDecided(Stored, frozen=True, kw_only=True, tag=True):
    """A group ended for a policy, in exactly one way. `step` is set only for the fate `trained`."""

    policy: str
    group_id: int
    fate: Fate
    step: int = -1
    num_tokens: int = 0
    staleness: int = 0


class BatchTaken(Stored, frozen=True, kw_only=True, tag=True):
    """A step got its batch, which it keeps unless a person drops it."""

    policy: str
    step: int
    trainer_version: int
    group_ids: tuple[int, ...]
    staleness: tuple[int, ...]
    replayed_ids: tuple[int, ...] = ()
    """Groups of earlier steps that are trained on again; their fate was decided by their first step."""
    replayed_staleness: tuple[int, ...] = ()


class BatchDropped(Stored, frozen=True, kw_only=True, tag=True):
    """Steps that were not committed lost their batches and get others. The groups of these batches are
    `evicted`."""

    policy: str
    steps: tuple[int, ...]
    reason: str


class VersionPublished(Stored, frozen=True, kw_only=True, tag=True):
    """A version became the newest."""

    policy: str
    version: int
    step: int
    epoch: int


class StepCommitted(Stored, frozen=True, kw_only=True, tag=True):
    """First commit of a step."""

    record: StepRecord


class StepRedone(Stored, frozen=True, kw_only=True, tag=True):
    """A commit of a step that was committed before; changes no fate."""

    policy: str
    step: int
    version: int


class EvalFinished(Stored, frozen=True, kw_only=True, tag=True):
    """An evaluation round is over."""

    record: EvalRecord


class RunEnded(Stored, frozen=True, kw_only=True, tag=True):
    """The run is over."""

    reason: str
    is_failure: bool


class RunResumed(Stored, frozen=True, kw_only=True, tag=True):
    """A failed run continues, or a finished one that got more steps. Steps that were not committed get other
    batches."""


class ScheduleChanged(Stored, frozen=True, kw_only=True, tag=True):
    """From here on, another schedule holds."""

    schedule: Schedule


Event = (
    TasksPushed
    | ServiceSetAside
    | ServiceRestored
    | RunResumed
    | ScheduleChanged
    | GroupDrawn
    | LeaseIssued
    | AttemptFailed
    | ResultDropped
    | FateDecided
    | BatchTaken
    | VersionPublished
    | BatchDropped
    | StepCommitted
    | StepRedone
    | EvalFinished
    | RunEnded
)


# --- answers --------------------------------------------------------------------------------------


class LeaseView(Stored, frozen=True, kw_only=True):
    """A lease before the service layer adds the task itself."""

    id: str
    kind: LeaseKind
    group_id: int
    episode_idx: int
    attempt: int
    source: str
    """Task source or evaluation set; empty for a pushed task."""
    task_idx: int
    """Position in that source; position among pushed tasks for a pushed one."""
    seed: int
    pinned: tuple[ServedVersions, ...] = ()
    eval_set: str = ""


class SampleView(Stored, frozen=True, kw_only=True):
    """A sample before the service layer adds the tokens."""

    group_id: int
    episode_idx: int
    task_id: str
    payload: PayloadRef
    advantages: tuple[tuple[int, int, float], ...]
    num_tokens: int


class BatchView(Stored, frozen=True, kw_only=True):
    """A batch before the service layer adds the tokens and slices it by rank."""

    policy: str
    step: int
    trainer_version: int
    samples: tuple[SampleView, ...]
    totals: BatchTotals
    staleness_mean: float
    staleness_max: int
    is_redo: bool


class Decision(Item, frozen=True, kw_only=True):
    """What a command led to.

    The type of `answer` depends on the command: see `Core.apply`. `wakes` are topics of waiters: `leases`,
    `worker/ID`, `batch/POLICY`, `versions/POLICY`, `steps/POLICY`, `evals`, `run`.
    """

    answer: Any = None
    events: tuple[Event, ...] = ()
    wakes: tuple[str, ...] = ()

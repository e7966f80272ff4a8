"""The core's input and output: commands, events, and answers.

A command is anything that may change the state of the run. It carries ids; its time is passed separately. A
decision holds the core's answer, the events that make up the accounting, and the waiters to wake. The journal
stores commands and events. Replaying the commands must give the same events. The audit uses the events alone.

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
    ZeroedBy,
)

__all__ = [
    "AddTasks",
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
    "StoredItem",
    "TakeBatch",
    "TasksPushed",
    "TrajectoryMeta",
    "VersionPublished",
]


class StoredItem(Item, frozen=True, array_like=True, gc=False):
    """Base of what the journal and snapshots hold: fields by position, without their names.

    Frozen objects are never part of a cycle, so the garbage collector need not visit them (`gc=False`).

    """


class PayloadRef(StoredItem, frozen=True):
    """Where an encoded `Trajectory` is stored in the journal's segments."""

    segment: int
    offset: int
    length: int


class TrajectoryMeta(StoredItem, frozen=True, kw_only=True):
    """What the core knows of a trajectory: about 1 KB, without tokens."""

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
    """Tokens with mask 1 in each turn, which weight the turn's advantage."""
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


class AddWorker(StoredItem, frozen=True, kw_only=True, tag=True):
    """A rollout service joins under an id that the service layer chose.

    Throughout the core, `worker_id` is the handle of that id, not the id itself; see `worker_ids`.
    """

    worker_id: str
    name: str
    hosts: tuple[str, ...]
    key: str = ""
    """Digest of the id's secret. If it is empty, any service may send results."""


class DropWorker(StoredItem, frozen=True, kw_only=True, tag=True):
    """A rollout service left or vanished. Its leases are issued again."""

    worker_id: str
    reason: str


class IssueLeases(StoredItem, frozen=True, kw_only=True, tag=True):
    """A service asks for leases. Journaled only if the service got some."""

    worker_id: str
    num_free: int
    served: tuple[ServedVersions, ...]


class ExpireLeases(StoredItem, frozen=True, kw_only=True, tag=True):
    """The heartbeats of these leases stopped."""

    lease_ids: tuple[str, ...]
    never_arrived: bool = False
    """Whether the service never got the answer that granted the leases. It is then not to blame."""


class RecordResult(StoredItem, frozen=True, kw_only=True, tag=True):
    """The result of a lease, already checked, with its payloads written."""

    lease_id: str
    worker_id: str
    outcome: EpisodeFacts | Failure


class AddTasks(StoredItem, frozen=True, kw_only=True, tag=True):
    """Tasks arrive from outside or from a workflow. The core keeps them, because no source has them."""

    tasks: tuple[Task, ...]


class AttachTrainer(StoredItem, frozen=True, kw_only=True, tag=True):
    """A trainer opens a session with a new epoch. Older sessions are fenced."""

    policy: str
    trainer_id: str
    durable_step: int
    rules: SampleRules = SampleRules()


class TakeBatch(StoredItem, frozen=True, kw_only=True, tag=True):
    """The trainer asks for the batch of step `step`. Journaled only if this decides something new."""

    policy: str
    epoch: int
    step: int


class PublishVersion(StoredItem, frozen=True, kw_only=True, tag=True):
    """A version can be downloaded from now on."""

    policy: str
    epoch: int
    step: int
    manifest: Manifest


class PublishFrozen(StoredItem, frozen=True, kw_only=True, tag=True):
    """The only version of a frozen policy can be downloaded from now on."""

    policy: str
    manifest: Manifest


class CommitStep(StoredItem, frozen=True, kw_only=True, tag=True):
    """A step is trained and published. Its groups get the final fate `trained`, which frees their tickets."""

    policy: str
    epoch: int
    step: int
    version: int
    metrics: tuple[MetricItem, ...]
    spans: tuple[BusySpan, ...] = ()


class ReleaseSteps(StoredItem, frozen=True, kw_only=True, tag=True):
    """The first `step` steps are in a durable checkpoint."""

    policy: str
    epoch: int
    step: int


class DropBatch(StoredItem, frozen=True, kw_only=True, tag=True):
    """A person drops the batch of step `step`, which no trainer can train on."""

    policy: str
    epoch: int
    step: int
    reason: str


class ExpireEval(StoredItem, frozen=True, kw_only=True, tag=True):
    """An evaluation round passed its deadline and is reported with the results that it has."""

    round_id: int


class StopRun(StoredItem, frozen=True, kw_only=True, tag=True):
    """The run ends early. Live groups are cancelled."""

    reason: str
    is_failure: bool


class ResumeRun(StoredItem, frozen=True, kw_only=True, tag=True):
    """A person resumes a run that ended with a failure."""


class ChangeSchedule(StoredItem, frozen=True, kw_only=True, tag=True):
    """A person resumes the run with another schedule. A finished run continues if a policy has steps to
    do."""

    schedule: Schedule


Command = (
    AddWorker
    | DropWorker
    | IssueLeases
    | ExpireLeases
    | RecordResult
    | AddTasks
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


# --- events: the input of the audit ----------------------------------------------------------------


class GroupDrawn(StoredItem, frozen=True, kw_only=True, tag=True):
    """A task was drawn. Its group took a ticket of each policy in `admitted`; the others had none free."""

    group_id: int
    task_id: str
    task_idx: int
    """Position in all sources joined; -1 for a pushed task."""
    admitted: tuple[str, ...]
    unadmitted: tuple[str, ...]


class TasksPushed(StoredItem, frozen=True, kw_only=True, tag=True):
    """Tasks came from outside, or from a workflow."""

    accepted: tuple[str, ...]
    """Ids."""
    num_known: int
    num_refused: int


class LeaseIssued(StoredItem, frozen=True, kw_only=True, tag=True):
    """An attempt at an episode began."""

    lease_id: str
    kind: LeaseKind
    group_id: int
    worker_id: str


class AttemptFailed(StoredItem, frozen=True, kw_only=True, tag=True):
    """An attempt ended without a result. If `is_final`, no other attempt follows."""

    lease_id: str
    error_class: str
    is_final: bool


class ServiceSetAside(StoredItem, frozen=True, kw_only=True, tag=True):
    """A service failed too often in a row. It gets single leases from time to time, until one succeeds."""

    worker_id: str
    name: str
    strikes: int
    last_failure: str


class ServiceRestored(StoredItem, frozen=True, kw_only=True, tag=True):
    """A service that was set aside sent a good episode."""

    worker_id: str
    name: str


class ResultDropped(StoredItem, frozen=True, kw_only=True, tag=True):
    """A result arrived too late, or a second time."""

    lease_id: str
    reason: str


class FateDecided(StoredItem, frozen=True, kw_only=True, tag=True):
    """A group got its fate for a policy, which is final. `step` is set only for the fate `trained`."""

    policy: str
    group_id: int
    fate: Fate
    step: int = -1
    num_tokens: int = 0
    staleness: int = 0


class BatchTaken(StoredItem, frozen=True, kw_only=True, tag=True):
    """A step got its batch, and keeps it unless a person drops it."""

    policy: str
    step: int
    trainer_version: int
    group_ids: tuple[int, ...]
    staleness: tuple[int, ...]
    replayed_ids: tuple[int, ...] = ()
    """Groups of earlier steps that are trained on again. Their first step decided their fate."""
    replayed_staleness: tuple[int, ...] = ()


class BatchDropped(StoredItem, frozen=True, kw_only=True, tag=True):
    """Uncommitted steps lost their batches and will get others. The groups of these batches are `evicted`."""

    policy: str
    steps: tuple[int, ...]
    reason: str


class VersionPublished(StoredItem, frozen=True, kw_only=True, tag=True):
    """A version became the newest one of its policy."""

    policy: str
    version: int
    step: int
    epoch: int


class StepCommitted(StoredItem, frozen=True, kw_only=True, tag=True):
    """A step was committed for the first time."""

    record: StepRecord


class StepRedone(StoredItem, frozen=True, kw_only=True, tag=True):
    """A step was committed again, after a restart of its trainer. This changes no fate."""

    policy: str
    step: int
    version: int


class EvalFinished(StoredItem, frozen=True, kw_only=True, tag=True):
    """An evaluation round ended."""

    record: EvalRecord


class RunEnded(StoredItem, frozen=True, kw_only=True, tag=True):
    """The run ended."""

    reason: str
    is_failure: bool


class RunResumed(StoredItem, frozen=True, kw_only=True, tag=True):
    """A failed run continues, or a finished one that got more steps. Uncommitted steps get other batches."""


class ScheduleChanged(StoredItem, frozen=True, kw_only=True, tag=True):
    """Another schedule is in force from now on."""

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


class LeaseView(StoredItem, frozen=True, kw_only=True):
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


class SampleView(StoredItem, frozen=True, kw_only=True):
    """A sample before the service layer adds the tokens."""

    group_id: int
    episode_idx: int
    task_id: str
    payload: PayloadRef
    advantages: tuple[tuple[int, int, float], ...]
    num_tokens: int
    zeroed_by: ZeroedBy = ""
    """As in `Sample`."""


class BatchView(StoredItem, frozen=True, kw_only=True):
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
    """The outcome of a command.

    The type of `answer` depends on the command: see `Core.apply`. `wakes` lists topics whose waiters should
    ask again: `leases`, `worker/ID`, `batch/POLICY`, `versions/POLICY`, `steps/POLICY`, `evals`, `run`.
    """

    answer: Any = None
    events: tuple[Event, ...] = ()
    wakes: tuple[str, ...] = ()

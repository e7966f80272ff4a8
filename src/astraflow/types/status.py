"""Items of a run as a whole: trainer sessions, publications, commits, status, records, control and errors."""
# size: one page of items, each with its fields

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from astraflow.types.bounds import (
    MAX_METRIC,
    MAX_SPANS,
    BatchFloat,
    BatchFloats,
    Count,
    Digest,
    ErrorText,
    JsonText,
    Label,
    Labels,
    LongText,
    MetricFloat,
    OpaqueId,
    ServiceName,
    SignedInt,
    TokenId,
    UnixSeconds,
    Version,
    Versions,
)
from astraflow.types.episodes import BusySpan, Fingerprints, Load, MetricItem, PushedTasks, Sampling
from astraflow.types.item import PROTOCOL_VERSION, Item, RunState
from astraflow.types.waits import Party, Wait
from astraflow.types.weights import Manifest

__all__ = [
    "Commit",
    "DropReply",
    "DropRequest",
    "ErrorReply",
    "EvalRecord",
    "EvalsReply",
    "FateCounts",
    "GroupOutcome",
    "Health",
    "ImageTokens",
    "PolicyInfo",
    "PolicyStatus",
    "Publication",
    "PublicationReply",
    "Release",
    "RunInfo",
    "SampleRules",
    "ScalingAdvice",
    "ScalingVerdict",
    "Session",
    "SessionRequest",
    "StatusReply",
    "StepFailure",
    "StepRecord",
    "StepsReply",
    "StopRequest",
    "StreamRule",
    "WorkerStatus",
]

# --- a trainer's session --------------------------------------------------------------------------


class StreamRule(Item, frozen=True, kw_only=True):
    """A stream that a trainer reads. Example: `StreamRule(name="teacher_logprobs", high=0.001)`."""

    name: Label
    dtype: Literal["int32", "float32", "uint8"] = "float32"
    width: Annotated[int, Meta(ge=1, le=8192)] = 1
    """Values per token."""
    low: MetricFloat = -MAX_METRIC
    high: MetricFloat = MAX_METRIC
    """Inclusive bounds of the entries of trained tokens."""
    is_needed: bool = True
    """False: a trajectory may lack the stream."""


class ImageTokens(Item, frozen=True, kw_only=True):
    """How many tokens stand for an image, and which one."""

    token_id: TokenId
    patch: Annotated[int, Meta(ge=1, le=4096)]
    """Pixels along the side of a patch."""
    merge: Annotated[int, Meta(ge=1, le=64)]
    """Patches along the side of the square that becomes one token."""
    min_pixels: Annotated[int, Meta(ge=1, le=2**40)]
    max_pixels: Annotated[int, Meta(ge=1, le=2**40)]


class SampleRules(Item, frozen=True, kw_only=True):
    """A trainer's requirements for trajectories. A result that breaks one is refused when it arrives.

    Example: `SampleRules(vocab_size=151936)`.
    """

    vocab_size: Count = 0
    """Token ids are below it; 0: any."""
    max_tokens: Count = 0
    """Largest number of tokens; 0: any."""
    images: ImageTokens | msgspec.UnsetType | None = msgspec.UNSET
    """None: the model reads text only. Without it, media of any kind are handed on."""
    streams: Annotated[tuple[StreamRule, ...], Meta(max_length=64)] = ()
    """A trajectory may have other streams too."""
    refused_streams: Annotated[tuple[Label, ...], Meta(max_length=64)] = ()
    """Streams that the trainer cannot use and must not ignore: `experts`, if it knows no routers."""


class SessionRequest(Item, frozen=True, kw_only=True):
    """A trainer attaches to its policy. `durable_step` is the number of steps in its checkpoint (0: none)."""

    trainer_id: OpaqueId
    durable_step: Count
    num_ranks: Count = 1
    """Nothing reads it: each request for a batch names its `world`. Version 1 of the protocol keeps it."""
    fingerprints: "Fingerprints"
    protocol: Count = PROTOCOL_VERSION
    rules: SampleRules | msgspec.UnsetType = msgspec.UNSET
    """Its requirements for trajectories. If missing, only the rules of all trainers are checked."""


class Session(Item, frozen=True, kw_only=True):
    """A trainer's session. `epoch` fences older sessions. The trainer publishes its weights as
    `next_version`, then takes `step`."""

    epoch: Count
    step: Count
    next_version: Count
    num_steps: Count
    """The run ends after this many steps."""


class Publication(Item, frozen=True, kw_only=True):
    """A trainer announces a version whose chunks are durable at its sources."""

    epoch: Count
    step: Count
    """Number of steps that these weights contain."""
    manifest: Manifest
    table: Digest = ""
    """The name of the policy's tensor table, from an earlier answer, instead of the manifest's `tensors`."""


class PublicationReply(Item, frozen=True, kw_only=True):
    """Versions of the policy that someone still needs; the publisher may delete the others."""

    needed: Versions
    table: Digest = ""
    """A name of the policy's tensor table, which later publications may send instead of the table."""


class Commit(Item, frozen=True, kw_only=True):
    """Step `step` is trained and its weights are published as `version`."""

    epoch: Count
    step: Count
    version: Version
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=4096)] = ()
    spans: Annotated[tuple[BusySpan, ...], Meta(max_length=MAX_SPANS)] = ()


class Release(Item, frozen=True, kw_only=True):
    """A checkpoint of the first `step` steps is durable: their batches need not be served again."""

    epoch: Count
    step: Count
    version: Version


# --- run, status and records ----------------------------------------------------------------------


class PolicyInfo(Item, frozen=True, kw_only=True):
    """What a joining service must know about a policy."""

    name: Label
    is_trained: bool
    sampling: Sampling
    max_lag: Count
    """How many versions an engine may be behind the newest one and still get leases."""
    follows: Label = ""
    """The policy whose versions this one serves; empty if it serves its own."""
    lag: Count = 0
    """How many versions it serves behind the newest one of the policy that it follows."""
    agent_overrides: Literal["refuse", "ignore"] = "refuse"
    """What happens to an agent's request for sampling that the policy can't follow."""
    template_args: JsonText = "{}"
    """Arguments of the model's chat template in every prompt, as a JSON object."""
    renderer: Literal["auto", "template", "library"] = "auto"
    """What renders the policy's conversations, as in its recipe."""
    date: Label = ""
    """Today's date for the model's chat template, `YYYY-MM-DD`: the day in UTC on which the run began. Empty:
    the day on which the process began."""


class RunInfo(Item, frozen=True, kw_only=True):
    """Answer to `GET /v1/run`: what a joining service needs in addition to URL and token."""

    name: Label
    run_id: OpaqueId
    """New for every run folder; a restart does not change it."""
    state: RunState
    policies: Annotated[tuple[PolicyInfo, ...], Meta(max_length=1024)]
    workflow: Label
    fingerprints: Fingerprints
    recipe: JsonText
    """The resolved recipe as JSON text, without secrets."""
    labels: Labels = {}
    protocol: Count = PROTOCOL_VERSION


class FateCounts(Item, frozen=True, kw_only=True):
    """The accounting identity of one policy: `drawn` equals the sum of all the others."""

    drawn: Count = 0
    trained: Count = 0
    filtered: Count = 0
    stale: Count = 0
    evicted: Count = 0
    failed: Count = 0
    unadmitted: Count = 0
    unused: Count = 0
    cancelled: Count = 0
    live: Count = 0


ScalingVerdict: TypeAlias = Literal[
    "none", "too_early", "unheard", "take_turns", "too_few", "has_grown", "too_many", "balanced"
]


class ScalingAdvice(Item, frozen=True, kw_only=True):
    """How many rollout services the run could use, judged by who waited for whom in the last minutes."""

    verdict: ScalingVerdict = "none"
    """`take_turns`: both sides wait, and a larger `max_staleness` lets them overlap; `has_grown`: the trainer
    waited, but the services that have joined since are enough; `unheard`: no advice while a part of the run
    is silent."""
    unheard: Annotated[tuple[Party, ...], Meta(max_length=65_536)] = ()
    """Trainers and services that have been silent for too long."""
    trainer_wait_frac: BatchFloats = {}
    """Policy -> share of its trainer's time without a batch; empty until enough time has passed."""
    rollout_wait_frac: BatchFloat = 0.0
    """Share of slots that were empty because a trainer had to take a batch first."""
    num_services: Count = 0
    missing_services: SignedInt = 0
    """Services that the run could use beyond those it has; negative: it has too many."""
    needed_services: BatchFloat = 0.0
    """Services that generate a batch in the time in which one is trained, by the last steps; 0: not known."""
    needed_per_hour: BatchFloat = 0.0
    """How many more of them are needed each hour; negative: fewer."""
    overlap: BatchFloat = 0.0
    """How well trainer and services work at the same time, as an exponent; 0: not known."""


class GroupOutcome(Item, frozen=True, kw_only=True):
    """How many groups of a policy ended in one way. Example: `GroupOutcome(fate="filtered",
    by="zero_variance", num=12)`."""

    fate: Literal["ready", "filtered", "failed", "unused"]
    """`ready`: complete, and good to train on."""
    by: Label = ""
    """The filter that dropped the groups."""
    num: Count


class WorkerStatus(Item, frozen=True, kw_only=True, gc=False):
    """One rollout service as the dataflow sees it."""

    id: OpaqueId
    name: ServiceName
    engine: Label
    hosts: Annotated[tuple[Label, ...], Meta(max_length=1024)]
    num_leases: Count
    load: Load
    last_seen_s: UnixSeconds
    is_draining: bool = False
    is_set_aside: bool = False
    """True if the service failed too often in a row. It gets a single lease from time to time, until one
    succeeds."""
    failed_in_a_row: Count = 0
    """Failures since the last good episode. Leases that ran together and failed together count once."""
    last_failure: ErrorText = ""
    """Error class and message of the latest failure."""


class PolicyStatus(Item, frozen=True, kw_only=True):
    """One policy as the dataflow sees it."""

    name: Label
    step: Count
    """Committed steps."""
    num_steps: Count
    newest_version: Version
    durable_step: Count
    epoch: Count
    num_tickets: Count
    """Tickets in use now."""
    max_tickets: Count
    num_running_groups: Count
    num_ready_groups: Count
    groups_per_batch: Count
    """Fresh groups that make up the next batch."""
    staleness_bound: SignedInt
    redone_steps: Count
    fates: FateCounts
    num_replayed_groups: Count = 0
    """Replayed groups in batches, in addition to the fresh ones. They are not part of the fates."""
    trainer_request: Label = ""
    """Name of the newest request of its trainer; empty before the first since the dataflow started."""
    trainer_seen_s: UnixSeconds = 0.0
    """When it was answered (now, if it still waits; 0 before the first). A training trainer sends none."""
    outcomes: Annotated[tuple[GroupOutcome, ...], Meta(max_length=1024)] = ()
    """How groups ended since the last batch was taken."""
    num_episodes: Count = 0
    """Good training episodes since the last commit."""
    score_mean: BatchFloat = 0.0
    """Mean of their scores; 0 without one."""
    unread_calls_frac: BatchFloat = 0.0
    """Share of their turns that look like a tool call, but from which none was read."""


class StatusReply(Item, frozen=True, kw_only=True):
    """Answer to `GET /v1/status`."""

    name: Label
    state: RunState
    reason: LongText
    """Why the run ended, with the last failure if that ended it. It may contain a whole `ErrorText`."""
    now_s: UnixSeconds
    policies: Annotated[tuple[PolicyStatus, ...], Meta(max_length=1024)]
    workers: Annotated[tuple[WorkerStatus, ...], Meta(max_length=65_536)]
    waits: Annotated[tuple[Wait, ...], Meta(max_length=65_536)]
    curation: Annotated[tuple[MetricItem, ...], Meta(max_length=4096)] = ()
    """Tasks selected and skipped since the start, by curator and reason; empty for a plain order."""
    pushed: PushedTasks = PushedTasks()
    scaling: ScalingAdvice = ScalingAdvice()


class StepRecord(Item, frozen=True, kw_only=True):
    """One committed step, as the live screen, `metrics.jsonl` and `run.steps()` show it."""

    policy: Label
    step: Count
    """How many steps of the policy came before."""
    version: Version
    at_s: UnixSeconds
    reward_mean: BatchFloat
    """Mean over episodes and roles, however many samples each of them has."""
    staleness_mean: BatchFloat
    staleness_max: SignedInt
    num_groups: Count
    num_samples: Count
    num_trained_tokens: Count
    num_discarded_groups: Count
    """Groups of this policy that got another fate than trained since the previous step."""
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=8192)]
    num_replayed_groups: Count = 0
    """How many of `num_groups` an earlier step had trained on. `reward_mean` leaves them out."""

    @property
    def number(self) -> int:
        """The number of the step as people count, from 1. `step` is the number of steps before it."""
        return self.step + 1

    @property
    def num_gradient_tokens(self) -> int | None:
        """How many of `num_trained_tokens` had a gradient, by the trainer's metric; None if it has none."""
        return next((int(item.value) for item in self.metrics if item.name == "num_gradient_tokens"), None)


class EvalRecord(Item, frozen=True, kw_only=True):
    """One finished evaluation round of one set at pinned versions."""

    policy: Label
    version: Version
    step: Count
    eval_set: Label
    num_tasks: Count
    num_samples: Count
    """Episodes with a score."""
    num_failed: Count
    """Episodes without a score: they failed, or the deadline passed."""
    score_mean: BatchFloat | None
    """Mean over tasks of the mean over samples; pass@1 if scores are 0 or 1. None if there is no score."""
    score_stderr: BatchFloat
    at_s: UnixSeconds
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=8192)] = ()
    best_by: ErrorText = ""
    """The rule by which this is the best version of its policy so far, e.g. `max heldout`; empty if it is
    not, or if the run keeps no best version."""


class StepsReply(Item, frozen=True, kw_only=True):
    """Committed steps of a policy after the given one, oldest first."""

    steps: Annotated[tuple[StepRecord, ...], Meta(max_length=2**24)]
    state: RunState


class EvalsReply(Item, frozen=True, kw_only=True):
    """Finished evaluation rounds without the first `after` of them; `num_evals` is the next `after`."""

    evals: Annotated[tuple[EvalRecord, ...], Meta(max_length=2**24)]
    num_evals: Count
    state: RunState


# --- control, health, errors ------------------------------------------------------------------------


class StepFailure(Item, frozen=True, kw_only=True):
    """A trainer could not train on a batch, and ends. Example: `StepFailure(step=7, epoch=3,
    reason="OOM")`."""

    step: Count
    epoch: Count
    reason: ErrorText


class DropRequest(Item, frozen=True, kw_only=True):
    """A person drops the batch of the oldest uncommitted step of a policy.

    Example: `DropRequest(step=7, epoch=3, reason="out of memory")` after the status said `step` 7, `epoch` 3.
    """

    step: Count
    epoch: Count
    """The policy's newest session, as the status shows it. It makes a repeated request fail as fenced."""
    reason: ErrorText = ""


class DropReply(Item, frozen=True, kw_only=True):
    """What was dropped. The steps get other batches after the policy's trainer has attached again."""

    steps: Annotated[tuple[Count, ...], Meta(max_length=65_536)]
    """The step of the request, and later ones whose batches were already taken."""
    num_groups: Count
    """Number of groups of these steps; their fate is now `evicted`."""


class StopRequest(Item, frozen=True, kw_only=True):
    """Ends the run early. Live groups are cancelled."""

    reason: ErrorText
    is_failure: bool = False


class Health(Item, frozen=True, kw_only=True):
    """Answer to `GET /v1/health`: the service works and can write its journal."""

    state: RunState
    num_records: Count
    """Records in the journal."""


class ErrorReply(Item, frozen=True, kw_only=True):
    """Body of every answer with a status of 400 or more."""

    code: Label
    message: ErrorText

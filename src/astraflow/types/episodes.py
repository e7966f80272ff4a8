"""Items of tasks and episodes: what a rollout service leases, plays and reports, and what a trainer takes.

Token columns are little-endian bytes: `int32` ids, `uint8` masks, `float32` logprobs; `wire.column` and
`wire.array` convert them.

Shape letters: T tokens of one trajectory, K turns, G episodes of a group, B samples of a batch.
The path of one item: Task -> Lease -> Episode of Trajectory -> Group -> Sample -> Batch.
"""
# size: one page of items, each with its fields

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from astraflow.types.bounds import (
    MAX_SPANS,
    MAX_TOKENS,
    Advantage,
    BatchFloat,
    Blob,
    Bytes,
    Count,
    Digest,
    Digests,
    ErrorText,
    JsonText,
    Label,
    Labels,
    LeaseId,
    LeaseIds,
    Logprob,
    LongText,
    MetricFloat,
    OpaqueId,
    PeerUrl,
    Position,
    Reward,
    Seconds,
    ServiceName,
    SignedInt,
    Slots,
    StopText,
    Temperature,
    TokenId,
    TopP,
    UncheckedLabel,
    UnixSeconds,
    Version,
    as_text,
)
from astraflow.types.item import (
    PROTOCOL_VERSION,
    FinishReason,
    Item,
    LeaseKind,
    Reduction,
    RunState,
    ZeroedBy,
)
from astraflow.types.waits import WaitReason, WaitReasons

__all__ = [
    "HANDED_IN",
    "AdvantageSpan",
    "Batch",
    "BatchReply",
    "BatchTotals",
    "BusySpan",
    "EarlierProgress",
    "Episode",
    "EpisodeReceipt",
    "EpisodeResult",
    "EpisodeResults",
    "Failure",
    "Fingerprints",
    "GenerateRequest",
    "Generation",
    "Heartbeat",
    "HeartbeatReply",
    "Lease",
    "LeaseReply",
    "LeaseRequest",
    "Load",
    "Media",
    "MediaRef",
    "Message",
    "MetricItem",
    "PastCompletion",
    "Progress",
    "ProgressReply",
    "ProgressReport",
    "ProgressTotals",
    "PushTasks",
    "PushTasksReply",
    "PushedTasks",
    "Receipts",
    "RegisterWorker",
    "Registration",
    "Sample",
    "Sampling",
    "ServedVersions",
    "Stream",
    "Task",
    "ToolSpec",
    "Trajectory",
    "Turn",
    "VersionSpan",
    "WeightTransfer",
    "lease_kind",
]

# --- tasks and episodes ---------------------------------------------------------------------------


class MediaRef(Item, frozen=True, kw_only=True):
    """An image or another medium, and its position.

    Kind `image`: `uri` is the file itself, as `data:image/png;base64,...` or `data:image/jpeg;base64,...`. An
    image travels with the item that shows it, and nothing is ever fetched. The dataflow checks the position.
    Other kinds are handed on unread.
    """

    kind: Label
    uri: LongText
    start: Position
    """In a text: the character that follows it. Among tokens: the first one that represents it."""


Media = Annotated[tuple[MediaRef, ...], Meta(max_length=4096)]


class Message(Item, frozen=True, kw_only=True):
    """One chat message. Example: `Message(role="user", content="Calculate 2 + 3.")`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: LongText
    name: Label = ""
    media: Media | msgspec.UnsetType = msgspec.UNSET
    """Images in the content, in order. Left out if there are none, as older readers don't know the field."""

    def __post_init__(self) -> None:
        # Texts of tools, environments and agents come from anywhere.
        if isinstance(self.content, str) and not self.content.isascii():  # pyright: ignore[reportUnnecessaryIsInstance] - a user's code
            msgspec.structs.force_setattr(self, "content", as_text(self.content))

    @property
    def images(self) -> Media:
        """The images in the content."""
        return self.media or ()


class ToolSpec(Item, frozen=True, kw_only=True):
    """A function that a model may call, as its chat template shows it.

    Example: `ToolSpec(name="add", description="Adds.", parameters='{"type": "object", "properties": {}}')`.
    """

    name: Label
    description: LongText
    parameters: JsonText
    """JSON schema of the arguments (an object), as JSON text."""


class Task(Item, frozen=True, kw_only=True):
    """One problem and what is needed to score it.

    Example: `Task(id="heldout/7", source="heldout", prompt="Calculate 2 + 3.", answer="5")`.
    """

    id: OpaqueId
    """Stable across draws and restarts: the same problem has the same id."""
    source: Label
    """Name of the task source in the recipe."""
    prompt: LongText
    answer: LongText = ""
    context: Annotated[tuple[Message, ...], Meta(max_length=4096)] = ()
    """Messages before the prompt (a system message, few-shot examples, an image)."""
    spec: JsonText = ""
    """JSON text for the source's own scorer; nothing else reads it."""


class Sampling(Item, frozen=True, kw_only=True):
    """How one completion is sampled. Example: `Sampling(temperature=1.0, max_tokens=64, seed=7)`."""

    temperature: Temperature = 1.0
    """0 is greedy."""
    top_p: TopP = 1.0
    top_k: Count = 0
    """0 keeps the whole vocabulary."""
    max_tokens: Position = 256
    stop: Annotated[tuple[StopText, ...], Meta(max_length=64)] = ()
    """Texts that end the completion. The stop text stays in the tokens."""
    seed: Count = 0
    """The same request, seed and weights give the same tokens, whatever else is in the running batch."""


class GenerateRequest(Item, frozen=True, kw_only=True):
    """A request for one completion. The prompt is token ids, which are never tokenized again."""

    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
    sampling: Sampling
    version: Version = -1
    """The version to generate with. -1 means the newest loaded one, following updates during generation."""
    media: Media = ()
    """Images that tokens of the prompt represent, in order."""
    num_begun: Count = 0
    """Tokens at the end of the prompt that begin this completion: an earlier request sampled them."""


class Stream(Item, frozen=True, kw_only=True):
    """An additional per-token column, identified by name from the producer to the loss, e.g. a teacher's
    logprobs.

    Example, for two tokens: `Stream(name="teacher", dtype="float32", data=column([-0.7, -0.1], "float32"))`.
    """

    name: Label
    dtype: Literal["int32", "float32", "uint8"]
    data: Blob
    """One entry per token of the item that carries the stream, of `width` values each; floats are finite."""
    width: Annotated[int, Meta(ge=1, le=8192)] = 1
    """Values per token: more than one for the experts that all layers chose, for instance."""


class Generation(Item, frozen=True, kw_only=True):
    """One completion as tokens. All columns have one entry per generated token."""

    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
    logprobs: Annotated[tuple[Logprob, ...], Meta(max_length=MAX_TOKENS)]
    """In nats: from a full forward pass under `versions[i]`, at the sampling temperature, over the whole
    vocabulary."""
    versions: Annotated[tuple[Version, ...], Meta(max_length=MAX_TOKENS)]
    finish_reason: FinishReason
    streams: Annotated[tuple[Stream, ...], Meta(max_length=64)] = ()
    """The engine's own columns, with one entry per generated token. The loss gets them by name."""


class VersionSpan(Item, frozen=True, array_like=True):
    """Sampled tokens `[start, start + length)` that were made by one version of the policy."""

    start: Position
    length: Position
    version: Version


class Turn(Item, frozen=True, kw_only=True):
    """One completion of a trajectory: the sampled tokens `[start, end)`, and their reward."""

    start: Position
    end: Position
    reward: Reward = 0.0
    state_key: LongText = ""
    """Equal keys mean that the policy was shown the same state; empty: unknown."""


class Trajectory(Item, frozen=True, kw_only=True):
    """One token sequence of one policy in an episode.

    Example, three prompt tokens and two sampled ones::

        Trajectory(policy="actor", role="actor", token_ids=column([5, 6, 7, 8, 2], "int32"),
                   mask=column([0, 0, 0, 1, 1], "uint8"),
                   behavior_logprobs=column([0, 0, 0, -0.7, -0.1], "float32"),
                   versions=(VersionSpan(start=3, length=2, version=4),), temperature=1.0,
                   finish_reason="stop", turns=(Turn(start=3, end=5, reward=1.0),), reward=1.0)
    """

    policy: UncheckedLabel
    role: UncheckedLabel
    token_ids: Blob
    """int32 [T]."""
    mask: Blob
    """uint8 [T], 1 where the policy sampled the token and it is trained here."""
    behavior_logprobs: Blob
    """float32 [T], in nats; 0 where `mask` is 0."""
    versions: Annotated[tuple[VersionSpan, ...], Meta(max_length=8192)]
    """Cover exactly the tokens whose mask is 1, in order."""
    temperature: Temperature
    finish_reason: FinishReason
    turns: Annotated[tuple[Turn, ...], Meta(max_length=4096)]
    reward: Reward
    is_fork: bool = False
    """True if the trajectory began when a history was edited or cut. The prefix that it shares with another
    trajectory has mask 0."""
    streams: Annotated[tuple[Stream, ...], Meta(max_length=64)] = ()
    """Further columns [T]. The loss reads the entries where `mask` is 1; the recorder writes 0 elsewhere."""
    media: Media = ()
    """Images that tokens of the context represent, in order. These tokens are not trained."""


class MetricItem(Item, frozen=True, array_like=True):
    """A measured number, and how several of them are combined into one."""

    name: UncheckedLabel
    value: MetricFloat
    reduction: Reduction = "mean"


class Episode(Item, frozen=True, kw_only=True, tag="episode"):
    """One run of a workflow on a task: trajectories of policies, metrics, and messages for people to read."""

    trajectories: Annotated[tuple[Trajectory, ...], Meta(max_length=512)]
    score: Reward
    """The task's score of the episode, which evaluation reports (0 to 1 for a pass rate)."""
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=1024)] = ()
    messages: Annotated[tuple[Message, ...], Meta(max_length=16_384)] = ()
    started_s: UnixSeconds = 0.0
    duration_s: Seconds = 0.0


HANDED_IN = "handed_in"
"""Error class of an attempt that its service gives back. The next one continues it; neither counts more."""


class Failure(Item, frozen=True, kw_only=True, tag="failure"):
    """Why an episode has no result. A failure is retried or counted, and never becomes a reward of 0."""

    error_class: Label
    message: ErrorText
    is_retryable: bool = True
    place: Label = ""
    """Line of code that raised the error, e.g. `my_rewards:12`; failures of one class and place are counted
    together."""

    @property
    def is_handed_in(self) -> bool:
        """Whether nothing went wrong: the service gave the lease back (`HANDED_IN`)."""
        return self.error_class == HANDED_IN


# --- a rollout service: registration, leases, results ----------------------------------------------


class ServedVersions(Item, frozen=True, kw_only=True, gc=False):
    """The versions of one policy that a service can generate with now, newest last."""

    policy: Label
    versions: Annotated[tuple[Version, ...], Meta(max_length=1024)]


class Lease(Item, frozen=True, kw_only=True):
    """The right to run one episode until its heartbeats stop.

    Example: `Lease(id="17.3.0", kind="train", group_id=17, episode_idx=3, attempt=0, task=task, seed=99)`.
    """

    id: LeaseId
    kind: LeaseKind
    group_id: Count
    episode_idx: Count
    attempt: Count
    task: Task
    seed: Count
    """The sampling seeds of the episode are derived from this one."""
    pinned: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)] = ()
    """For kind `eval`: exactly one version per policy; the engines must generate with these."""
    eval_set: Label = ""


def lease_kind(lease_id: str) -> LeaseKind:
    """`GROUP.EPISODE.ATTEMPT` is a training lease, `eROUND.EPISODE.ATTEMPT` one of evaluation."""
    return "eval" if lease_id.startswith("e") else "train"


class RegisterWorker(Item, frozen=True, kw_only=True):
    """The request of a rollout service to join."""

    name: ServiceName
    hosts: Annotated[tuple[Label, ...], Meta(max_length=1024)]
    """Policies that the service can generate with."""
    engine: Label
    num_slots: Slots
    """Episodes that the service can run at once."""
    labels: Labels = {}
    peer_url: PeerUrl = ""
    """Where other services may fetch the chunks of this one (`http://host:port`); empty: nowhere."""
    fingerprints: "Fingerprints"
    protocol: Count = PROTOCOL_VERSION


class Fingerprints(Item, frozen=True, kw_only=True):
    """Hex digests that must agree between services; an empty one is not compared."""

    recipe: Digest = ""
    code: Digest = ""
    models: Digests = {}
    """Policy -> digest of its architecture, from its config.json."""
    tokenizers: Digests = {}


class Registration(Item, frozen=True, kw_only=True):
    """The answer to a joining service."""

    worker_id: OpaqueId
    heartbeat_s: Seconds
    lease_timeout_s: Seconds
    """A lease without heartbeats for this long is issued again."""


class BusySpan(Item, frozen=True, array_like=True):
    """A span of wall-clock time in which something ran. `kind` is `generate`, `load` (of a version), `train`,
    `publish` or `wait:WHOM`."""

    kind: Label
    start_s: UnixSeconds
    end_s: UnixSeconds


class WeightTransfer(Item, frozen=True, kw_only=True):
    """A version that a rollout service is fetching, or failed to fetch and will try again.

    Durations, not times: the clocks of two machines may differ.
    """

    policy: Label
    version: Version
    num_bytes: Bytes
    """Bytes to fetch."""
    arrived_bytes: Bytes = 0
    age_s: Seconds = 0.0
    """Since it was first tried."""
    quiet_s: Seconds = 0.0
    """Since a byte arrived."""
    problem: Label = ""
    """Why the latest try failed; empty if none has."""


class Load(Item, frozen=True, kw_only=True, gc=False):
    """What a rollout service is doing now."""

    num_running: Count = 0
    num_slots: Slots = 0
    """Episodes that the service can run at once, given what its engines hold; 0: not reported."""
    max_slots: Slots = 0
    """Largest `num_slots` by its configuration; 0: not reported."""
    num_waiting: Count = 0
    generated_tokens: Count = 0
    """Tokens since the service started; never falls."""
    tokens_per_s: MetricFloat = 0.0
    versions: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)] = ()
    waits_for: Annotated[tuple[WaitReason, ...], Meta(max_length=16)] = ()
    """What keeps the service from generating; empty if nothing does."""
    spans: Annotated[tuple[BusySpan, ...], Meta(max_length=MAX_SPANS)] = ()
    """Spans since the last heartbeat."""
    transfers: Annotated[tuple[WeightTransfer, ...], Meta(max_length=1024)] = ()
    """Versions on their way here."""
    num_scoring: Count = 0
    """Calls of the reward that run or wait."""
    scoring_s: Seconds = 0.0
    """For how long the oldest of them has run or waited."""
    num_late_scores: Count = 0
    """Scores that came too late since the service started; never falls."""
    num_scorer_errors: Count = 0
    """Calls in which a built-in scorer failed since the service started; never falls."""


class Heartbeat(Item, frozen=True, kw_only=True):
    """Extends the leases that the service still works on."""

    lease_ids: LeaseIds
    load: Load
    peer_url: PeerUrl = ""
    """As in `RegisterWorker`, so that a restarted dataflow learns it again."""


class HeartbeatReply(Item, frozen=True, kw_only=True):
    """The answer to a heartbeat. `revoked` leases have expired, or another attempt won; don't finish them."""

    revoked: LeaseIds
    state: RunState
    is_draining: bool = False


class LeaseRequest(Item, frozen=True, kw_only=True):
    """Asks for up to `num_free` leases, and waits up to `wait_s` if there is none."""

    worker_id: OpaqueId
    num_free: Slots
    served: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)]
    wait_s: Seconds = 25.0
    held: LeaseIds | None = None
    """All leases that the service holds. Other leases that were granted to it were lost on the way, and are
    issued again at once instead of after `lease_timeout_s`. None if the service doesn't say."""


class LeaseReply(Item, frozen=True, kw_only=True):
    """Leases; if there are none, the run's state and the reason."""

    leases: Annotated[tuple[Lease, ...], Meta(max_length=65_536)]
    state: RunState
    waits_for: WaitReasons = ()


class EpisodeResult(Item, frozen=True, kw_only=True):
    """The result of one lease: an episode, or why there is none. Sending it again counts once."""

    lease_id: LeaseId
    outcome: Episode | Failure


class EpisodeResults(Item, frozen=True, kw_only=True):
    """Several results in one request."""

    worker_id: OpaqueId
    results: Annotated[tuple[EpisodeResult, ...], Meta(max_length=4096)]


class EpisodeReceipt(Item, frozen=True, kw_only=True):
    """What happened to a result: `accepted` (durable), `dropped` (late or repeated), or `invalid`."""

    lease_id: LeaseId
    status: Literal["accepted", "dropped", "invalid"]
    reason: ErrorText = ""


class Receipts(Item, frozen=True, kw_only=True):
    """One receipt per result, in the same order."""

    receipts: Annotated[tuple[EpisodeReceipt, ...], Meta(max_length=4096)]


class PastCompletion(Item, frozen=True, kw_only=True):
    """A complete completion of an unfinished episode.

    If the lease is lost, the next attempt reuses it for the same request instead of sampling again.

    """

    policy: UncheckedLabel
    request: Digest
    """Identifies the request. The sampling service chooses it so that equal digests mean equal requests: the
    same prompt tokens, sampling parameters and seed."""
    token_ids: Blob
    """int32 [T]: the sampled tokens."""
    logprobs: Blob
    """float32 [T], in nats; as `Trajectory.behavior_logprobs`."""
    versions: Annotated[tuple[VersionSpan, ...], Meta(max_length=8192)]
    """Cover all T tokens, in order."""
    finish_reason: FinishReason
    streams: Annotated[tuple[Stream, ...], Meta(max_length=64)] = ()
    """The engine's own columns, with entries for the T tokens."""


class Progress(Item, frozen=True, kw_only=True):
    """Completions of one running episode that were not reported before.

    Example: `Progress(lease_id="17.3.0", num_before=2, completions=(third,))`.
    """

    lease_id: LeaseId
    num_before: Count
    """Completions that the dataflow already has, including those of earlier attempts. 0 replaces them all."""
    completions: Annotated[tuple[PastCompletion, ...], Meta(max_length=4096)]


class ProgressReport(Item, frozen=True, kw_only=True):
    """Progress of running episodes, so that they can continue elsewhere if their service is lost."""

    parts: Annotated[tuple[Progress, ...], Meta(max_length=65_536)]


class ProgressReply(Item, frozen=True, kw_only=True):
    """The leases whose parts of a report were not kept; all others were."""

    missing: LeaseIds = ()
    """The dataflow lacks the `num_before` completions (it restarted, say). Report the whole episode again."""
    refused: LeaseIds = ()
    """Nothing more is kept, because the sender does not hold the lease, a completion violates a rule, or
    there is no room. Stop reporting the episode."""


class EarlierProgress(Item, frozen=True, kw_only=True):
    """The completions of earlier attempts at an episode; empty if none are known."""

    completions: Annotated[tuple[PastCompletion, ...], Meta(max_length=4096)] = ()


class ProgressTotals(Item, frozen=True, kw_only=True):
    """Totals of the completions kept for unfinished episodes, and of their reuse since the dataflow
    started."""

    num_episodes: Count = 0
    """Number of unfinished episodes with reported completions."""
    num_bytes: Count = 0
    """Memory that these completions take."""
    num_resumed_tokens: Count = 0
    """Tokens of lost attempts that accepted episodes reuse."""
    num_resampled_tokens: Count = 0
    """Reported tokens of lost attempts that matched no request of the next attempt and were sampled again."""


class PushTasks(Item, frozen=True, kw_only=True):
    """Tasks from outside or from a workflow, which are drawn before those of the sources."""

    tasks: Annotated[tuple[Task, ...], Meta(max_length=10_000)]


class PushTasksReply(Item, frozen=True, kw_only=True):
    """How many tasks were accepted, how many had a known id, and how many exceeded the run's limits."""

    num_accepted: Count
    num_known: Count
    num_refused: Count = 0


class PushedTasks(Item, frozen=True, kw_only=True):
    """Totals of the tasks that were pushed into the run."""

    num_accepted: Count = 0
    num_waiting: Count = 0
    """Accepted tasks that are not drawn yet."""
    num_known: Count = 0
    """Tasks that had already been pushed."""
    num_refused: Count = 0
    """Tasks beyond `dataflow.max_pushed` or `dataflow.max_waiting_pushed`."""


# --- batches --------------------------------------------------------------------------------------


class AdvantageSpan(Item, frozen=True, array_like=True):
    """The advantage of the trained tokens within `[start, end)`."""

    start: Position
    end: Position
    value: Advantage


# `omit_defaults`: only trainers that ask for `zeroed_by` get it, since others may refuse unknown fields.
class Sample(Item, frozen=True, kw_only=True, omit_defaults=True):
    """A training sequence: a trajectory with its advantages."""

    group_id: Count
    episode_idx: Count
    task_id: OpaqueId
    trajectory: Trajectory
    advantages: Annotated[tuple[AdvantageSpan, ...], Meta(max_length=4096)]
    """Cover every token whose mask is 1."""
    zeroed_by: ZeroedBy = ""
    """The part of the table that set the advantages to 0, where they stay, so that the sample isn't trained:
    a `filter` masked it, or `credit` had nothing to compare it with. A loss that needs no advantages trains
    the latter. Empty for all other samples."""


class BatchTotals(Item, frozen=True, kw_only=True):
    """Sums over the whole batch (all ranks), so that each rank divides by the same numbers."""

    num_groups: Count
    num_samples: Count
    num_tokens: Count
    num_trained_tokens: Count
    advantage_sum: BatchFloat
    """Over trained tokens."""
    advantage_square_sum: BatchFloat
    reward_sum: BatchFloat
    """Over samples."""


class Batch(Item, frozen=True, kw_only=True):
    """One rank's slice of the samples between two versions of a policy. The bytes for a step never change."""

    policy: Label
    step: Count
    rank: Count
    world: Count
    trainer_version: Version
    """Version of the weights to which this step's first gradient is applied."""
    samples: Annotated[tuple[Sample, ...], Meta(max_length=2**24)]
    totals: BatchTotals
    staleness_mean: BatchFloat
    """Over groups."""
    staleness_max: SignedInt
    is_redo: bool = False


class BatchReply(Item, frozen=True, kw_only=True):
    """One rank's slice of a step, or the run's state and what the step waits for. In that case, ask again."""

    batch: Batch | None
    """With `page` in the request, only the samples of that page; all other fields cover the whole slice."""
    state: RunState
    waits_for: WaitReasons = ()
    num_pages: Annotated[int, Meta(ge=1, le=2**20)] = 1
    """Number of pages of the slice, if the request names one."""

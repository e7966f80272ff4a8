"""Every item that crosses a boundary, on one page.

Items are frozen msgspec structs. They are fast, they are tagged where a field may hold several kinds, and
they are checked when decoded (`wire.decode`), not when constructed. Every field has a bound: a type of
`bounds.py`, which gives the reason, or the length of a list. Token columns are little-endian bytes: `int32`
ids, `uint8` masks, `float32` logprobs; `wire.column` and `wire.array` convert them. Names ending in `_s` are
seconds, or Unix time where the type is `UnixSeconds`.

Shape letters: T tokens of one trajectory, K turns, G episodes of a group, B samples of a batch.
The path of one item: Task -> Lease -> Episode of Trajectory -> Group -> Sample -> Batch.
"""
# size: the one page of all items; splitting it would hide the path of an item

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from astraflow.bounds import (
    MAX_CHUNKS,
    MAX_METRIC,
    MAX_SPANS,
    MAX_TENSORS,
    MAX_TOKENS,
    Advantage,
    Blob,
    Bytes,
    Count,
    Digest,
    Digests,
    Figure,
    Figures,
    Id,
    JsonText,
    Label,
    Labels,
    LeaseId,
    LeaseIds,
    Logprob,
    Measure,
    Nickname,
    Number,
    Path,
    PeerUrl,
    Position,
    Reason,
    Reward,
    Seconds,
    Slots,
    StopText,
    Temperature,
    TensorName,
    Text,
    TokenId,
    TopP,
    UnixSeconds,
    Url,
    Version,
    Versions,
    Word,
)

__all__ = [
    "PERCENTILES",
    "PROTOCOL_VERSION",
    "RESAMPLED_TOKENS",
    "RESUMED_TOKENS",
    "AdvantageSpan",
    "Batch",
    "BatchReply",
    "BatchTotals",
    "BusySpan",
    "Chunk",
    "ChunkState",
    "Commit",
    "DeltaFile",
    "DropReply",
    "DropRequest",
    "EarlierProgress",
    "Episode",
    "EpisodeReceipt",
    "EpisodeResult",
    "EpisodeResults",
    "ErrorReply",
    "EvalRecord",
    "EvalsReply",
    "Failure",
    "Fate",
    "FateCounts",
    "FileInfo",
    "Fingerprints",
    "FinishReason",
    "Forget",
    "GenerateRequest",
    "Generation",
    "HandOver",
    "Health",
    "Heartbeat",
    "HeartbeatReply",
    "ImageTokens",
    "Item",
    "Lease",
    "LeaseKind",
    "LeaseReply",
    "LeaseRequest",
    "Load",
    "Manifest",
    "Media",
    "MediaRef",
    "Message",
    "MetricItem",
    "PastCompletion",
    "PolicyInfo",
    "PolicyStatus",
    "Progress",
    "ProgressReply",
    "ProgressReport",
    "ProgressTotals",
    "Publication",
    "PublicationReply",
    "PublisherHealth",
    "PushTasks",
    "PushTasksReply",
    "PushedTasks",
    "Receipts",
    "Reduction",
    "RegisterWorker",
    "Registration",
    "Release",
    "RunInfo",
    "RunState",
    "Sample",
    "SampleRules",
    "Sampling",
    "ScalingAdvice",
    "ServedVersions",
    "Session",
    "SessionRequest",
    "Shortcut",
    "SourceLink",
    "StatusReply",
    "StepFailure",
    "StepRecord",
    "StepsReply",
    "StopRequest",
    "Stream",
    "StreamRule",
    "Task",
    "TensorInfo",
    "ToolSpec",
    "Trajectory",
    "Turn",
    "VersionSpan",
    "VersionsReply",
    "Wait",
    "WeightTransfer",
    "WorkerStatus",
]  # fmt: skip

PROTOCOL_VERSION = 1
"""Version of these items on the wire. A peer with another version is refused with a clear message."""

LeaseKind = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]
Reduction = Literal["mean", "sum", "max", "min", "last", "p50", "p95"]
PERCENTILES: Mapping[Reduction, float] = {"p50": 0.5, "p95": 0.95}
"""The reductions that are percentiles, with the share of values that they are not below."""
RESUMED_TOKENS = "resumed_tokens"
"""Metric of an episode that another attempt had begun: tokens of that attempt which it contains."""
RESAMPLED_TOKENS = "resampled_tokens"
"""Metric of such an episode: tokens of the earlier attempt that fit none of its requests, and were sampled
anew."""
RunState = Literal["running", "draining", "finished", "failed"]
Fate = Literal["trained", "filtered", "stale", "evicted", "failed", "unadmitted", "unused", "cancelled"]


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Base of all items. They are frozen, and decoding refuses unknown fields."""


# --- tasks and episodes ---------------------------------------------------------------------------


class MediaRef(Item, frozen=True, kw_only=True):
    """An image, or another medium, and where it stands.

    Kind `image`: `uri` is the file itself, as `data:image/png;base64,...` or `data:image/jpeg;base64,...`. An
    image travels with the item that shows it, as every column of a trajectory does, and nothing is ever
    fetched. The dataflow checks the place and hands other kinds on to substitutes of both sides.
    """

    kind: Label
    uri: Text
    start: Position
    """In a text: the character before which it stands. Among tokens: the first of those that stand for it."""


Media = Annotated[tuple[MediaRef, ...], Meta(max_length=4096)]


class Message(Item, frozen=True, kw_only=True):
    """One chat message. Example: `Message(role="user", content="Calculate 2 + 3.")`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text
    name: Label = ""
    media: Media | msgspec.UnsetType = msgspec.UNSET
    """Images in the content, in the order of their places in it. Not sent where there are none: older readers
    do not know the field."""

    @property
    def images(self) -> Media:
        """The images in the content."""
        return self.media or ()


class ToolSpec(Item, frozen=True, kw_only=True):
    """A function that a model may call, as its chat template shows it.

    Example: `ToolSpec(name="add", description="Adds.", parameters='{"type": "object", "properties": {}}')`.
    """

    name: Label
    description: Text
    parameters: JsonText
    """JSON schema of the arguments (an object), as JSON text."""


class Task(Item, frozen=True, kw_only=True):
    """One problem and what is needed to score it.

    Example: `Task(id="heldout/7", source="heldout", prompt="Calculate 2 + 3.", answer="5")`.
    """

    id: Id
    """Stable across draws and restarts: the same problem has the same id."""
    source: Label
    """Name of the task source in the recipe."""
    prompt: Text
    answer: Text = ""
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
    """Images that tokens of the prompt stand for, in their order."""


class Stream(Item, frozen=True, kw_only=True):
    """A further per-token column, known by name from the producer to the loss, e.g. a teacher's logprobs.

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
    """Columns of the engine's own, one entry per generated token; the loss gets them by name."""


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
    state_key: Text = ""
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

    policy: Word
    role: Word
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
    """Images that tokens of the context stand for, in their order; none of these tokens is trained."""


class MetricItem(Item, frozen=True, array_like=True):
    """A measured number, and how several of them are combined into one."""

    name: Word
    value: Measure
    reduction: Reduction = "mean"


class Episode(Item, frozen=True, kw_only=True, tag="episode"):
    """One run of a workflow on a task: trajectories of one or more policies, metrics, and messages for people
    to read."""

    trajectories: Annotated[tuple[Trajectory, ...], Meta(max_length=512)]
    score: Reward
    """The task's score of the episode, which evaluation reports (0 to 1 for a pass rate)."""
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=1024)] = ()
    messages: Annotated[tuple[Message, ...], Meta(max_length=16_384)] = ()
    started_s: UnixSeconds = 0.0
    duration_s: Seconds = 0.0


class Failure(Item, frozen=True, kw_only=True, tag="failure"):
    """Why an episode has no result. A failure is retried or counted, and never becomes a reward of 0."""

    error_class: Label
    message: Reason
    is_retryable: bool = True


# --- a rollout service: registration, leases, results ----------------------------------------------


class ServedVersions(Item, frozen=True, kw_only=True):
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


class RegisterWorker(Item, frozen=True, kw_only=True):
    """The request of a rollout service to join."""

    name: Nickname
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

    worker_id: Id
    heartbeat_s: Seconds
    lease_timeout_s: Seconds
    """A lease without heartbeats for this long is given out again."""


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


class Load(Item, frozen=True, kw_only=True):
    """What a rollout service is doing now."""

    num_running: Count = 0
    num_slots: Slots = 0
    """Episodes that the service can run at once; 0: not reported."""
    num_waiting: Count = 0
    generated_tokens: Count = 0
    """Tokens since the service started; never falls."""
    tokens_per_s: Measure = 0.0
    versions: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)] = ()
    waits_for: Label = ""
    """Whom the service waits for; empty if for nobody."""
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
    """The answer to a heartbeat. `revoked` leases are not worth finishing: they expired, or another attempt
    won."""

    revoked: LeaseIds
    state: RunState
    is_draining: bool = False


class LeaseRequest(Item, frozen=True, kw_only=True):
    """Asks for up to `num_free` leases, and waits up to `wait_s` if there is none."""

    worker_id: Id
    num_free: Slots
    served: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)]
    wait_s: Seconds = 25.0
    held: LeaseIds | None = None
    """All leases that the service holds. Any other lease that was granted to it was lost on the way, and is
    given out again at once instead of after `lease_timeout_s`. None: the service does not say."""


class LeaseReply(Item, frozen=True, kw_only=True):
    """Leases; if there are none, the run's state and the reason."""

    leases: Annotated[tuple[Lease, ...], Meta(max_length=65_536)]
    state: RunState
    waits_for: Reason = ""


class EpisodeResult(Item, frozen=True, kw_only=True):
    """The result of one lease: an episode, or why there is none. Sending it again counts once."""

    lease_id: LeaseId
    outcome: Episode | Failure


class EpisodeResults(Item, frozen=True, kw_only=True):
    """Several results in one request."""

    worker_id: Id
    results: Annotated[tuple[EpisodeResult, ...], Meta(max_length=4096)]


class EpisodeReceipt(Item, frozen=True, kw_only=True):
    """What became of one result: `accepted` (durable), `dropped` (late or repeated) or `invalid` (see the
    reason)."""

    lease_id: LeaseId
    status: Literal["accepted", "dropped", "invalid"]
    reason: Reason = ""


class Receipts(Item, frozen=True, kw_only=True):
    """One receipt per result, in the same order."""

    receipts: Annotated[tuple[EpisodeReceipt, ...], Meta(max_length=4096)]


class PastCompletion(Item, frozen=True, kw_only=True):
    """A whole completion of an episode that has not ended yet.

    If the lease is lost, the next attempt at the episode gets it wherever it makes the same request, instead
    of sampling again.
    """

    policy: Word
    request: Digest
    """Names the request. Those who sample choose it so that equal digests mean equal requests, in each token
    of the prompt, in the sampling parameters and in the seed."""
    token_ids: Blob
    """int32 [T]: the sampled tokens."""
    logprobs: Blob
    """float32 [T], in nats; as `Trajectory.behavior_logprobs`."""
    versions: Annotated[tuple[VersionSpan, ...], Meta(max_length=8192)]
    """Cover all T tokens, in order."""
    finish_reason: FinishReason
    streams: Annotated[tuple[Stream, ...], Meta(max_length=64)] = ()
    """Columns of the engine's own, with entries for the T tokens."""


class Progress(Item, frozen=True, kw_only=True):
    """Completions of one running episode that were not reported before.

    Example: `Progress(lease_id="17.3.0", num_before=2, completions=(third,))`.
    """

    lease_id: LeaseId
    num_before: Count
    """Number of completions that the dataflow has of this episode already, those of earlier attempts
    included. 0 replaces whatever it has."""
    completions: Annotated[tuple[PastCompletion, ...], Meta(max_length=4096)]


class ProgressReport(Item, frozen=True, kw_only=True):
    """How far running episodes are, so that they can go on elsewhere if their service is lost."""

    parts: Annotated[tuple[Progress, ...], Meta(max_length=65_536)]


class ProgressReply(Item, frozen=True, kw_only=True):
    """The parts of a report that were not kept, by their leases; all others were."""

    missing: LeaseIds = ()
    """The dataflow does not have the `num_before` completions, for example after a restart: report all of the
    episode again."""
    refused: LeaseIds = ()
    """Nothing more of these is kept, because the sender does not hold the lease, a completion breaks a rule,
    or there is no room: report no more of the episode."""


class EarlierProgress(Item, frozen=True, kw_only=True):
    """What earlier attempts at an episode sampled; empty if nothing is known of it."""

    completions: Annotated[tuple[PastCompletion, ...], Meta(max_length=4096)] = ()


class ProgressTotals(Item, frozen=True, kw_only=True):
    """What the dataflow keeps of unfinished episodes, and what came of it since the dataflow started."""

    num_episodes: Count = 0
    """Unfinished episodes with reported completions."""
    num_bytes: Count = 0
    """Memory that they take."""
    num_resumed_tokens: Count = 0
    """Tokens of lost attempts that accepted episodes contain."""
    num_resampled_tokens: Count = 0
    """Tokens of lost attempts that were reported, fit no request of the next attempt, and were sampled
    anew."""


class PushTasks(Item, frozen=True, kw_only=True):
    """Tasks from outside or from a workflow. They are drawn before those of the sources."""

    tasks: Annotated[tuple[Task, ...], Meta(max_length=10_000)]


class PushTasksReply(Item, frozen=True, kw_only=True):
    """How many tasks were accepted, how many had a known id, and how many exceeded the run's limits."""

    num_accepted: Count
    num_known: Count
    num_refused: Count = 0


class PushedTasks(Item, frozen=True, kw_only=True):
    """What became of the tasks that were pushed into the run."""

    num_accepted: Count = 0
    num_waiting: Count = 0
    """Accepted and not drawn yet."""
    num_known: Count = 0
    """Tasks that were pushed before."""
    num_refused: Count = 0
    """Tasks over `dataflow.max_pushed` or `dataflow.max_waiting_pushed`."""


# --- batches --------------------------------------------------------------------------------------


class AdvantageSpan(Item, frozen=True, array_like=True):
    """The advantage of the trained tokens within `[start, end)`."""

    start: Position
    end: Position
    value: Advantage


class Sample(Item, frozen=True, kw_only=True):
    """A training sequence: a trajectory with its advantages."""

    group_id: Count
    episode_idx: Count
    task_id: Id
    trajectory: Trajectory
    advantages: Annotated[tuple[AdvantageSpan, ...], Meta(max_length=4096)]
    """Cover every token whose mask is 1."""


class BatchTotals(Item, frozen=True, kw_only=True):
    """Sums over the whole batch (all ranks), so that each rank divides by the same numbers."""

    num_groups: Count
    num_samples: Count
    num_tokens: Count
    num_trained_tokens: Count
    advantage_sum: Figure
    """Over trained tokens."""
    advantage_square_sum: Figure
    reward_sum: Figure
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
    staleness_mean: Figure
    """Over groups."""
    staleness_max: Number
    is_redo: bool = False


class BatchReply(Item, frozen=True, kw_only=True):
    """One rank's slice of a step; if there is none yet, the run's state and whom the step waits for. Ask
    again."""

    batch: Batch | None
    """With `page` in the request, the samples of that page alone; all else is of the whole slice."""
    state: RunState
    waits_for: Reason = ""
    num_pages: Annotated[int, Meta(ge=1, le=2**20)] = 1
    """How many pages the slice has, if the request names one."""


# --- versions and their weights -------------------------------------------------------------------


class Chunk(Item, frozen=True, array_like=True):
    """A piece of a version's bytes, named by their xxh3-128 hash in hex, and its length."""

    hash: Digest
    num_bytes: Bytes


class TensorInfo(Item, frozen=True, kw_only=True):
    """A tensor of a version: its Hugging Face name, shape and dtype, and where its bytes are in the joined
    chunks."""

    name: TensorName
    shape: Annotated[tuple[Bytes, ...], Meta(max_length=16)]
    dtype: Literal["bfloat16", "float16", "float32"]
    offset: Bytes
    num_bytes: Bytes


class FileInfo(Item, frozen=True, kw_only=True):
    """A small file of the model folder (config, tokenizer, chat template), which version 0 contains."""

    name: Label
    chunk: Chunk


class SourceLink(Item, frozen=True, kw_only=True):
    """Where chunks can be fetched.

    `http`: at `url + "/v1/chunks/" + hash`. `file`: from a folder of chunk files. `s3`: from a prefix of
    chunk objects. A rollout service that serves its chunks has its name in the label `peer`.
    """

    kind: Literal["http", "file", "s3"]
    url: Url
    labels: Labels = {}


class Shortcut(Item, frozen=True, kw_only=True):
    """A delta that leads to a version which is also available in full; `base` need not be kept for it."""

    base: Version
    encoding: Label
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=MAX_CHUNKS)]


class Manifest(Item, frozen=True, kw_only=True):
    """An immutable version `(policy, version)`.

    `full`: the joined chunks contain every tensor at its offset. `delta`: the chunks contain the difference
    to version `base`, and to no other, in the format that `encoding` names.
    """

    policy: Label
    version: Version
    kind: Literal["full", "delta"]
    base: Version = -1
    encoding: Label = "raw"
    tensors: Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_TENSORS)]
    """All versions of a policy have the same. Empty where a dataflow and its caller have a name for it."""
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=MAX_CHUNKS)]
    digest: Digest
    """xxh3-128, in hex, over the xxh3-128 of each 512 KiB of the version's bytes. Installed bytes must match
    it."""
    files: Annotated[tuple[FileInfo, ...], Meta(max_length=1024)] = ()
    sources: Annotated[tuple[SourceLink, ...], Meta(max_length=4096)] = ()
    num_bytes: Bytes
    """Bytes to fetch."""
    created_s: UnixSeconds = 0.0
    shortcut: Shortcut | None = None
    """For a full version: a delta for receivers that hold its base."""


class DeltaFile(Item, frozen=True, kw_only=True):
    """A version that a trainer hands over as a delta."""

    path: Path
    """A file with one delta of encoding `astraflow-delta-1`, relative to `incoming`."""
    base: Version
    """The previous version, which the publisher has."""


class HandOver(Item, frozen=True, kw_only=True):
    """A trainer hands a version to its publisher: in full, as a delta, or both.

    The bytes are in files of the publisher's `incoming` folder.
    """

    policy: Label
    version: Version
    path: Path = ""
    """A file with the full version, relative to `incoming`: the tensors at their offsets, then the files of
    the model folder one after the other. Empty if there is only a delta."""
    delta: DeltaFile | None = None
    """A delta alone is refused with code `full_needed` if the publisher needs the full version."""
    tensors: Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_TENSORS)]
    digest: Digest
    """As in the manifest. The publisher refuses bytes with another digest, and a delta that leads to another
    one."""
    files: Annotated[tuple[FileInfo, ...], Meta(max_length=1024)] = ()
    """Empty after the first version of a policy, whose files stay valid."""
    is_first: bool = False
    """True for the first version of a trainer's session, which is published in full. The dataflow never
    announced its number, so it replaces what a trainer that died may have left under this number."""


class Forget(Item, frozen=True, kw_only=True):
    """Allows a publisher to delete versions of a policy that are neither `needed` nor among the newest."""

    policy: Label
    needed: Versions


class ChunkState(Item, frozen=True, kw_only=True):
    """What a peer says of a chunk: it is complete here, it is on its way here, or neither."""

    state: Literal["here", "coming", "absent"]


class PublisherHealth(Item, frozen=True, kw_only=True):
    """The publisher works; this is what it can serve."""

    versions: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)]
    num_chunks: Count
    num_bytes: Count
    sent_bytes: Count = 0
    """Bytes of chunks sent since the publisher started."""


class VersionsReply(Item, frozen=True, kw_only=True):
    """Manifests newer than the given version, oldest first, and versions that evaluation needs now."""

    newest: Version
    manifests: Annotated[tuple[Manifest, ...], Meta(max_length=65_536)]
    pinned: Versions
    state: RunState
    table: Digest = ""
    """A name of the tensor table that the manifests have; empty without manifests. If the caller named this
    table, the manifests come without it."""


# --- a trainer's session --------------------------------------------------------------------------


class StreamRule(Item, frozen=True, kw_only=True):
    """A stream that a trainer reads. Example: `StreamRule(name="teacher_logprobs", high=0.001)`."""

    name: Label
    dtype: Literal["int32", "float32", "uint8"] = "float32"
    width: Annotated[int, Meta(ge=1, le=8192)] = 1
    """Values per token."""
    low: Measure = -MAX_METRIC
    high: Measure = MAX_METRIC
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
    """What a trainer needs of each trajectory that it is sent. A result that breaks a rule is refused when it
    arrives. Example: `SampleRules(vocab_size=151936)`."""

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

    trainer_id: Id
    durable_step: Count
    num_ranks: Count = 1
    """Nothing reads it: each request for a batch names its `world`. Version 1 of the protocol keeps it."""
    fingerprints: "Fingerprints"
    protocol: Count = PROTOCOL_VERSION
    rules: SampleRules | msgspec.UnsetType = msgspec.UNSET
    """What it needs of trajectories. Without it, only what any trainer needs is checked when results
    arrive."""


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
    """In the place of the manifest's `tensors`: the name of the policy's table, from an earlier answer."""


class PublicationReply(Item, frozen=True, kw_only=True):
    """Versions of the policy that someone still needs; the publisher may delete the others."""

    needed: Versions
    table: Digest = ""
    """A name of the policy's tensor table, which later publications may give in place of it."""


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
    """What a joining service must know of a policy."""

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
    template_args: JsonText = "{}"
    """Arguments of the model's chat template in every prompt, as a JSON object."""
    """What happens to an agent's request for sampling that the policy can't follow."""


class RunInfo(Item, frozen=True, kw_only=True):
    """Answer to `GET /v1/run`: what a joining service needs besides URL and token."""

    name: Label
    run_id: Id
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


class Wait(Item, frozen=True, kw_only=True):
    """`who` waits for `whom` since `since_s` (Unix seconds); `what` says for what, in words."""

    who: Reason
    whom: Reason
    what: Reason
    since_s: UnixSeconds


class ScalingAdvice(Item, frozen=True, kw_only=True):
    """How many rollout services the run could use, judged by who waited for whom in the last minutes."""

    trainer_wait_frac: Figures = {}
    """Policy -> share of its trainer's time without a batch; empty until enough time has passed."""
    rollout_wait_frac: Figure = 0.0
    """Share of slots that were empty because a trainer had to take a batch first."""
    num_services: Count = 0
    missing_services: Number = 0
    """Services that the run could use beyond those it has; negative: it has too many."""
    needed_services: Figure = 0.0
    """Services that generate a batch in the time in which one is trained, by the last steps; 0: not known."""
    needed_per_hour: Figure = 0.0
    """How many more of them are needed each hour; negative: fewer."""
    overlap: Figure = 0.0
    """How well trainer and services work at the same time, as an exponent; 0: not known."""
    text: Reason = ""
    """The advice in words."""


class WorkerStatus(Item, frozen=True, kw_only=True):
    """One rollout service as the dataflow sees it."""

    id: Id
    name: Nickname
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
    last_failure: Reason = ""
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
    staleness_bound: Number
    redone_steps: Count
    fates: FateCounts
    num_replayed_groups: Count = 0
    """Replayed groups that batches contained beside the fresh ones. They are not part of the fates."""
    trainer_request: Label = ""
    """Name of the newest request of its trainer; empty before the first since the dataflow started."""
    trainer_seen_s: UnixSeconds = 0.0
    """When that was answered; now if a request waits for its answer; 0 before the first. A trainer makes no
    request while it trains."""
    outcomes: Figures = {}
    """How many groups ended how since the last batch was taken: `ready`, `filtered by zero_variance`,
    `failed`, `unused`."""
    num_episodes: Count = 0
    """Good training episodes since the last commit."""
    score_mean: Figure = 0.0
    """Mean of their scores; 0 without one."""


class StatusReply(Item, frozen=True, kw_only=True):
    """Answer to `GET /v1/status`."""

    name: Label
    state: RunState
    reason: Text
    """Why the run ended, with the last failure if that ended it. Longer than a `Reason`, since it may contain
    one."""
    now_s: UnixSeconds
    policies: Annotated[tuple[PolicyStatus, ...], Meta(max_length=1024)]
    workers: Annotated[tuple[WorkerStatus, ...], Meta(max_length=65_536)]
    waits: Annotated[tuple[Wait, ...], Meta(max_length=65_536)]
    curation: Annotated[tuple[MetricItem, ...], Meta(max_length=4096)] = ()
    """Tasks that curators selected and passed over since the start, by curator and reason; empty for a plain
    order."""
    pushed: PushedTasks = PushedTasks()
    scaling: ScalingAdvice = ScalingAdvice()


class StepRecord(Item, frozen=True, kw_only=True):
    """One committed step, as the live screen, `metrics.jsonl` and `run.steps()` show it."""

    policy: Label
    step: Count
    """How many steps of the policy came before."""
    version: Version
    at_s: UnixSeconds
    reward_mean: Figure
    """Mean over episodes and roles, however many samples each of them has."""
    staleness_mean: Figure
    staleness_max: Number
    num_groups: Count
    num_samples: Count
    num_trained_tokens: Count
    num_discarded_groups: Count
    """Groups of this policy that got another fate than trained since the previous step."""
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=8192)]
    num_replayed_groups: Count = 0
    """How many of `num_groups` were replayed, having been trained on in an earlier step. `reward_mean` leaves
    them out."""

    @property
    def number(self) -> int:
        """The number of the step as people count, from 1. `step` is the number of steps before it."""
        return self.step + 1

    @property
    def num_gradient_tokens(self) -> int | None:
        """How many of `num_trained_tokens` the trainer computed a gradient for, as its metric of this name
        says; None if it does not say."""
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
    score_mean: Figure | None
    """Mean over tasks of the mean over samples; pass@1 if scores are 0 or 1. None if there is no score."""
    score_stderr: Figure
    at_s: UnixSeconds
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=8192)] = ()
    best_by: Reason = ""
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
    """A trainer could not train the batch of a step, and ends. Example: `StepFailure(step=7, epoch=3,
    reason="out of memory")`."""

    step: Count
    epoch: Count
    reason: Reason


class DropRequest(Item, frozen=True, kw_only=True):
    """A person gives up the batch of the oldest step of a policy that is not committed.

    Example: `DropRequest(step=7, epoch=3, reason="out of memory")` after the status said `step` 7, `epoch` 3.
    """

    step: Count
    epoch: Count
    """The policy's newest session, as the status shows it. It makes a repeated request fail as fenced."""
    reason: Reason = ""


class DropReply(Item, frozen=True, kw_only=True):
    """What was dropped. The steps get other batches after the policy's trainer has attached again."""

    steps: Annotated[tuple[Count, ...], Meta(max_length=65_536)]
    """The step of the request, and later ones whose batches were already taken."""
    num_groups: Count
    """Number of groups of these steps; their fate is now `evicted`."""


class StopRequest(Item, frozen=True, kw_only=True):
    """Ends the run early. Live groups are cancelled."""

    reason: Reason
    is_failure: bool = False


class Health(Item, frozen=True, kw_only=True):
    """Answer to `GET /v1/health`: the service works and can write its journal."""

    state: RunState
    num_records: Count
    """Records in the journal."""


class ErrorReply(Item, frozen=True, kw_only=True):
    """Body of every answer with a status of 400 or more."""

    code: Label
    message: Reason

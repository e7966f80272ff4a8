"""Every item that crosses a boundary, on one page.

Items are frozen msgspec structs: fast, tagged where a field may hold several kinds, checked when decoded
(`wire.decode`), not when constructed. Every field has a bound: a type of `bounds.py`, which says why, or the
length of a list. Token columns are little-endian bytes: `int32` ids, `uint8` masks, `float32` logprobs;
`wire.column` and `wire.array` convert. Times ending in `_s` are seconds; `at_s` is Unix time.

Shape letters: T tokens of one trajectory, K turns, G episodes of a group, B samples of a batch.
The path of one item: Task -> Lease -> Episode of Trajectory -> Group -> Sample -> Batch.
"""
# size: the one page of all items; splitting it would hide the path of an item

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from astraflow.bounds import (
    MAX_CHUNKS,
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
    "PROTOCOL_VERSION",
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
    "Item",
    "Lease",
    "LeaseKind",
    "LeaseReply",
    "LeaseRequest",
    "Load",
    "Manifest",
    "MediaRef",
    "Message",
    "MetricItem",
    "PolicyInfo",
    "PolicyStatus",
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
    "Sampling",
    "ScalingAdvice",
    "ServedVersions",
    "Session",
    "SessionRequest",
    "Shortcut",
    "SourceLink",
    "StatusReply",
    "StepRecord",
    "StepsReply",
    "StopRequest",
    "Stream",
    "Task",
    "TensorInfo",
    "ToolSpec",
    "Trajectory",
    "Turn",
    "VersionSpan",
    "VersionsReply",
    "Wait",
    "WorkerStatus",
]  # fmt: skip

PROTOCOL_VERSION = 1
"""Version of these items on the wire; a peer with another number is refused with a clear message."""

LeaseKind = Literal["train", "eval"]
FinishReason = Literal["stop", "length", "abort"]
Reduction = Literal["mean", "sum", "max", "min", "last"]
RunState = Literal["running", "draining", "finished", "failed"]
Fate = Literal["trained", "filtered", "stale", "evicted", "failed", "unadmitted", "unused", "cancelled"]


class Item(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=False):
    """Base of all items: frozen, unknown fields refused on decoding."""


# --- tasks and episodes ---------------------------------------------------------------------------


class Message(Item, frozen=True, kw_only=True):
    """One chat message. Example: `Message(role="user", content="Calculate 2 + 3.")`."""

    role: Literal["system", "user", "assistant", "tool"]
    content: Text
    name: Label = ""


class ToolSpec(Item, frozen=True, kw_only=True):
    """A function that a model may call, as its chat template shows it.

    Example: `ToolSpec(name="add", description="Adds.", parameters='{"type": "object", "properties": {}}')`.
    """

    name: Label
    description: Text
    parameters: JsonText
    """JSON schema of the arguments, an object, as JSON text."""


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
    """Messages before the prompt (a system message, few-shot examples)."""
    spec: JsonText = ""
    """JSON text that the source's own scorer reads; opaque to everything else."""


class Sampling(Item, frozen=True, kw_only=True):
    """How one completion is sampled. Example: `Sampling(temperature=1.0, max_tokens=64, seed=7)`."""

    temperature: Temperature = 1.0
    """0 is greedy."""
    top_p: TopP = 1.0
    top_k: Count = 0
    """0 keeps the whole vocabulary."""
    max_tokens: Position = 256
    stop: Annotated[tuple[StopText, ...], Meta(max_length=64)] = ()
    """Texts that end the completion; the stop text stays in the tokens."""
    seed: Count = 0
    """Same request, seed and weights give the same tokens, whatever else is in the running batch."""


class GenerateRequest(Item, frozen=True, kw_only=True):
    """One completion asked of an engine, tokens in. Ids are plain integers; nothing is re-tokenised."""

    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
    sampling: Sampling
    version: Version = -1
    """-1: the newest loaded version, following updates in mid-generation; else exactly this version."""


class Stream(Item, frozen=True, kw_only=True):
    """A further per-token column, known by name from the producer to the loss, e.g. a teacher's logprobs.

    Example, for two tokens: `Stream(name="teacher", dtype="float32", data=column([-0.7, -0.1], "float32"))`.
    """

    name: Label
    dtype: Literal["int32", "float32", "uint8"]
    data: Blob
    """One entry per token of the item that carries the stream; floats are finite."""


class Generation(Item, frozen=True, kw_only=True):
    """One completion, tokens out. All columns have one entry per generated token."""

    token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_TOKENS)]
    logprobs: Annotated[tuple[Logprob, ...], Meta(max_length=MAX_TOKENS)]
    """Nats, of a full forward under `versions[i]`, at the sampling temperature, over the full vocabulary."""
    versions: Annotated[tuple[Version, ...], Meta(max_length=MAX_TOKENS)]
    finish_reason: FinishReason
    streams: Annotated[tuple[Stream, ...], Meta(max_length=64)] = ()
    """Columns of the engine's own, one entry per generated token; the loss gets them by name."""


class VersionSpan(Item, frozen=True, array_like=True):
    """A run of sampled tokens `[start, start + length)` made by one version of the policy."""

    start: Position
    length: Position
    version: Version


class Turn(Item, frozen=True, kw_only=True):
    """One completion of a trajectory: sampled tokens `[start, end)`, its reward, and a key of the state it
    saw."""

    start: Position
    end: Position
    reward: Reward = 0.0
    state_key: Text = ""


class MediaRef(Item, frozen=True, kw_only=True):
    """A reference to an image or another medium that the tokens at `start` stand for."""

    kind: Label
    uri: Text
    start: Position


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
    """float32 [T], nats; 0 where `mask` is 0."""
    versions: Annotated[tuple[VersionSpan, ...], Meta(max_length=8192)]
    """Covers exactly the tokens whose mask is 1, in order."""
    temperature: Temperature
    finish_reason: FinishReason
    turns: Annotated[tuple[Turn, ...], Meta(max_length=4096)]
    reward: Reward
    is_fork: bool = False
    """True if an edited or stripped history made this trajectory; its shared prefix is masked."""
    streams: Annotated[tuple[Stream, ...], Meta(max_length=64)] = ()
    """Further columns [T]. The loss reads the entries where `mask` is 1; the recorder writes 0 elsewhere."""
    media: Annotated[tuple[MediaRef, ...], Meta(max_length=4096)] = ()


class MetricItem(Item, frozen=True, array_like=True):
    """A measured number and how several of them become one."""

    name: Word
    value: Measure
    reduction: Reduction = "mean"


class Episode(Item, frozen=True, kw_only=True, tag="episode"):
    """One run of a workflow on a task: trajectories of one or more policies, metrics, and messages to
    read."""

    trajectories: Annotated[tuple[Trajectory, ...], Meta(max_length=512)]
    score: Reward
    """The task's own score of the episode, what evaluation reports (0..1 for a pass rate)."""
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=1024)] = ()
    messages: Annotated[tuple[Message, ...], Meta(max_length=16_384)] = ()
    started_s: UnixSeconds = 0.0
    duration_s: Seconds = 0.0


class Failure(Item, frozen=True, kw_only=True, tag="failure"):
    """Why an episode has no result. Never scored as reward 0: it is retried or counted."""

    error_class: Label
    message: Reason
    is_retryable: bool = True


# --- leases and results ---------------------------------------------------------------------------


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
    """Base of the sampling seeds of the episode."""
    pinned: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)] = ()
    """For `eval`: exactly one version a policy; the engines must generate with these."""
    eval_set: Label = ""


class RegisterWorker(Item, frozen=True, kw_only=True):
    """A rollout service joins."""

    name: Nickname
    hosts: Annotated[tuple[Label, ...], Meta(max_length=1024)]
    """Policies that it can generate with."""
    engine: Label
    num_slots: Slots
    """Episodes that it can run at once."""
    labels: Labels = {}
    peer_url: PeerUrl = ""
    """Where other services may fetch the chunks that this one has (`http://host:port`); empty: nowhere."""
    fingerprints: "Fingerprints"
    protocol: Count = PROTOCOL_VERSION


class Fingerprints(Item, frozen=True, kw_only=True):
    """Hex digests that must agree between services; an empty one is not compared."""

    recipe: Digest = ""
    code: Digest = ""
    models: Digests = {}
    """A policy's architecture, from its config.json."""
    tokenizers: Digests = {}


class Registration(Item, frozen=True, kw_only=True):
    """The answer to a joining service."""

    worker_id: Id
    heartbeat_s: Seconds
    lease_timeout_s: Seconds
    """A lease whose heartbeats stop for this long goes out again."""


class BusySpan(Item, frozen=True, array_like=True):
    """Wall-clock time (Unix seconds) in which something ran; `kind` is `generate`, `train` or `wait:WHOM`."""

    kind: Label
    start_s: UnixSeconds
    end_s: UnixSeconds


class Load(Item, frozen=True, kw_only=True):
    """What a rollout service does right now."""

    num_running: Count = 0
    num_slots: Slots = 0
    """Episodes that it can run at once; 0: not told."""
    num_waiting: Count = 0
    generated_tokens: Count = 0
    """Since the service started; never falls."""
    tokens_per_s: Measure = 0.0
    versions: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)] = ()
    waits_for: Label = ""
    """Whom it waits for, or empty."""
    spans: Annotated[tuple[BusySpan, ...], Meta(max_length=MAX_SPANS)] = ()
    """New since the last heartbeat."""


class Heartbeat(Item, frozen=True, kw_only=True):
    """Extends the leases that the service still works on."""

    lease_ids: LeaseIds
    load: Load
    peer_url: PeerUrl = ""
    """As in `RegisterWorker`: a dataflow that restarted learns it again."""


class HeartbeatReply(Item, frozen=True, kw_only=True):
    """`revoked` leases are no longer worth finishing (expired, or won by another attempt)."""

    revoked: LeaseIds
    state: RunState
    is_draining: bool = False


class LeaseRequest(Item, frozen=True, kw_only=True):
    """Asks for up to `num_free` leases; waits up to `wait_s` when there is none."""

    worker_id: Id
    num_free: Slots
    served: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)]
    wait_s: Seconds = 25.0
    held: LeaseIds | None = None
    """All leases that the service holds as it asks: any other that was granted to it got lost on the way, and
    goes out again at once instead of after `lease_timeout_s`. None: not said."""


class LeaseReply(Item, frozen=True, kw_only=True):
    """Leases, or none with the run's state and the reason."""

    leases: Annotated[tuple[Lease, ...], Meta(max_length=65_536)]
    state: RunState
    waits_for: Reason = ""


class EpisodeResult(Item, frozen=True, kw_only=True):
    """The result of one lease: an episode, or why there is none. Idempotent by `lease_id`."""

    lease_id: LeaseId
    outcome: Episode | Failure


class EpisodeResults(Item, frozen=True, kw_only=True):
    """Several results in one request."""

    worker_id: Id
    results: Annotated[tuple[EpisodeResult, ...], Meta(max_length=4096)]


class EpisodeReceipt(Item, frozen=True, kw_only=True):
    """What became of one result. `accepted` is durable; `dropped` came too late or again; `invalid` names
    why."""

    lease_id: LeaseId
    status: Literal["accepted", "dropped", "invalid"]
    reason: Reason = ""


class Receipts(Item, frozen=True, kw_only=True):
    """One receipt a result, in order."""

    receipts: Annotated[tuple[EpisodeReceipt, ...], Meta(max_length=4096)]


class PushTasks(Item, frozen=True, kw_only=True):
    """Tasks from outside, or from a workflow; drawn before the sources' own."""

    tasks: Annotated[tuple[Task, ...], Meta(max_length=10_000)]


class PushTasksReply(Item, frozen=True, kw_only=True):
    """How many were taken; a known id is taken once, a task over the run's limits never."""

    num_accepted: Count
    num_known: Count
    num_refused: Count = 0


class PushedTasks(Item, frozen=True, kw_only=True):
    """What became of the tasks that were pushed into the run."""

    num_accepted: Count = 0
    num_waiting: Count = 0
    """Accepted and not drawn yet."""
    num_known: Count = 0
    """Pushed again."""
    num_refused: Count = 0
    """Over `dataflow.max_pushed` or `dataflow.max_waiting_pushed`."""


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
    """Covers every token whose mask is 1."""


class BatchTotals(Item, frozen=True, kw_only=True):
    """Sums over the whole batch (all ranks), so that each rank divides exactly."""

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
    """One rank's slice of the samples between two versions of a policy. The same bytes for ever for one
    step."""

    policy: Label
    step: Count
    rank: Count
    world: Count
    trainer_version: Version
    """Version number of the weights that take this step's first gradient."""
    samples: Annotated[tuple[Sample, ...], Meta(max_length=2**24)]
    totals: BatchTotals
    staleness_mean: Figure
    """Over groups."""
    staleness_max: Number
    is_redo: bool = False


class BatchReply(Item, frozen=True, kw_only=True):
    """One rank's slice of a step, or none yet (ask again) with the run's state and whom it waits for."""

    batch: Batch | None
    state: RunState
    waits_for: Reason = ""


# --- policies, versions and weights ---------------------------------------------------------------


class Chunk(Item, frozen=True, array_like=True):
    """A content-addressed run of bytes: xxh3-128 hex of its bytes, and its length."""

    hash: Digest
    num_bytes: Bytes


class TensorInfo(Item, frozen=True, kw_only=True):
    """A tensor of a version: Hugging Face name, shape, dtype, and where its bytes lie in the chunks'
    concatenation."""

    name: TensorName
    shape: Annotated[tuple[Bytes, ...], Meta(max_length=16)]
    dtype: Literal["bfloat16", "float16", "float32"]
    offset: Bytes
    num_bytes: Bytes


class FileInfo(Item, frozen=True, kw_only=True):
    """A small file of the model folder (config, tokenizer, chat template) carried by version 0."""

    name: Label
    chunk: Chunk


class SourceLink(Item, frozen=True, kw_only=True):
    """Where chunks can be fetched: `url + "/v1/chunks/" + hash` for `http`, a folder of chunk files for
    `file`, a prefix of chunk objects for `s3`. A rollout service that serves what it has carries the label
    `peer`, its name."""

    kind: Literal["http", "file", "s3"]
    url: Url
    labels: Labels = {}


class Shortcut(Item, frozen=True, kw_only=True):
    """A delta to a version that is also there in full; `base` need not be kept for it."""

    base: Version
    encoding: Label
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=MAX_CHUNKS)]


class Manifest(Item, frozen=True, kw_only=True):
    """An immutable version `(policy, version)`.

    `full`: the chunks, joined, hold every tensor at its offset. `delta`: the chunks hold an encoded
    difference to `base`, whose format `encoding` names; it fits no other version.
    """

    policy: Label
    version: Version
    kind: Literal["full", "delta"]
    base: Version = -1
    encoding: Label = "raw"
    tensors: Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_TENSORS)]
    chunks: Annotated[tuple[Chunk, ...], Meta(max_length=MAX_CHUNKS)]
    digest: Digest
    """xxh3-128 hex over the xxh3-128 of each 512 KiB of a version's bytes: what is installed must have it."""
    files: Annotated[tuple[FileInfo, ...], Meta(max_length=1024)] = ()
    sources: Annotated[tuple[SourceLink, ...], Meta(max_length=4096)] = ()
    num_bytes: Bytes
    """Bytes to fetch."""
    created_s: UnixSeconds = 0.0
    shortcut: Shortcut | None = None
    """Of a full version: the delta that a receiver takes who holds its base."""


class DeltaFile(Item, frozen=True, kw_only=True):
    """What a trainer says of a version that it hands over as a difference."""

    path: Path
    """Relative to `incoming`: one delta of encoding `astraflow-delta-1`."""
    base: Version
    """The version before, which the publisher has."""


class HandOver(Item, frozen=True, kw_only=True):
    """A trainer hands a version to its publisher, in files of the publisher's `incoming` folder: in full, as
    a delta, or both."""

    policy: Label
    version: Version
    path: Path = ""
    """In full: the tensors at their offsets, then the files of the model folder one after the other. Relative
    to `incoming`; empty if there is a delta only."""
    delta: DeltaFile | None = None
    """Refused with code `full_needed` if the publisher cannot do with a delta alone."""
    tensors: Annotated[tuple[TensorInfo, ...], Meta(max_length=MAX_TENSORS)]
    digest: Digest
    """As in the manifest; the publisher refuses bytes that hash to something else, and a delta that does not
    lead to it."""
    files: Annotated[tuple[FileInfo, ...], Meta(max_length=1024)] = ()
    """Empty after the first version of a policy: its files stay."""
    is_first: bool = False
    """First version of a trainer's session: it is published in full, whatever came before. Its number is one
    that the dataflow never announced, so what is known under it, of a trainer that died, is replaced."""


class Forget(Item, frozen=True, kw_only=True):
    """Versions of a policy that are neither `needed` nor among the newest may be deleted."""

    policy: Label
    needed: Versions


class ChunkState(Item, frozen=True, kw_only=True):
    """What a peer says of a chunk: it is here whole, it is on its way here, or neither."""

    state: Literal["here", "coming", "absent"]


class PublisherHealth(Item, frozen=True, kw_only=True):
    """The publisher is up; what it can serve."""

    versions: Annotated[tuple[ServedVersions, ...], Meta(max_length=1024)]
    num_chunks: Count
    num_bytes: Count
    sent_bytes: Count = 0
    """Chunk bytes given out since it started."""


class SessionRequest(Item, frozen=True, kw_only=True):
    """A trainer attaches to its policy. `durable_step` is the number of steps in its checkpoint (0: none)."""

    trainer_id: Id
    durable_step: Count
    num_ranks: Count = 1
    fingerprints: "Fingerprints"
    protocol: Count = PROTOCOL_VERSION


class Session(Item, frozen=True, kw_only=True):
    """`epoch` fences older sessions; the trainer publishes its weights as `next_version`, then takes
    `step`."""

    epoch: Count
    step: Count
    next_version: Count
    num_steps: Count
    """The run ends after this many steps."""


class Publication(Item, frozen=True, kw_only=True):
    """A trainer announces a version whose chunks are durable at its sources."""

    epoch: Count
    step: Count
    """Steps done by these weights."""
    manifest: Manifest


class PublicationReply(Item, frozen=True, kw_only=True):
    """Versions of the policy that someone still needs; the publisher may forget the others."""

    needed: Versions


class Commit(Item, frozen=True, kw_only=True):
    """Step `step` is trained and its weights are published as `version`."""

    epoch: Count
    step: Count
    version: Version
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=4096)] = ()
    spans: Annotated[tuple[BusySpan, ...], Meta(max_length=MAX_SPANS)] = ()


class Release(Item, frozen=True, kw_only=True):
    """A checkpoint of the first `step` steps is durable: earlier batches need not be served again."""

    epoch: Count
    step: Count
    version: Version


class VersionsReply(Item, frozen=True, kw_only=True):
    """Manifests newer than asked for, oldest first, and versions that evaluation needs now."""

    newest: Version
    manifests: Annotated[tuple[Manifest, ...], Meta(max_length=65_536)]
    pinned: Versions
    state: RunState


# --- run, status and records ----------------------------------------------------------------------


class PolicyInfo(Item, frozen=True, kw_only=True):
    """What a joining service must know of a policy."""

    name: Label
    is_trained: bool
    sampling: Sampling
    max_lag: Count
    """L: versions that an engine may be behind the newest and still lease."""
    follows: Label = ""
    """The policy whose versions it serves; empty for its own."""
    lag: Count = 0
    """Versions that it serves behind the newest of the policy that it follows."""


class RunInfo(Item, frozen=True, kw_only=True):
    """`GET /v1/run`: what a joiner needs besides URL and token."""

    name: Label
    run_id: Id
    """New for every run folder, the same after a restart."""
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
    """How many rollout services the run could use, from who waited for whom in the last minutes."""

    trainer_wait_frac: Figures = {}
    """Policy -> share of its trainer's time without a batch; empty while too little was seen."""
    rollout_wait_frac: Figure = 0.0
    """Share of the services' slots that were empty because a trainer had to take a batch first."""
    num_services: Count = 0
    missing_services: Number = 0
    """Negative: too many."""
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
    """It failed too often in a row: it gets a single lease now and then, until one succeeds."""
    failed_in_a_row: Count = 0
    """Failures since its last good episode; leases that ran together and failed together count once."""
    last_failure: Reason = ""
    """Error class and message of the latest of them."""


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
    """Tickets charged now."""
    max_tickets: Count
    num_running_groups: Count
    num_ready_groups: Count
    groups_per_batch: Count
    staleness_bound: Number
    redone_steps: Count
    fates: FateCounts
    num_replayed_groups: Count = 0
    """Groups that batches held beside the fresh ones; counted apart from the fates."""


class StatusReply(Item, frozen=True, kw_only=True):
    """`GET /v1/status`."""

    name: Label
    state: RunState
    reason: Text
    """Why the run ended; holds the last failure, a `Reason` by itself, if that ended it."""
    now_s: UnixSeconds
    policies: Annotated[tuple[PolicyStatus, ...], Meta(max_length=1024)]
    workers: Annotated[tuple[WorkerStatus, ...], Meta(max_length=65_536)]
    waits: Annotated[tuple[Wait, ...], Meta(max_length=65_536)]
    curation: Annotated[tuple[MetricItem, ...], Meta(max_length=4096)] = ()
    """Tasks selected and passed over since the start, by curator and reason; empty for a plain order."""
    pushed: PushedTasks = PushedTasks()
    scaling: ScalingAdvice = ScalingAdvice()


class StepRecord(Item, frozen=True, kw_only=True):
    """One committed step: what the live screen, `metrics.jsonl` and `run.steps()` show."""

    policy: Label
    step: Count
    version: Version
    at_s: UnixSeconds
    reward_mean: Figure
    """Over episodes, however many samples each has; counted once per role."""
    staleness_mean: Figure
    staleness_max: Number
    num_groups: Count
    num_samples: Count
    num_trained_tokens: Count
    num_discarded_groups: Count
    """Groups of this policy with another fate than trained, since the previous step."""
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=8192)]
    num_replayed_groups: Count = 0
    """Those of `num_groups` that an earlier step was trained on; `reward_mean` leaves them out."""


class EvalRecord(Item, frozen=True, kw_only=True):
    """One finished evaluation round of one set at pinned versions."""

    policy: Label
    version: Version
    step: Count
    eval_set: Label
    num_tasks: Count
    num_samples: Count
    """Episodes that gave a score."""
    num_failed: Count
    """Episodes that gave none: they failed, or the deadline passed."""
    score_mean: Figure | None
    """Mean over tasks of the mean over samples: pass@1 for 0/1 scores. None if no episode gave a score."""
    score_stderr: Figure
    at_s: UnixSeconds
    metrics: Annotated[tuple[MetricItem, ...], Meta(max_length=8192)] = ()


class StepsReply(Item, frozen=True, kw_only=True):
    """Committed steps of a policy newer than asked for, oldest first."""

    steps: Annotated[tuple[StepRecord, ...], Meta(max_length=2**24)]
    state: RunState


class EvalsReply(Item, frozen=True, kw_only=True):
    """Finished evaluation rounds after the first `after` of them; `num_evals` is the next `after`."""

    evals: Annotated[tuple[EvalRecord, ...], Meta(max_length=2**24)]
    num_evals: Count
    state: RunState


class DropRequest(Item, frozen=True, kw_only=True):
    """A person gives up the batch of the oldest step of a policy that is not committed.

    Example: `DropRequest(step=7, epoch=3, reason="out of memory")` after the status said `step` 7, `epoch` 3.
    """

    step: Count
    epoch: Count
    """The policy's newest session, as the status says: a request that is repeated is refused as fenced."""
    reason: Reason = ""


class DropReply(Item, frozen=True, kw_only=True):
    """What was dropped. The steps get other batches once the policy's trainer has attached again."""

    steps: Annotated[tuple[Count, ...], Meta(max_length=65_536)]
    """The step that was asked for, and those whose batches were taken ahead of it."""
    num_groups: Count
    """Their groups, all `evicted` now."""


class StopRequest(Item, frozen=True, kw_only=True):
    """Ends the run early: live groups are cancelled."""

    reason: Reason
    is_failure: bool = False


class Health(Item, frozen=True, kw_only=True):
    """`GET /v1/health`: the service answers and can write its journal."""

    state: RunState
    num_records: Count
    """Records in the journal."""


class ErrorReply(Item, frozen=True, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    code: Label
    message: Reason

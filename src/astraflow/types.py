"""Every item that crosses a boundary, on one page.

Items are frozen msgspec structs: fast, tagged where a field may hold several kinds, checked when decoded
(`wire.decode`), not when constructed. Token columns are little-endian bytes: `int32` ids, `uint8` masks,
`float32` logprobs; `wire.column` and `wire.array` convert. Times ending in `_s` are seconds; `at_s` is
Unix time.

Shape letters: T tokens of one trajectory, K turns, G episodes of a group, B samples of a batch.
The path of one item: Task -> Lease -> Episode of Trajectory -> Group -> Sample -> Batch.
"""
# size: the one page of all items; splitting it would hide the path of an item

from typing import Literal

import msgspec

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
    content: str
    name: str = ""


class ToolSpec(Item, frozen=True, kw_only=True):
    """A function that a model may call, as its chat template shows it.

    Example: `ToolSpec(name="add", description="Adds.", parameters='{"type": "object", "properties": {}}')`.
    """

    name: str
    description: str
    parameters: str
    """JSON schema of the arguments, an object, as JSON text."""


class Task(Item, frozen=True, kw_only=True):
    """One problem and what is needed to score it.

    Example: `Task(id="heldout/7", source="heldout", prompt="Calculate 2 + 3.", answer="5")`.
    """

    id: str
    """Stable across draws and restarts: the same problem has the same id."""
    source: str
    """Name of the task source in the recipe."""
    prompt: str
    answer: str = ""
    context: tuple[Message, ...] = ()
    """Messages before the prompt (a system message, few-shot examples)."""
    spec: str = ""
    """JSON text that the source's own scorer reads; opaque to everything else."""


class Sampling(Item, frozen=True, kw_only=True):
    """How one completion is sampled. Example: `Sampling(temperature=1.0, max_tokens=64, seed=7)`."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    """Texts that end the completion; the stop text stays in the tokens."""
    seed: int = 0
    """Same request, seed and weights give the same tokens, whatever else is in the running batch."""


class GenerateRequest(Item, frozen=True, kw_only=True):
    """One completion asked of an engine, tokens in. Ids are plain integers; nothing is re-tokenised."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    version: int = -1
    """-1: the newest loaded version, following updates in mid-generation; else exactly this version."""


class Generation(Item, frozen=True, kw_only=True):
    """One completion, tokens out. All columns have one entry a generated token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Nats, of a full forward under `versions[i]`, at the sampling temperature, over the full vocabulary."""
    versions: tuple[int, ...]
    finish_reason: FinishReason


class VersionSpan(Item, frozen=True, array_like=True):
    """A run of sampled tokens `[start, start + length)` made by one version of the policy."""

    start: int
    length: int
    version: int


class Turn(Item, frozen=True, kw_only=True):
    """One completion of a trajectory: sampled tokens `[start, end)`, its reward, and a key of the state it
    saw."""

    start: int
    end: int
    reward: float = 0.0
    state_key: str = ""


class Stream(Item, frozen=True, kw_only=True):
    """A further named per-token column, e.g. teacher logprobs; `data` holds T entries of `dtype`."""

    name: str
    dtype: Literal["int32", "float32", "uint8"]
    data: bytes


class MediaRef(Item, frozen=True, kw_only=True):
    """A reference to an image or another medium that the tokens at `start` stand for."""

    kind: str
    uri: str
    start: int


class Trajectory(Item, frozen=True, kw_only=True):
    """One token sequence of one policy in an episode.

    Example, three prompt tokens and two sampled ones::

        Trajectory(policy="actor", role="actor", token_ids=column([5, 6, 7, 8, 2], "int32"),
                   mask=column([0, 0, 0, 1, 1], "uint8"),
                   behavior_logprobs=column([0, 0, 0, -0.7, -0.1], "float32"),
                   versions=(VersionSpan(start=3, length=2, version=4),), temperature=1.0,
                   finish_reason="stop", turns=(Turn(start=3, end=5, reward=1.0),), reward=1.0)
    """

    policy: str
    role: str
    token_ids: bytes
    """int32 [T]."""
    mask: bytes
    """uint8 [T], 1 where the policy sampled the token and it is trained here."""
    behavior_logprobs: bytes
    """float32 [T], nats; 0 where `mask` is 0."""
    versions: tuple[VersionSpan, ...]
    """Covers exactly the tokens whose mask is 1, in order."""
    temperature: float
    finish_reason: FinishReason
    turns: tuple[Turn, ...]
    reward: float
    is_fork: bool = False
    """True if an edited or stripped history made this trajectory; its shared prefix is masked."""
    streams: tuple[Stream, ...] = ()
    media: tuple[MediaRef, ...] = ()


class MetricItem(Item, frozen=True, array_like=True):
    """A measured number and how several of them become one."""

    name: str
    value: float
    reduction: Reduction = "mean"


class Episode(Item, frozen=True, kw_only=True, tag="episode"):
    """One run of a workflow on a task: trajectories of one or more policies, metrics, and messages to
    read."""

    trajectories: tuple[Trajectory, ...]
    score: float
    """The task's own score of the episode, what evaluation reports (0..1 for a pass rate)."""
    metrics: tuple[MetricItem, ...] = ()
    messages: tuple[Message, ...] = ()
    started_s: float = 0.0
    duration_s: float = 0.0


class Failure(Item, frozen=True, kw_only=True, tag="failure"):
    """Why an episode has no result. Never scored as reward 0: it is retried or counted."""

    error_class: str
    message: str
    is_retryable: bool = True


# --- leases and results ---------------------------------------------------------------------------


class ServedVersions(Item, frozen=True, kw_only=True):
    """The versions of one policy that a service can generate with now, newest last."""

    policy: str
    versions: tuple[int, ...]


class Lease(Item, frozen=True, kw_only=True):
    """The right to run one episode until its heartbeats stop.

    Example: `Lease(id="17.3.0", kind="train", group_id=17, episode_idx=3, attempt=0, task=task, seed=99)`.
    """

    id: str
    kind: LeaseKind
    group_id: int
    episode_idx: int
    attempt: int
    task: Task
    seed: int
    """Base of the sampling seeds of the episode."""
    pinned: tuple[ServedVersions, ...] = ()
    """For `eval`: exactly one version a policy; the engines must generate with these."""
    eval_set: str = ""


class RegisterWorker(Item, frozen=True, kw_only=True):
    """A rollout service joins."""

    name: str
    hosts: tuple[str, ...]
    """Policies that it can generate with."""
    engine: str
    num_slots: int
    """Episodes that it can run at once."""
    labels: dict[str, str] = {}
    peer_url: str = ""
    """Where other services may fetch the chunks that this one has (`http://host:port`); empty: nowhere."""
    fingerprints: "Fingerprints"
    protocol: int = PROTOCOL_VERSION


class Fingerprints(Item, frozen=True, kw_only=True):
    """Hex digests that must agree between services; an empty one is not compared."""

    recipe: str = ""
    code: str = ""
    models: dict[str, str] = {}
    """A policy's architecture, from its config.json."""
    tokenizers: dict[str, str] = {}


class Registration(Item, frozen=True, kw_only=True):
    """The answer to a joining service."""

    worker_id: str
    heartbeat_s: float
    lease_timeout_s: float
    """A lease whose heartbeats stop for this long goes out again."""


class BusySpan(Item, frozen=True, array_like=True):
    """Wall-clock time (Unix seconds) in which something ran; `kind` is `generate`, `train` or `wait:WHOM`."""

    kind: str
    start_s: float
    end_s: float


class Load(Item, frozen=True, kw_only=True):
    """What a rollout service does right now."""

    num_running: int = 0
    num_slots: int = 0
    """Episodes that it can run at once; 0: not told."""
    num_waiting: int = 0
    generated_tokens: int = 0
    """Since the service started; never falls."""
    tokens_per_s: float = 0.0
    versions: tuple[ServedVersions, ...] = ()
    waits_for: str = ""
    """Whom it waits for, or empty."""
    spans: tuple[BusySpan, ...] = ()
    """New since the last heartbeat."""


class Heartbeat(Item, frozen=True, kw_only=True):
    """Extends the leases that the service still works on."""

    lease_ids: tuple[str, ...]
    load: Load
    peer_url: str = ""
    """As in `RegisterWorker`: a dataflow that restarted learns it again."""


class HeartbeatReply(Item, frozen=True, kw_only=True):
    """`revoked` leases are no longer worth finishing (expired, or won by another attempt)."""

    revoked: tuple[str, ...]
    state: RunState
    is_draining: bool = False


class LeaseRequest(Item, frozen=True, kw_only=True):
    """Asks for up to `num_free` leases; waits up to `wait_s` when there is none."""

    worker_id: str
    num_free: int
    served: tuple[ServedVersions, ...]
    wait_s: float = 25.0
    held: tuple[str, ...] | None = None
    """All leases that the service holds as it asks: any other that was granted to it got lost on the way, and
    goes out again at once instead of after `lease_timeout_s`. None: not said."""


class LeaseReply(Item, frozen=True, kw_only=True):
    """Leases, or none with the run's state and the reason."""

    leases: tuple[Lease, ...]
    state: RunState
    waits_for: str = ""


class EpisodeResult(Item, frozen=True, kw_only=True):
    """The result of one lease: an episode, or why there is none. Idempotent by `lease_id`."""

    lease_id: str
    outcome: Episode | Failure


class EpisodeResults(Item, frozen=True, kw_only=True):
    """Several results in one request."""

    worker_id: str
    results: tuple[EpisodeResult, ...]


class EpisodeReceipt(Item, frozen=True, kw_only=True):
    """What became of one result. `accepted` is durable; `dropped` came too late or again; `invalid` names
    why."""

    lease_id: str
    status: Literal["accepted", "dropped", "invalid"]
    reason: str = ""


class Receipts(Item, frozen=True, kw_only=True):
    """One receipt a result, in order."""

    receipts: tuple[EpisodeReceipt, ...]


class PushTasks(Item, frozen=True, kw_only=True):
    """Tasks from outside, or from a workflow; drawn before the sources' own."""

    tasks: tuple[Task, ...]


class PushTasksReply(Item, frozen=True, kw_only=True):
    """How many were taken; a known id is taken once, a task over the run's limits never."""

    num_accepted: int
    num_known: int
    num_refused: int = 0


class PushedTasks(Item, frozen=True, kw_only=True):
    """What became of the tasks that were pushed into the run."""

    num_accepted: int = 0
    num_waiting: int = 0
    """Accepted and not drawn yet."""
    num_known: int = 0
    """Pushed again."""
    num_refused: int = 0
    """Over `dataflow.max_pushed` or `dataflow.max_waiting_pushed`."""


# --- batches --------------------------------------------------------------------------------------


class AdvantageSpan(Item, frozen=True, array_like=True):
    """The advantage of the trained tokens within `[start, end)`."""

    start: int
    end: int
    value: float


class Sample(Item, frozen=True, kw_only=True):
    """A training sequence: a trajectory with its advantages."""

    group_id: int
    episode_idx: int
    task_id: str
    trajectory: Trajectory
    advantages: tuple[AdvantageSpan, ...]
    """Covers every token whose mask is 1."""


class BatchTotals(Item, frozen=True, kw_only=True):
    """Sums over the whole batch (all ranks), so that each rank divides exactly."""

    num_groups: int
    num_samples: int
    num_tokens: int
    num_trained_tokens: int
    advantage_sum: float
    """Over trained tokens."""
    advantage_square_sum: float
    reward_sum: float
    """Over samples."""


class Batch(Item, frozen=True, kw_only=True):
    """One rank's slice of the samples between two versions of a policy. The same bytes for ever for one
    step."""

    policy: str
    step: int
    rank: int
    world: int
    trainer_version: int
    """Version number of the weights that take this step's first gradient."""
    samples: tuple[Sample, ...]
    totals: BatchTotals
    staleness_mean: float
    """Over groups."""
    staleness_max: int
    is_redo: bool = False


class BatchReply(Item, frozen=True, kw_only=True):
    """One rank's slice of a step, or none yet (ask again) with the run's state and whom it waits for."""

    batch: Batch | None
    state: RunState
    waits_for: str = ""


# --- policies, versions and weights ---------------------------------------------------------------


class Chunk(Item, frozen=True, array_like=True):
    """A content-addressed run of bytes: xxh3-128 hex of its bytes, and its length."""

    hash: str
    num_bytes: int


class TensorInfo(Item, frozen=True, kw_only=True):
    """A tensor of a version: Hugging Face name, shape, dtype, and where its bytes lie in the chunks'
    concatenation."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["bfloat16", "float16", "float32"]
    offset: int
    num_bytes: int


class FileInfo(Item, frozen=True, kw_only=True):
    """A small file of the model folder (config, tokenizer, chat template) carried by version 0."""

    name: str
    chunk: Chunk


class SourceLink(Item, frozen=True, kw_only=True):
    """Where chunks can be fetched: `url + "/v1/chunks/" + hash` for `http`, a folder of chunk files for
    `file`, a prefix of chunk objects for `s3`. A rollout service that serves what it has carries the label
    `peer`, its name."""

    kind: Literal["http", "file", "s3"]
    url: str
    labels: dict[str, str] = {}


class Shortcut(Item, frozen=True, kw_only=True):
    """A delta to a version that is also there in full; `base` need not be kept for it."""

    base: int
    encoding: str
    chunks: tuple[Chunk, ...]


class Manifest(Item, frozen=True, kw_only=True):
    """An immutable version `(policy, version)`.

    `full`: the chunks, joined, hold every tensor at its offset. `delta`: the chunks hold an encoded
    difference to `base`, whose format `encoding` names; it fits no other version.
    """

    policy: str
    version: int
    kind: Literal["full", "delta"]
    base: int = -1
    encoding: str = "raw"
    tensors: tuple[TensorInfo, ...]
    chunks: tuple[Chunk, ...]
    digest: str
    """xxh3-128 hex over the xxh3-128 of each 512 KiB of a version's bytes: what is installed must have it."""
    files: tuple[FileInfo, ...] = ()
    sources: tuple[SourceLink, ...] = ()
    num_bytes: int
    """Bytes to fetch."""
    created_s: float = 0.0
    shortcut: Shortcut | None = None
    """Of a full version: the delta that a receiver takes who holds its base."""


class DeltaFile(Item, frozen=True, kw_only=True):
    """What a trainer says of a version that it hands over as a difference."""

    path: str
    """Relative to `incoming`: one delta of encoding `astraflow-delta-1`."""
    base: int
    """The version before, which the publisher has."""


class HandOver(Item, frozen=True, kw_only=True):
    """A trainer hands a version to its publisher, in files of the publisher's `incoming` folder: in full, as
    a delta, or both."""

    policy: str
    version: int
    path: str = ""
    """In full: the tensors at their offsets, then the files of the model folder one after the other. Relative
    to `incoming`; empty if there is a delta only."""
    delta: DeltaFile | None = None
    """Refused with code `full_needed` if the publisher cannot do with a delta alone."""
    tensors: tuple[TensorInfo, ...]
    digest: str
    """As in the manifest; the publisher refuses bytes that hash to something else, and a delta that does not
    lead to it."""
    files: tuple[FileInfo, ...] = ()
    """Empty after the first version of a policy: its files stay."""
    is_first: bool = False
    """First version of a trainer's session: it is published in full, whatever came before. Its number is one
    that the dataflow never announced, so what is known under it, of a trainer that died, is replaced."""


class Forget(Item, frozen=True, kw_only=True):
    """Versions of a policy that are neither `needed` nor among the newest may be deleted."""

    policy: str
    needed: tuple[int, ...]


class ChunkState(Item, frozen=True, kw_only=True):
    """What a peer says of a chunk: it is here whole, it is on its way here, or neither."""

    state: Literal["here", "coming", "absent"]


class PublisherHealth(Item, frozen=True, kw_only=True):
    """The publisher is up; what it can serve."""

    versions: tuple[ServedVersions, ...]
    num_chunks: int
    num_bytes: int
    sent_bytes: int = 0
    """Chunk bytes given out since it started."""


class SessionRequest(Item, frozen=True, kw_only=True):
    """A trainer attaches to its policy. `durable_step` is the number of steps in its checkpoint (0: none)."""

    trainer_id: str
    durable_step: int
    num_ranks: int = 1
    fingerprints: "Fingerprints"
    protocol: int = PROTOCOL_VERSION


class Session(Item, frozen=True, kw_only=True):
    """`epoch` fences older sessions; the trainer publishes its weights as `next_version`, then takes
    `step`."""

    epoch: int
    step: int
    next_version: int
    num_steps: int
    """The run ends after this many steps."""


class Publication(Item, frozen=True, kw_only=True):
    """A trainer announces a version whose chunks are durable at its sources."""

    epoch: int
    step: int
    """Steps done by these weights."""
    manifest: Manifest


class PublicationReply(Item, frozen=True, kw_only=True):
    """Versions of the policy that someone still needs; the publisher may forget the others."""

    needed: tuple[int, ...]


class Commit(Item, frozen=True, kw_only=True):
    """Step `step` is trained and its weights are published as `version`."""

    epoch: int
    step: int
    version: int
    metrics: tuple[MetricItem, ...] = ()
    spans: tuple[BusySpan, ...] = ()


class Release(Item, frozen=True, kw_only=True):
    """A checkpoint of the first `step` steps is durable: earlier batches need not be served again."""

    epoch: int
    step: int
    version: int


class VersionsReply(Item, frozen=True, kw_only=True):
    """Manifests newer than asked for, oldest first, and versions that evaluation needs now."""

    newest: int
    manifests: tuple[Manifest, ...]
    pinned: tuple[int, ...]
    state: RunState


# --- run, status and records ----------------------------------------------------------------------


class PolicyInfo(Item, frozen=True, kw_only=True):
    """What a joining service must know of a policy."""

    name: str
    is_trained: bool
    sampling: Sampling
    max_lag: int
    """L: versions that an engine may be behind the newest and still lease."""
    follows: str = ""
    """The policy whose versions it serves; empty for its own."""
    lag: int = 0
    """Versions that it serves behind the newest of the policy that it follows."""


class RunInfo(Item, frozen=True, kw_only=True):
    """`GET /v1/run`: what a joiner needs besides URL and token."""

    name: str
    run_id: str
    """New for every run folder, the same after a restart."""
    state: RunState
    policies: tuple[PolicyInfo, ...]
    workflow: str
    fingerprints: Fingerprints
    recipe: str
    """The resolved recipe as JSON text, without secrets."""
    labels: dict[str, str] = {}
    protocol: int = PROTOCOL_VERSION


class FateCounts(Item, frozen=True, kw_only=True):
    """The accounting identity of one policy: `drawn` equals the sum of all the others."""

    drawn: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    evicted: int = 0
    failed: int = 0
    unadmitted: int = 0
    unused: int = 0
    cancelled: int = 0
    live: int = 0


class Wait(Item, frozen=True, kw_only=True):
    """`who` waits for `whom` since `since_s` (Unix seconds); `what` says for what, in words."""

    who: str
    whom: str
    what: str
    since_s: float


class ScalingAdvice(Item, frozen=True, kw_only=True):
    """How many rollout services the run could use, from who waited for whom in the last minutes."""

    trainer_wait_frac: dict[str, float] = {}
    """Policy -> share of its trainer's time without a batch; empty while too little was seen."""
    rollout_wait_frac: float = 0.0
    """Share of the services' slots that were empty because a trainer had to take a batch first."""
    num_services: int = 0
    missing_services: int = 0
    """Negative: too many."""
    text: str = ""
    """The advice in words."""


class WorkerStatus(Item, frozen=True, kw_only=True):
    """One rollout service as the dataflow sees it."""

    id: str
    name: str
    engine: str
    hosts: tuple[str, ...]
    num_leases: int
    load: Load
    last_seen_s: float
    is_draining: bool = False
    is_set_aside: bool = False
    """It failed too often in a row: it gets a single lease now and then, until one succeeds."""
    failed_in_a_row: int = 0
    """Failures since its last good episode; leases that ran together and failed together count once."""
    last_failure: str = ""
    """Error class and message of the latest of them."""


class PolicyStatus(Item, frozen=True, kw_only=True):
    """One policy as the dataflow sees it."""

    name: str
    step: int
    """Committed steps."""
    num_steps: int
    newest_version: int
    durable_step: int
    epoch: int
    num_tickets: int
    """Tickets charged now."""
    max_tickets: int
    num_running_groups: int
    num_ready_groups: int
    groups_per_batch: int
    staleness_bound: int
    redone_steps: int
    fates: FateCounts
    num_replayed_groups: int = 0
    """Groups that batches held beside the fresh ones; counted apart from the fates."""


class StatusReply(Item, frozen=True, kw_only=True):
    """`GET /v1/status`."""

    name: str
    state: RunState
    reason: str
    now_s: float
    policies: tuple[PolicyStatus, ...]
    workers: tuple[WorkerStatus, ...]
    waits: tuple[Wait, ...]
    curation: tuple[MetricItem, ...] = ()
    """Tasks selected and passed over since the start, by curator and reason; empty for a plain order."""
    pushed: PushedTasks = PushedTasks()
    scaling: ScalingAdvice = ScalingAdvice()


class StepRecord(Item, frozen=True, kw_only=True):
    """One committed step: what the live screen, `metrics.jsonl` and `run.steps()` show."""

    policy: str
    step: int
    version: int
    at_s: float
    reward_mean: float
    """Over episodes, however many samples each has; counted once per role."""
    staleness_mean: float
    staleness_max: int
    num_groups: int
    num_samples: int
    num_trained_tokens: int
    num_discarded_groups: int
    """Groups of this policy with another fate than trained, since the previous step."""
    metrics: tuple[MetricItem, ...]
    num_replayed_groups: int = 0
    """Those of `num_groups` that an earlier step was trained on; `reward_mean` leaves them out."""


class EvalRecord(Item, frozen=True, kw_only=True):
    """One finished evaluation round of one set at pinned versions."""

    policy: str
    version: int
    step: int
    eval_set: str
    num_tasks: int
    num_samples: int
    num_failed: int
    score_mean: float
    """Mean over tasks of the mean over samples: pass@1 for 0/1 scores."""
    score_stderr: float
    at_s: float
    metrics: tuple[MetricItem, ...] = ()


class StepsReply(Item, frozen=True, kw_only=True):
    """Committed steps of a policy newer than asked for, oldest first."""

    steps: tuple[StepRecord, ...]
    state: RunState


class EvalsReply(Item, frozen=True, kw_only=True):
    """Finished evaluation rounds after the first `after` of them; `num_evals` is the next `after`."""

    evals: tuple[EvalRecord, ...]
    num_evals: int
    state: RunState


class StopRequest(Item, frozen=True, kw_only=True):
    """Ends the run early: live groups are cancelled."""

    reason: str
    is_failure: bool = False


class Health(Item, frozen=True, kw_only=True):
    """`GET /v1/health`: the service answers and can write its journal."""

    state: RunState
    num_records: int
    """Records in the journal."""


class ErrorReply(Item, frozen=True, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    code: str
    message: str

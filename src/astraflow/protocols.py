"""Every seam of AstraFlow on one page. A seam has at least two implementations, one of them used by tests."""

# size: the one page of all seams

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from astraflow.types import (
    Batch,
    BusySpan,
    Commit,
    EpisodeResults,
    GenerateRequest,
    Generation,
    Heartbeat,
    HeartbeatReply,
    LeaseReply,
    LeaseRequest,
    Manifest,
    Message,
    MetricItem,
    Publication,
    PublicationReply,
    PushTasks,
    PushTasksReply,
    Receipts,
    RegisterWorker,
    Registration,
    Release,
    Session,
    SessionRequest,
    Task,
    ToolSpec,
    VersionsReply,
)

__all__ = [
    "Capacity",
    "ChunkReader",
    "Completed",
    "Curator",
    "Engine",
    "GroupFacts",
    "HostTensor",
    "Launcher",
    "MetricSink",
    "Outcome",
    "ProcessHandle",
    "ProcessSpec",
    "Publishes",
    "Renderer",
    "Reward",
    "StepResult",
    "TaskGate",
    "TaskSource",
    "ToolRenderer",
    "TrainerBackend",
    "TrainerLink",
    "TrajectoryFacts",
    "WeightChanges",
    "WeightSnapshot",
    "WorkerLink",
    "episode_weights",
]

Reward = Callable[[Task, str], float]
"""Scores a completion; a plain function, run in a process pool with a hard deadline."""


# --- data that crosses seams inside one process ---------------------------------------------------


def episode_weights(episodes: Sequence[Hashable], num_tokens: Sequence[int]) -> tuple[float, ...]:
    """The weight of each trajectory within its episode: its share of the trained tokens, so that splitting a
    trajectory moves no weight. Equal shares in an episode without trained tokens.

    Example: `episode_weights(["a", "b", "b"], [9, 1, 3])` is `(1.0, 0.25, 0.75)`.
    """
    if len(set(episodes)) == len(episodes):
        return (1.0,) * len(episodes)
    tokens: dict[Hashable, int] = {}
    counts: dict[Hashable, int] = {}
    for episode, num in zip(episodes, num_tokens, strict=True):
        tokens[episode] = tokens.get(episode, 0) + num
        counts[episode] = counts.get(episode, 0) + 1
    return tuple(
        num / tokens[episode] if tokens[episode] else 1 / counts[episode]
        for episode, num in zip(episodes, num_tokens, strict=True)
    )


@dataclass(frozen=True, slots=True)
class HostTensor:
    """A tensor in host memory: `data` is its raw little-endian bytes as uint8 [num_bytes], C order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """`float32`, `float16` or `bfloat16`."""
    data: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class WeightChanges:
    """Where a version can differ from version `base` of the same policy: an engine that serves that one need
    touch nothing else.

    Example: `for name, positions in changes.find().items(): weights[name].flat[positions] = ...`.
    """

    base: int
    find: Callable[[], Mapping[str, NDArray[np.int64]]]
    """Tensor name -> flat positions of elements, in any order; unnamed tensors are equal. Blocks."""


@dataclass(frozen=True, slots=True)
class WeightSnapshot:
    """One verified version in host memory: tensors in manifest order, and the folder with config and
    tokenizer. `changes`: what is new since an older version, if that is known and little."""

    policy: str
    version: int
    tensors: tuple[HostTensor, ...]
    model_dir: Path
    changes: WeightChanges | None = None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can take. `num_slots` requests may run at once; `max_context` counts prompt and
    completion."""

    num_slots: int
    num_running: int
    num_waiting: int
    max_context: int
    generated_tokens: int
    """Since start; never falls."""


@dataclass(frozen=True, slots=True)
class TrajectoryFacts:
    """What credit and filters may know of a trajectory: no tokens."""

    episode_idx: int
    role: str
    reward: float
    turn_rewards: tuple[float, ...]
    turn_spans: tuple[tuple[int, int], ...]
    num_tokens: int
    num_trained_tokens: int
    is_truncated: bool
    state_keys: tuple[int, ...] = ()
    """One a turn: equal where the policy was shown the same state."""
    repeated_frac: float = 0.0
    """Share of its 8-grams of sampled tokens that came before in it; 0 unless a filter may ask for it."""


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """One policy's trajectories of one group, ordered by (episode_idx, position in the episode).

    An episode has several trajectories of one role where its history forked, or where its workflow holds
    several conversations; a statistic of the group that counts trajectories would count such an episode more
    than once. `weights` prevents that.
    Example: `sum(w * t.reward for w, t in zip(facts.weights, facts.trajectories)) / sum(facts.weights)`.
    """

    policy: str
    group_id: int
    trajectories: tuple[TrajectoryFacts, ...]

    @property
    def weights(self) -> tuple[float, ...]:
        """One number per trajectory; those of one episode and role sum to 1."""
        return episode_weights(
            [(t.episode_idx, t.role) for t in self.trajectories],
            [t.num_trained_tokens for t in self.trajectories],
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What curators may know of a completed group of a task, before any filter."""

    task_idx: int
    groups: Mapping[str, GroupFacts]
    """Each policy's trajectories, if it has any; under "" one of the reward `score` for each good episode."""
    versions: Mapping[str, int]
    """Each policy's newest version; under "" the sum of them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step of a backend reports."""

    metrics: tuple[MetricItem, ...]


# --- dataflow -------------------------------------------------------------------------------------


class TaskSource(Protocol):
    """A fixed, ordered set of tasks. The same index is the same task for ever."""

    def __len__(self) -> int: ...

    def task(self, idx: int) -> Task: ...


class Curator(Protocol):
    """Decides which task is drawn next. Deterministic: its only state is what `state` returns, which need not
    be a copy."""

    def next(self) -> int:
        """Index of the next task to draw."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Outcome of a completed group."""
        ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Completed(Protocol):
    """What samplers, removers and replay may know of a completed group."""

    @property
    def oldest_version(self) -> int: ...

    @property
    def num_trained_tokens(self) -> int: ...

    @property
    def advantage_square_sum(self) -> float: ...


class TaskGate(Protocol):
    """A curator that proposes no task, but may pass over those that another proposes. As deterministic."""

    def why_skip(self, task_idx: int) -> str:
        """In one word, why the task is passed over this time; empty if it is not."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Outcome of a completed group."""
        ...

    def state(self) -> dict[str, Any]:
        """Its values that are floats are reported as metrics."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class WorkerLink(Protocol):
    """A rollout service's way to the dataflow; `dataflow.client` implements it over HTTP or in memory.

    Calls retry until the dataflow answers or their patience ends (UnavailableError); a refusal is
    RefusedError.
    """

    async def register(self, request: RegisterWorker) -> Registration: ...

    async def heartbeat(self, worker_id: str, beat: Heartbeat) -> HeartbeatReply: ...

    async def drain(self, worker_id: str) -> None: ...

    async def leases(self, request: LeaseRequest) -> LeaseReply: ...

    async def episodes(self, results: EpisodeResults) -> Receipts: ...

    async def push_tasks(self, tasks: PushTasks) -> PushTasksReply: ...

    async def versions(self, policy: str, *, after: int, wait_s: float = 25.0) -> VersionsReply: ...


class TrainerLink(Protocol):
    """A trainer's way to the dataflow."""

    async def attach(self, policy: str, request: SessionRequest) -> Session: ...

    async def batch(
        self, policy: str, step: int, *, epoch: int, rank: int = 0, world: int = 1
    ) -> Batch | None:
        """Waits for the slice of a step; None if the run ended first."""
        ...

    async def publish(self, policy: str, publication: Publication) -> PublicationReply: ...

    async def commit(self, policy: str, commit: Commit) -> None: ...

    async def release(self, policy: str, release: Release) -> None: ...


# --- rollout --------------------------------------------------------------------------------------


class Engine(Protocol):
    """Generates for one policy. All methods are called from one event loop."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Tokens, logprobs and the version of each token. Raises RolloutError."""
        ...

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1 under the newest version."""
        ...

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version in slot `live` (running requests go on with it) or `pinned` (for evaluation).
        Given the version that the slot has, returns once it serves.

        Raises: WeightsError; the old version then keeps serving.
        """
        ...

    async def pause(self) -> None:
        """Stops stepping; requests stay."""
        ...

    async def resume(self) -> None: ...

    def capacity(self) -> Capacity:
        """Raises: ServiceError if the engine will never serve again, which ends the rollout service."""
        ...

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Wall-clock spans of generation since the last call."""
        ...

    async def close(self) -> None: ...


class Renderer(Protocol):
    """Knows the chat template. Extends exact token prefixes; never re-tokenises what was sampled."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation up to and with the assistant's opening."""
        ...

    def extend(
        self, prefix: Sequence[int], history: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        """`prefix` (the ids of `history`, which ends in a completion) plus the ids of further messages and
        the assistant's opening.

        Raises: HistoryRewrittenError if the template renders `history` differently once `messages` follow.
        """
        ...

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The assistant message of sampled ids, without stop tokens."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]: ...


@runtime_checkable
class ToolRenderer(Renderer, Protocol):
    """A renderer that can show tools to the model."""

    def with_tools(self, tools: Sequence[ToolSpec]) -> Renderer:
        """The renderer of conversations with these tools.

        Raises: RolloutError if the chat template shows no tools.
        """
        ...


# --- trainer --------------------------------------------------------------------------------------


class TrainerBackend(Protocol):
    """Owns model and optimizer of one policy."""

    def train_step(self, batch: Batch) -> StepResult:
        """All optimizer steps of one batch."""
        ...

    def export(self) -> Sequence[HostTensor]:
        """The current weights in host memory, Hugging Face names and layout; a copy that training leaves
        alone."""
        ...

    def save(self, folder: Path) -> None:
        """Everything needed to go on bit-exactly: model, optimizer, scheduler, RNG, step."""
        ...

    def load(self, folder: Path) -> None: ...


# --- weights --------------------------------------------------------------------------------------


class Publishes(Protocol):
    """A trainer's way to its publisher."""

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        """Makes a version durable and downloadable. `files` are small files of the model folder (version
        0)."""
        ...

    async def forget(self, policy: str, needed: Sequence[int]) -> None:
        """Chunks of versions that are neither needed nor among the newest may be deleted."""
        ...


class ChunkReader(Protocol):
    """Reads content-addressed chunks from one kind of source."""

    async def read(self, url: str, chunk_hash: str, *, start: int, end: int) -> bytes:
        """Bytes `[start, end)` of a chunk. Raises UnavailableError or WeightsError."""
        ...


# --- launch, metrics ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a run: what to start, with which environment, where its log goes, on which host."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log_path: Path
    host: str = "localhost"
    max_restarts: int = 5
    ends_with_run: bool = False
    """Exit code 0 is its normal end; without it, any end that nobody asked for is a crash."""
    longest_silence_s: float = 0.0
    """It is restarted after so long without a sign of life; 0: never."""


@runtime_checkable
class ProcessHandle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Its exit code; negative for a signal."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    async def silence(self, longest_s: float) -> str:
        """Returns once the process has shown no sign of life for `longest_s`, after it was asked to log the
        stacks of its threads: what is known of its state, in words. Never returns for a process that has not
        shown one yet."""
        ...


class Launcher(Protocol):
    """Starts processes on hosts; one implementation a kind of cluster."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle: ...


class MetricSink(Protocol):
    """Takes the metrics of a step."""

    def write(self, policy: str, step: int, metrics: Sequence[MetricItem]) -> None: ...

    def close(self) -> None: ...

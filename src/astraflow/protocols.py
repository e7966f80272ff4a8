"""The seams that others implement: every part that a recipe or a caller can replace, and only those.

Each seam is a `Protocol` of a few methods (or a plain function), with the values that only this seam uses.
Each has at least two implementations, one of them used by tests. A class implements a seam by having its
methods; nothing is inherited or registered.

What crosses several seams is defined elsewhere: items of the network in `types`, facts about groups in
`facts`, weights in `host_tensors`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from astraflow.facts import Outcome
from astraflow.host_tensors import HostTensor, WeightSnapshot
from astraflow.types import (
    Batch,
    BusySpan,
    GenerateRequest,
    Generation,
    Manifest,
    Message,
    MetricItem,
    Task,
    ToolSpec,
)

__all__ = [
    "Capacity",
    "Completed",
    "Curator",
    "Engine",
    "Launcher",
    "MetricSink",
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
]


# --- tasks and the choice among them --------------------------------------------------------------


class TaskSource(Protocol):
    """A fixed, ordered set of tasks. The same index always gives the same task."""

    def __len__(self) -> int: ...

    def task(self, idx: int) -> Task: ...


class Curator(Protocol):
    """Decides which task is drawn next. Deterministic: its only state is what `state` returns."""

    def next(self) -> int:
        """Index of the next task to draw."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learns the outcome of a completed group."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `restore` needs. The caller does not change it, so it need not be a copy."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class TaskGate(Protocol):
    """A curator that proposes no tasks itself, but may pass over those that another one proposes.

    Deterministic, like `Curator`.
    """

    def why_skip(self, task_idx: int) -> str:
        """Why the task is passed over this time, in one word; empty if it is drawn."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learns the outcome of a completed group."""
        ...

    def state(self) -> dict[str, Any]:
        """All that `restore` needs. Values that are floats are also reported as metrics."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Completed(Protocol):
    """What samplers, removers and replay may know of a completed group."""

    @property
    def oldest_version(self) -> int: ...

    @property
    def num_trained_tokens(self) -> int: ...

    @property
    def advantage_square_sum(self) -> float: ...


Reward = Callable[[Task, str], float]
"""Scores a completion. A plain function that runs in a process pool, with a hard deadline."""


# --- rollout --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many requests an engine can take, and how many it has."""

    num_slots: int
    """Requests that may run at once."""
    num_running: int
    num_waiting: int
    max_context: int
    """Largest number of tokens of a request: prompt and completion together."""
    generated_tokens: int
    """Tokens generated since the engine started; never falls."""


class Engine(Protocol):
    """Generates for one policy. All methods are called from one event loop."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns tokens, their logprobs, and the version that made each token. Raises: RolloutError."""
        ...

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1 under the newest version."""
        ...

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version in slot `live` (running requests continue with it) or `pinned` (for evaluation).

        Returns once the version is being served; if the slot holds it already, nothing else is done.

        Raises: WeightsError; the engine then continues to serve the old version.
        """
        ...

    async def pause(self) -> None:
        """Stops generating; requests stay."""
        ...

    async def resume(self) -> None: ...

    def capacity(self) -> Capacity:
        """Raises: ServiceError if the engine will never serve again; this ends the rollout service."""
        ...

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Wall-clock spans of generation since the last call."""
        ...

    async def close(self) -> None: ...


class Renderer(Protocol):
    """Knows the chat template. Extends exact token prefixes; never tokenizes sampled text again."""

    def render(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation, up to and including the opening of the assistant's next message."""
        ...

    def extend(
        self, prefix: Sequence[int], history: Sequence[Message], messages: Sequence[Message]
    ) -> tuple[int, ...]:
        """Appends further messages and the opening of the assistant's next message to `prefix`.

        `prefix` holds the token ids of `history`, which ends with a completion.

        Raises: HistoryRewrittenError if the template renders `history` differently once `messages` follow.
        """
        ...

    def parse(self, token_ids: Sequence[int]) -> Message:
        """The assistant's message that the sampled ids stand for, without stop tokens."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]: ...


@runtime_checkable
class ToolRenderer(Renderer, Protocol):
    """A renderer that can show tools to the model."""

    def with_tools(self, tools: Sequence[ToolSpec]) -> Renderer:
        """The renderer of conversations with these tools.

        Raises: RolloutError if the chat template cannot show tools.
        """
        ...


# --- training and publishing ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a backend reports after the optimizer steps of one batch."""

    metrics: tuple[MetricItem, ...]


class TrainerBackend(Protocol):
    """Owns the model and the optimizer of one policy."""

    def train_step(self, batch: Batch) -> StepResult:
        """Does all optimizer steps of one batch."""
        ...

    def export(self) -> Sequence[HostTensor]:
        """A copy of the current weights in host memory, with Hugging Face names and layout.

        Later training steps do not change the copy.
        """
        ...

    def save(self, folder: Path) -> None:
        """Writes what is needed to continue bit-exactly: model, optimizer, scheduler, random state, step."""
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""
        ...


class Publishes(Protocol):
    """How a trainer publishes the versions of its policy."""

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        """Makes a version durable and downloadable. `files` are small files of the model folder (version
        0)."""
        ...

    async def forget(self, policy: str, needed: Sequence[int]) -> None:
        """Allows the publisher to delete versions that are neither needed nor among the newest."""
        ...


# --- processes ------------------------------------------------------------------------------------


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
    """True if exit code 0 is its normal end. Otherwise every end that nobody asked for is a crash."""
    longest_silence_s: float = 0.0
    """The process is restarted after this many seconds without a sign of life; 0 means never."""


@runtime_checkable
class ProcessHandle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Waits for the end of the process. Returns its exit code, which is negative for a signal."""
        ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...

    async def silence(self, longest_s: float) -> str:
        """Waits until the process has shown no sign of life for `longest_s` seconds.

        Asks the process to log the stacks of its threads, then returns what is known of its state, in words.
        Never returns for a process that has not shown a first sign of life.
        """
        ...


class Launcher(Protocol):
    """Starts processes on hosts; one implementation per kind of cluster."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle: ...


# --- metrics --------------------------------------------------------------------------------------


class MetricSink(Protocol):
    """Takes the metrics of a step."""

    def write(self, policy: str, step: int, metrics: Sequence[MetricItem]) -> None: ...

    def close(self) -> None: ...

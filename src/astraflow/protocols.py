"""The seams that others implement: every part that a recipe or a caller can replace, and only those.

Each seam is a `Protocol` of a few methods (or a plain function), with the values that only this seam uses.
Each has at least two implementations, one of them used by tests. A class implements a seam by having its
methods; nothing is inherited or registered.

What crosses several seams is defined elsewhere: items of the network in `types`, facts about groups in
`facts`, weights in `host_tensors`.
"""
# size: the one page of all seams; splitting it would hide some of them

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import RolloutError
from astraflow.types import (
    Batch,
    BusySpan,
    GenerateRequest,
    Generation,
    Manifest,
    MediaRef,
    Message,
    MetricItem,
    SampleRules,
    Task,
    ToolSpec,
)
from astraflow.types.facts import Outcome
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.types.token_columns import Columns

if TYPE_CHECKING:  # seams are read without loading torch
    from torch import Tensor

__all__ = [
    "LAUNCHER",
    "MACHINE_LOST",
    "AdamStep",
    "BatchObserver",
    "Capacity",
    "CompleteGroup",
    "Curator",
    "Engine",
    "EntropyUse",
    "Environment",
    "EpisodeTracker",
    "ImageRenderer",
    "InteractiveEnvironment",
    "Launcher",
    "Learner",
    "LifeReporter",
    "Limiter",
    "ModelRole",
    "MultiMachineLauncher",
    "Needs",
    "Objective",
    "Observation",
    "ProcessHandle",
    "ProcessLife",
    "ProcessSpec",
    "ReasoningRenderer",
    "Remover",
    "Renderer",
    "Reward",
    "RunPage",
    "SampleRulesProvider",
    "Sampler",
    "Score",
    "SlotName",
    "Stateful",
    "StepMetricsReporter",
    "StepResult",
    "TableSizes",
    "TableView",
    "TakenBatch",
    "TaskGate",
    "TaskSource",
    "ToolRenderer",
    "Tracker",
    "TrainedRole",
    "TrainerBackend",
    "VersionPublisher",
    "Write",
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


Reward = Callable[[Task, str], float]
"""Scores a completion. A plain function that runs in a process pool, with a hard deadline."""


class Score(float):
    """The value of a reward and its parts: `Score(0.7, {"reward/right": 0.5, "reward/brief": 1})`."""

    parts: Mapping[str, float]
    """Value by metric: of each reward of a sum, without its weight, and of what a reward reports."""

    def __new__(cls, value: float, parts: Mapping[str, float] | None = None) -> Self:
        score = super().__new__(cls, value)
        score.parts = dict(parts or {})
        return score

    def __reduce__(self) -> tuple[type[Self], tuple[float, dict[str, float]]]:
        # with its parts from the process of the reward to that of the service
        return type(self), (float(self), dict(self.parts))


# --- tables: what bounds, picks and evicts the groups of one policy --------------------------------


@dataclass(frozen=True, slots=True)
class TableSizes:
    """The fixed numbers of a table, from which the worst staleness follows."""

    groups_per_batch: int
    max_staleness: int
    """S: groups that would be staler than this are dropped at the take, whatever the sampler."""
    engine_lag: int
    """L: number of versions that an engine may be behind the newest one."""
    reserve: int = 0
    """Number of versions of `max_staleness` that are reserved for replayed groups."""


@dataclass(frozen=True, slots=True)
class TableView:
    """What a limiter may know of its table at this moment."""

    num_running: int
    """Groups whose episodes are not all done."""
    num_ready: int
    """Complete groups that wait for a batch."""
    num_in_batches: int
    """Groups in batches whose step is not committed."""
    num_committed: int
    """Steps trained and published."""
    newest_version: int
    """-1 before the first one."""


class CompleteGroup(Protocol):
    """What samplers, removers and replay may know of a complete group."""

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token that is trained on."""
        ...

    @property
    def num_trained_tokens(self) -> int: ...

    @property
    def advantage_square_sum(self) -> float:
        """Sum of the squared advantages of all trained tokens."""
        ...


class Limiter(Protocol):
    """Decides how many groups may be in flight: drawn, and neither committed nor discarded.

    Deterministic. It may be asked any number of times; asking must change nothing.
    """

    def max_tickets(self, sizes: TableSizes) -> int:
        """The largest number that `tickets` ever gives, at least one batch. The samplers' worst staleness
        follows from it."""
        ...

    def tickets(self, table: TableView, sizes: TableSizes) -> int:
        """How many groups may be in flight now, from 0 to `max_tickets`. A lower number than before takes no
        group back."""
        ...


class Sampler(Protocol):
    """Picks the groups of a batch, and states how stale they can be at worst.

    Deterministic. It may be asked any number of times; asking must change nothing.
    """

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> Sequence[int] | None:
        """The ids of the next batch's groups, `num_groups` different ones of `ready`; None if the batch has
        to wait.

        `waiting`: all undecided groups that are in no batch, in draw order. `ready`: the complete ones among
        them, in the order in which they completed. Membership tests are cheap in both.
        """
        ...

    def worst_staleness(self, sizes: TableSizes, *, max_tickets: int) -> int:
        """The formula of the worst staleness of a picked group while no trainer restarts; at most
        `max_staleness`, to which every take holds it anyway.

        Raises: ValueError if the sampler does not work with these sizes.
        """
        ...


class Remover(Protocol):
    """Evicts complete groups when more of them wait than a batch holds. An evicted group gives its ticket
    back, and another one is drawn.

    Deterministic. It may be asked any number of times; asking must change nothing.
    """

    def remove(self, ready: Mapping[int, CompleteGroup], num_groups: int) -> Sequence[int]:
        """The ids of the groups of `ready` that go now; at least `num_groups`, a batch, must stay."""
        ...


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """What a limiter, sampler or remover with a memory learns of each batch, once, when it is first taken."""

    step: int
    trainer_version: int
    group_ids: tuple[int, ...]
    staleness: tuple[int, ...]
    """One entry per group."""
    num_stale: int
    """Groups that were dropped as too stale at this take."""


@runtime_checkable
class Stateful(Protocol):
    """What a component with a memory adds, so that a restarted dataflow decides as it would have before."""

    def state(self) -> dict[str, Any]:
        """Everything that it remembers, as plain data; it need not be a copy."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


@runtime_checkable
class BatchObserver(Stateful, Protocol):
    """A limiter, sampler or remover with a memory. Only `observe` changes it."""

    def observe(self, batch: TakenBatch) -> None: ...


# --- environments ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observation:
    """What an interactive environment answers to `reset` and to `step`.

    Example: `Observation("You are in a kitchen.")`; at the end `Observation(reward=1.0, is_done=True)`.
    """

    messages: str | Sequence[Message] = ()
    """What the policy is told next; a text is one message of the role `user`."""
    reward: float = 0.0
    """Reward of the reply that led here; 0 in the answer to `reset`."""
    is_done: bool = False
    """The episode is over: there is nothing to reply to."""
    tools: Sequence[ToolSpec] = ()
    """Functions that the chat template shows to the model; only the answer to `reset` may name any."""
    state_key: str = ""
    """Names the state that this shows, for credit that compares turns in the same state; empty: what is shown
    tells states apart."""


@runtime_checkable
class Environment(Protocol):
    """A set of tasks and what an answer is worth.

    A recipe names a class (`use`) and its arguments (`args`). The class is instantiated in every process that
    needs it: where tasks are drawn, where answers are scored, and in each rollout service. Only the rollout
    service calls `open` and `close`, once each; so import and start there what only episodes need.
    A subclass inherits what is not abstract here.
    """

    def tasks(self, split: str) -> TaskSource | Sequence[Task]:
        """The tasks of a split, e.g. `train` or `heldout`: always the same ones in the same order."""
        ...

    def score(self, task: Task, text: str) -> float:
        """Reward of a completion. Runs in a scoring process, under a hard deadline."""
        raise RolloutError(f"{type(self).__name__} does not score texts", is_retryable=False)

    def open(self) -> Awaitable[None] | None:
        """Starts what episodes need."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Ends what `open` started."""
        return None


@runtime_checkable
class InteractiveEnvironment(Environment, Protocol):
    """An environment that answers to the policy's replies. Many episodes run at the same time.

    Methods may be `async`. One that is not runs outside the event loop, in a thread that belongs to the
    episode. An exception, or a call that takes too long, fails the episode; it is never a reward of 0.
    """

    def reset(self, task: Task, seed: int) -> tuple[Any, Observation] | Awaitable[tuple[Any, Observation]]:
        """Begins an episode: its state, which is whatever `step` needs, and the first observation."""
        ...

    def step(self, state: Any, reply: str) -> Observation | Awaitable[Observation]:
        """Takes the policy's reply and says what happens; `state` may be changed in place."""
        ...

    def end(self, state: Any) -> Awaitable[None] | None:
        """Releases what an episode holds. Called once per `reset` that succeeded, however the episode
        ended."""
        return None


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


SlotName = Literal["live", "pinned"]
"""The weight slots of an engine: `live` follows the newest version, `pinned` holds one for evaluation."""


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
class ImageRenderer(Renderer, Protocol):
    """A renderer that can show images to the model."""

    @property
    def sees_images(self) -> bool:
        """Whether its model sees any."""
        ...

    def media_of(self, messages: Sequence[Message], token_ids: Sequence[int]) -> tuple[MediaRef, ...]:
        """The images of `messages` at their places among `token_ids`, which `render` or `extend` gave for
        them.

        Raises: ImageError if the tokens do not show exactly these images.
        """
        ...


@runtime_checkable
class ToolRenderer(Renderer, Protocol):
    """A renderer that can show tools to the model."""

    def with_tools(self, tools: Sequence[ToolSpec]) -> Renderer:
        """The renderer of conversations with these tools.

        Raises: RolloutError if the chat template cannot show tools.
        """
        ...


@runtime_checkable
class ReasoningRenderer(Renderer, Protocol):
    """A renderer that knows whether its chat template makes the model begin with reasoning."""

    def opens_reasoning(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with <think>, so that the completion begins with reasoning."""
        ...


# --- training and publishing ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a backend reports after the optimizer steps of one batch."""

    metrics: tuple[MetricItem, ...]


Write = Callable[[], None]
"""Writes a copy to disk: called once, in any thread, while later steps go on."""


class Learner(Protocol):
    """Makes the optimizer steps of each batch of one policy: what the trainer's loop drives.

    `trainer.learner` makes them of the verbs of a `TrainerBackend`, by the loss of the recipe.
    """

    def train_step(self, batch: Batch) -> StepResult:
        """Does all optimizer steps of one batch."""
        ...

    def export(self) -> Iterable[HostTensor]:
        """As `TrainerBackend.export`."""
        ...

    def save(self, folder: Path) -> Write | None:
        """Copies what is needed to continue bit-exactly: model, optimizer, random state, steps done.

        Returns: what writes the copy into the existing folder, or None if it is written already.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""
        ...


ModelRole = Literal["policy", "critic", "reference", "teacher"]
"""A model of a policy's trainer. `policy` and `critic` are trained; the others are frozen."""
TrainedRole = Literal["policy", "critic"]
EntropyUse = Literal["none", "value", "gradient"]


@dataclass(frozen=True, slots=True)
class AdamStep:
    """The settings of one optimizer step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    """Larger gradients are scaled down to this norm; infinity leaves all as they are."""


class Objective(Protocol):
    """What a pass minimizes. A backend calls it once per microbatch, and takes the gradient of the result."""

    @property
    def entropy(self) -> EntropyUse:
        """Whether the objective reads the entropies of the policy's distributions, and their gradient."""
        ...

    def __call__(
        self, trained: NDArray[np.int64], predicted: "Tensor", entropies: "Tensor | None"
    ) -> "Tensor":
        """A scalar to be minimized; the results of all microbatches are summed.

        `trained` [T]: positions in the trained columns. `predicted` [T]: logprobs at the sampling
        temperature, in nats, or a critic's values. `entropies` [T]: in nats; None if `entropy` is `none`.
        """
        ...


@runtime_checkable
class TrainerBackend(Protocol):
    """Owns the models and optimizers of one policy, and computes with them; what is computed, others decide.

    One caller at a time. `parts` are the microbatches of a pass, as `cut` gives them.
    """

    @property
    def vocab_size(self) -> int:
        """Entries of the policy's embedding table."""
        ...

    def cut(
        self, columns: Columns, samples: NDArray[np.int64], *, model: ModelRole = "policy"
    ) -> Sequence[NDArray[np.int64]]:
        """Cuts samples into microbatches that fit the device. Those without trained tokens are left out."""
        ...

    def forward_backward(
        self,
        columns: Columns,
        parts: Sequence[NDArray[np.int64]],
        objective: Objective,
        *,
        model: TrainedRole = "policy",
    ) -> int:
        """Adds the gradient of an objective to those since the last `optim_step`.

        Returns: how many tokens the model computed, padding included.
        """
        ...

    def optim_step(self, step: AdamStep, *, model: TrainedRole = "policy") -> float:
        """One step of AdamW with the gradients that were added, which are then dropped.

        Returns: the gradient's norm before it is clipped. If it is not finite, the weights stay as they are.
        Raises: TrainingError if there is no gradient.
        """
        ...

    def reset_optimizer(self) -> None:
        """Forgets the state of the policy's optimizer, and drops the gradients."""
        ...

    def logprobs(
        self, columns: Columns, parts: Sequence[NDArray[np.int64]], *, model: ModelRole = "policy"
    ) -> NDArray[np.float32]:
        """[P]: logprobs of the trained tokens of `parts` at their sampling temperature; NaN elsewhere."""
        ...

    def values(self, columns: Columns, parts: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """[P]: the critic's values before the trained tokens of `parts`; NaN elsewhere."""
        ...

    def export(self) -> Iterable[HostTensor]:
        """The policy's weights as they are at this call, with Hugging Face names and layout.

        The result is iterated once, in any thread, while later steps go on; they do not change it. Where
        several ranks share a version (`weights.ranges`), each gives its elements of every tensor.
        """
        ...

    def save(self, folder: Path, *, num_steps_done: int) -> Write:
        """Copies what is needed to continue bit-exactly. Returns: what writes the copy into the folder."""
        ...

    def load(self, folder: Path) -> int:
        """Restores what `save` wrote. Returns: `num_steps_done`."""
        ...


@runtime_checkable
class StepMetricsReporter(Protocol):
    """What a `TrainerBackend` may have besides: numbers of its own about each step."""

    def step_metrics(self) -> Mapping[str, float]:
        """Name -> value, since the last call. Every rank of a trainer calls it at the end of a step."""
        ...


@runtime_checkable
class SampleRulesProvider(Protocol):
    """Optional interface of a `Learner` or a `TrainerBackend`: what it needs of each trajectory."""

    @property
    def sample_rules(self) -> SampleRules:
        """Without the streams of the loss in a backend, with them in a learner."""
        ...


class VersionPublisher(Protocol):
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


LAUNCHER = "launcher"
"""What `ProcessSpec.near` calls the process that runs the launcher."""

MACHINE_LOST = -1_000
"""What `ProcessHandle.wait` returns for a process whose machine went away. It is no crash of the process, so
it is started again as often as that happens. No exit code and no signal has this number."""


@dataclass(frozen=True, slots=True)
class Needs:
    """What a process reserves on the machine that it runs on. A launcher of one machine reserves nothing."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    """0 reserves none."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels of the machine, in the words of the cluster's scheduler."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a run: what to start, and what it needs of the machine that it runs on."""

    name: str
    argv: tuple[str, ...]
    """Program and arguments. None of them is a secret, since other users of a machine can read them."""
    env: Mapping[str, str]
    """Environment variables to add. None of them is a secret."""
    log_path: Path
    """File to append its output to. Its last lines explain a crash."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Further environment variables, whose values must appear in no command line, log or readable file."""
    address: tuple[str, int] | None = None
    """Host and port that it listens at; None if it only calls others."""
    reads: tuple[Path, ...] = ()
    """Files and folders that must be at these paths when it starts. They do not change during the run."""
    writes: tuple[Path, ...] = ()
    """Folders that it must find again as it left them when it is restarted."""
    scratch: tuple[Path, ...] = ()
    """Folders that it may fill. They need not outlive it, so on another machine an empty folder does."""
    near: str = ""
    """Name of the process that it shares a machine with, because they exchange files or speak over loopback.
    `launcher` is the launcher itself. Empty: it can run on any machine."""
    needs: Needs = Needs()
    max_restarts: int = 5
    ends_with_run: bool = False
    """True if exit code 0 is its normal end. Otherwise every end that nobody asked for is a crash."""
    longest_silence_s: float = 0.0
    """The process is restarted after this many seconds without a sign of life; 0 means never."""


@runtime_checkable
class ProcessHandle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Its id, positive, for people: the process id, or that of a job."""
        ...

    async def wait(self) -> int:
        """Waits for the end of the process. Returns its exit code, which is negative for a signal, or
        `MACHINE_LOST`. Several callers may wait."""
        ...

    def terminate(self) -> None:
        """Asks it to stop (SIGTERM). Nothing happens if it has ended."""
        ...

    def kill(self) -> None:
        """Ends it at once (SIGKILL). Nothing happens if it has ended."""
        ...

    async def silence(self, longest_s: float) -> str:
        """Waits until the process has shown no sign of life for `longest_s` seconds.

        Asks the process to log the stacks of its threads, then returns what is known of its state, in words.
        Never returns for a process that has not shown a first sign of life.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """What a launcher knows of the life of a process."""

    silent_s: float | None = None
    """Seconds since its last sign of life; None before the first one."""
    works: bool = True
    """False if the process itself is stopped or hangs."""
    condition: str = ""
    """What is wrong with it, or with a process that it started, and what a person can do, in words. Empty if
    nothing is known to be wrong."""
    is_starved: bool = False
    """It would work if its machine gave it processor time."""


@runtime_checkable
class LifeReporter(Protocol):
    """What a `ProcessHandle` may know besides: how its process is now.

    It is shown to people; whether a process is restarted is decided by `ProcessHandle.silence`.
    """

    def life(self) -> ProcessLife:
        """Returns at once. Called twice per second."""
        ...


class Launcher(Protocol):
    """Starts the processes of one run; there is one implementation per kind of cluster."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process. Called again for a restart, after the earlier process has ended.

        It may wait for a machine with room. If it is cancelled meanwhile, nothing is left behind.
        """
        ...

    def close(self) -> None:
        """Called once all processes have ended."""
        ...


@runtime_checkable
class MultiMachineLauncher(Protocol):
    """What a `Launcher` may be besides: one that starts processes on several machines."""

    @property
    def host(self) -> str:
        """Address of the launcher's machine at which the other machines reach it."""
        ...


# --- metrics --------------------------------------------------------------------------------------


class RunPage(Protocol):
    """A page about a run that a browser can open while the run lasts: the time in its `async with`.

    Made as `attr(run_dir, log_path)` from an entry point of the group `astraflow.pages`. It may raise OSError
    if it can't listen.
    """

    @property
    def url(self) -> str:
        """Where a browser finds the page."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...


class Tracker(Protocol):
    """Shows the metrics of a run elsewhere. It has a process of its own, so it may block, and may fail.

    Made as `attr(run, **args)` with a `recipe.trackers.TrackedRun`.
    """

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes further lines of `metrics.jsonl`, in their order. Lines whose `write` did not return come
        again."""
        ...

    def close(self) -> None:
        """Called once after the last row."""
        ...


@runtime_checkable
class EpisodeTracker(Protocol):
    """What a `Tracker` may have besides: a table of sample episodes for each evaluation."""

    def write_episodes(self, row: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> None:
        """Takes episodes of the evaluation that `row` of `metrics.jsonl` tells: `task`, `score`, `version`
        and `text` of each. After a crash they may come again."""
        ...

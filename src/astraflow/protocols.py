"""The interfaces of all parts that a recipe or a caller can replace.

Each interface is a `Protocol` of a few methods (or a plain function), with the values that only it uses. Each
has at least two implementations, one of which is used by tests. A class implements an interface by having its
methods; nothing is inherited or registered.

Values that several interfaces use are defined elsewhere: items sent over the network in `types`, facts about
groups in `types.facts`, weights in `types.host_tensors`.
"""
# size: one page for all interfaces; splitting it would hide some of them

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from astraflow.errors import RolloutError
from astraflow.types import (
    Batch,
    BusySpan,
    GenerateRequest,
    Generation,
    Manifest,
    Message,
    MetricItem,
    SampleRules,
    Task,
    ToolSpec,
)
from astraflow.types.facts import Outcome
from astraflow.types.host_tensors import HostTensor, WeightSnapshot
from astraflow.types.model_text import without_reasoning
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
    "CompletionText",
    "Curator",
    "Engine",
    "EntropyUse",
    "Environment",
    "EpisodeTracker",
    "HostedModel",
    "InteractiveEnvironment",
    "Judge",
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
    "Remover",
    "Renderer",
    "Reward",
    "SampleRulesProvider",
    "Sampler",
    "Score",
    "Scorer",
    "ScoringCall",
    "SlotName",
    "Stateful",
    "StepMetricsReporter",
    "StepResult",
    "TableSizes",
    "TableView",
    "TakenBatch",
    "TaskGate",
    "TaskSource",
    "TokenScores",
    "TopScorer",
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


@runtime_checkable
class Stateful(Protocol):
    """A component with state, so that a restarted dataflow makes the same decisions. Optional for parts of a
    table."""

    def state(self) -> dict[str, Any]:
        """The complete state as plain data; it need not be a copy."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


class Curator(Stateful, Protocol):
    """Decides which task is drawn next. Deterministic: its only state is what `state` returns."""

    def next(self) -> int:
        """Index of the next task to draw."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learns the outcome of a completed group."""


class TaskGate(Stateful, Protocol):
    """Skips some of the tasks that a curator proposes.

    Deterministic, like `Curator`. Float values in its state are also reported as metrics.
    """

    def why_skip(self, task_idx: int) -> str:
        """Why the task is skipped this time, in one word; empty if it is drawn."""
        ...

    def observe(self, outcome: Outcome) -> None:
        """Learns the outcome of a completed group."""


Reward = Callable[[Task, str], float]
"""Scores a completion. A plain function that runs in a process pool, with a hard deadline."""


class Score(float):
    """The value of a reward and its parts: `Score(0.7, {"reward/right": 0.5, "reward/brief": 1})`."""

    parts: Mapping[str, float]
    """Values by metric: each reward of a sum, without its weight, and everything that a reward reports."""

    def __new__(cls, value: float, parts: Mapping[str, float] | None = None) -> Self:
        score = super().__new__(cls, value)
        score.parts = dict(parts or {})
        return score

    def __reduce__(self) -> tuple[type[Self], tuple[float, dict[str, float]]]:
        # pickles the parts too, for the way from the scoring process to the service
        return type(self), (float(self), dict(self.parts))


class CompletionText(str):
    """The text of a completion that a policy sampled, with the ids of its tokens.

    Example: `CompletionText.of("5", (20, 2)).token_ids` is `(20, 2)`.
    """

    token_ids: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: str, token_ids: tuple[int, ...]) -> Self:
        """Returns the text with its ids."""
        made = cls(text)
        made.token_ids = token_ids
        return made


@dataclass(frozen=True, slots=True)
class ScoringCall:
    """A completion to score."""

    task: Task
    text: str
    """The part of the reply that `tasks.extract` selects."""
    completion: str
    """The whole completion with its reasoning: a `CompletionText`, unless the workflow changed it."""
    extract: str = "whole"
    """The value of `tasks.extract`."""

    @property
    def reply(self) -> str:
        """The completion without its reasoning; empty if the reasoning never ends."""
        return without_reasoning(self.completion)


class Scorer(Protocol):
    """Scores one completion per call. The config of a reward makes it.

    A subclass inherits what is not abstract here.
    """

    @property
    def is_async(self) -> bool:
        """Whether every call returns an awaitable, so that many calls can run at a time."""
        return False

    @property
    def gets_all(self) -> bool:
        """Whether it gets whole completions as `text`, whatever `tasks.extract` says."""
        return False

    @property
    def queue(self) -> str:
        """What its calls wait for, in words; empty if it doesn't know."""
        return ""

    def load(self) -> None:
        """Imports the libraries that calls need, so that no call waits for them.

        Raises: ConfigError if one cannot be imported; ScorerError if one does not work.
        """

    async def open(self) -> None:
        """Starts what calls need, in the event loop in which they are awaited."""

    async def close(self) -> None:
        """Ends what `open` or a call started."""

    def __call__(self, call: ScoringCall) -> object:
        """A number, a `Score`, a mapping with `score`, or an awaitable of one of these.

        Raises: RolloutError or DataError if the completion cannot be scored; that is never a score of 0.
        """
        ...


class HostedModel(Protocol):
    """A policy that a rollout service serves."""

    @property
    def engine(self) -> "Engine": ...

    @property
    def renderer(self) -> "Renderer": ...


class Judge(Protocol):
    """Asks a model what texts are worth. The config of a reward makes it, for one rollout service."""

    @property
    def unclear(self) -> float:
        """Value of a completion without the part that is judged."""
        ...

    async def start(self) -> None:
        """Prepares the calls. Raises: UnavailableError or ConfigError if the model cannot be asked."""

    async def value(self, task: Task, text: str, policies: Mapping[str, HostedModel]) -> tuple[float, bool]:
        """The value of a text, and whether the model gave a verdict.

        `policies`: those that the service serves. Raises: RolloutError if the model cannot be asked.
        """
        ...

    async def close(self) -> None:
        """Ends what `start` or a call started."""


# --- tables: limiting, picking and evicting the groups of one policy ------------------------------


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
    max_replaced: int = 0
    """With `replay.share`, the largest number of a batch's groups that are replayed."""

    @property
    def least_fresh(self) -> int:
        """Smallest number of fresh groups in a batch."""
        return self.groups_per_batch - self.max_replaced


@dataclass(frozen=True, slots=True)
class TableView:
    """A limiter's view of its table at this moment."""

    num_running: int
    """Number of groups whose episodes are not all done."""
    num_ready: int
    """Number of complete groups that wait for a batch."""
    num_in_batches: int
    """Number of groups in batches whose step is not committed."""
    num_committed: int
    """Number of steps trained and published."""
    newest_version: int
    """-1 before the first version."""


class CompleteGroup(Protocol):
    """A complete group, as samplers, removers and replay see it."""

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token that is trained on."""
        ...

    @property
    def num_trained_tokens(self) -> int:
        """Without those of samples that a rule set to zero."""
        ...

    @property
    def advantage_square_sum(self) -> float:
        """Sum of the squared advantages of all trained tokens."""
        ...


class Limiter(Protocol):
    """Decides how many groups may be in flight: drawn, but neither committed nor discarded.

    Deterministic. Methods may be called any number of times, and must not change the limiter.
    """

    def max_tickets(self, sizes: TableSizes) -> int:
        """The largest result of `tickets`, at least one batch. It determines samplers' worst staleness."""
        ...

    def tickets(self, table: TableView, sizes: TableSizes) -> int:
        """How many groups may be in flight now, 0 to `max_tickets`. A lower number revokes no group."""
        ...


class Sampler(Protocol):
    """Picks the groups of a batch, and states their worst staleness.

    Deterministic. Methods may be called any number of times, and must not change the sampler.
    """

    def pick(
        self, waiting: Collection[int], ready: Mapping[int, CompleteGroup], num_groups: int
    ) -> Sequence[int] | None:
        """The ids of the next batch's groups, `num_groups` different ones from `ready`; None if the batch
        must wait.

        `waiting`: all undecided groups that are not in a batch, in draw order. `ready`: the complete ones
        among them, in order of completion. Membership tests are cheap in both.
        """
        ...

    def worst_staleness(self, sizes: TableSizes, *, max_tickets: int) -> int:
        """The worst staleness of a picked group as long as no trainer restarts; at most `max_staleness`,
        which every take enforces anyway.

        Raises: ValueError if the sampler does not work with these sizes.
        """
        ...


class Remover(Protocol):
    """Evicts complete groups when more of them wait than fit into a batch. An evicted group returns its
    ticket, and another group is drawn.

    Deterministic. Methods may be called any number of times, and must not change the remover.
    """

    def remove(self, ready: Mapping[int, CompleteGroup], num_groups: int) -> Sequence[int]:
        """The ids of the groups to evict from `ready` now; at least `num_groups`, one batch, must remain."""
        ...


@dataclass(frozen=True, slots=True)
class TakenBatch:
    """What a stateful limiter, sampler or remover learns about each batch, once, when it is first taken."""

    step: int
    trainer_version: int
    group_ids: tuple[int, ...]
    staleness: tuple[int, ...]
    """One entry per group."""
    num_stale: int
    """Number of groups dropped as too stale at this take."""


@runtime_checkable
class BatchObserver(Stateful, Protocol):
    """A stateful limiter, sampler or remover. Only `observe` changes its state."""

    def observe(self, batch: TakenBatch) -> None: ...


# --- environments ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Observation:
    """What an interactive environment returns from `reset` and `step`.

    Example: `Observation("You are in a kitchen.")`; at the end `Observation(reward=1.0, is_done=True)`.
    """

    messages: str | Sequence[Message] = ()
    """The next messages to the policy; a string is one message with role `user`."""
    reward: float = 0.0
    """Reward of the reply that led here; 0 from `reset`."""
    is_done: bool = False
    """Whether the episode is over, so that no reply is expected."""
    tools: Sequence[ToolSpec] = ()
    """Functions that the chat template shows to the model; only `reset` may return any."""
    state_key: str = ""
    """Identifies the state, for credit that compares turns in the same state. Empty: the messages do."""


@runtime_checkable
class Environment(Protocol):
    """A set of tasks, and the scoring of answers.

    A recipe names a class (`use`) and its arguments (`args`). The class is instantiated in every process that
    needs it: the one that draws tasks, those that score answers, and each rollout service. Only the rollout
    service calls `open` and `close`, once each, so import and start there what only episodes need.
    A subclass inherits the methods that are not abstract here.
    """

    def tasks(self, split: str) -> TaskSource | Sequence[Task]:
        """The tasks of a split, e.g. `train` or `heldout`, always the same in the same order."""
        ...

    def score(self, task: Task, text: str) -> float:
        """Reward of a reply. Runs in a scoring process, under a hard deadline."""
        raise RolloutError(f"{type(self).__name__} does not score texts", is_retryable=False)

    def open(self) -> Awaitable[None] | None:
        """Starts what episodes need."""
        return None

    def close(self) -> Awaitable[None] | None:
        """Ends what `open` started."""
        return None


@runtime_checkable
class InteractiveEnvironment(Environment, Protocol):
    """An environment that responds to the policy's replies. Many episodes run at the same time.

    Methods may be `async`. Other methods run outside the event loop, in the episode's own thread. An
    exception, or a call that takes too long, fails the episode; it never becomes a reward of 0.
    """

    def reset(self, task: Task, seed: int) -> tuple[Any, Observation] | Awaitable[tuple[Any, Observation]]:
        """Begins an episode: its state, which is whatever `step` needs, and the first observation."""
        ...

    def step(self, state: Any, reply: str) -> Observation | Awaitable[Observation]:
        """Processes the policy's reply and returns the next observation; may change `state` in place."""
        ...

    def end(self, state: Any) -> Awaitable[None] | None:
        """Releases an episode's resources. Called once per successful `reset`, however the episode ended."""
        return None


# --- rollout --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capacity:
    """The number of requests that an engine can run, and the number that it has."""

    num_slots: int
    """Largest number of requests that run at once."""
    num_running: int
    num_waiting: int
    max_context: int
    """Largest number of tokens of a request: prompt and completion together."""
    generated_tokens: int
    """Tokens generated since the engine started; never falls."""
    kv_frac: float | None = None
    """Share of the KV cache that requests use; None if the engine's slots can't run out of it."""
    num_preemptions: int = 0
    """Requests that lost their KV cache to others since the engine started; never falls."""


class TokenScores(NamedTuple):
    """Logprobs, in nats, of the tokens of a sequence, and of the most likely ones in place of each."""

    logprobs: NDArray[np.float32]
    """[T]."""
    top_ids: NDArray[np.int32]
    """[T, K] from the most likely token on."""
    top_logprobs: NDArray[np.float32]
    """[T, K]."""


SlotName = Literal["live", "pinned"]
"""The weight slots of an engine: `live` follows the newest version, `pinned` holds one for evaluation."""


class Engine(Protocol):
    """Generates for one policy. All methods are called from one event loop."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Returns tokens, their logprobs, and the version that made each token. Raises: RolloutError; if the
        caller is cancelled, a CancelledError whose argument may be the beginning of the completion, with the
        finish reason `abort` and without streams."""
        ...

    async def score(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Logprobs [T - 1] of tokens 1..T-1 at temperature 1 under the newest version."""
        ...

    async def load(self, snapshot: WeightSnapshot, *, slot: str) -> None:
        """Installs a version in slot `live` (running requests continue with it) or `pinned` (for evaluation).

        Returns once the version is being served. Does nothing else if the slot already holds the version.

        Raises: WeightsError; the engine then keeps serving the old version.
        """

    async def pause(self) -> None:
        """Stops generating, and keeps all requests."""

    async def resume(self) -> None: ...

    def capacity(self) -> Capacity:
        """The current numbers. Raises: ServiceError if the engine has failed for good; this ends the
        service."""
        ...

    def take_spans(self) -> tuple[BusySpan, ...]:
        """Wall-clock spans of generation since the last call."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class TopScorer(Protocol):
    """Optional interface of an `Engine`, for distillation from more than the sampled tokens."""

    async def score_top(self, token_ids: Sequence[int], num: int, *, temperature: float = 1.0) -> TokenScores:
        """Scores tokens 1..T-1, with the `num` most likely ones in place of each, under the newest version.
        Raises: RolloutError, also if it can't do so at this temperature."""
        ...


class Renderer(Protocol):
    """Applies the chat template. Extends exact token prefixes, and never tokenizes sampled text again."""

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
        """The assistant's message that the sampled ids represent, without stop tokens."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]: ...


# --- training and publishing ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of training on one batch."""

    metrics: tuple[MetricItem, ...]


Write = Callable[[], None]
"""Writes a copy to disk: called once, in any thread, while later steps run."""


class Learner(Protocol):
    """Makes the optimizer steps of each batch of one policy, driven by the trainer's loop.

    `trainer.learner` implements it with the operations of a `TrainerBackend` and the loss of the recipe.
    """

    def train_step(self, batch: Batch) -> StepResult:
        """Makes all optimizer steps of one batch."""
        ...

    def export(self) -> Iterable[HostTensor]:
        """See `TrainerBackend.export`."""
        ...

    def save(self, folder: Path) -> Write | None:
        """Copies everything needed to continue bit-exactly: model, optimizer, random state, steps done.

        Returns the function that writes the copy into the existing folder, or None if it is already written.
        """
        ...

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote."""


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
    """Larger gradients are scaled down to this norm; infinity never scales."""


class Objective(Protocol):
    """What a pass minimizes. A backend calls it once per microbatch and differentiates the result."""

    @property
    def entropy(self) -> EntropyUse:
        """Whether the objective needs the entropies of the policy's distributions, or also their gradient."""
        ...

    @property
    def alternatives(self) -> str:
        """The stream with the ids of K other tokens in place of each trained one, whose logprobs the
        objective needs too; empty: none."""
        ...

    def __call__(
        self, trained: NDArray[np.int64], predicted: "Tensor", entropies: "Tensor | None"
    ) -> "Tensor":
        """A scalar to minimize; the results of all microbatches are summed.

        `trained` [T]: positions in the trained columns. `predicted` [T]: logprobs at the sampling
        temperature, in nats, or a critic's values; with `alternatives`, [T, 1 + K], the trained token first.
        `entropies` [T]: in nats; None if `entropy` is `none`.
        """
        ...


@runtime_checkable
class TrainerBackend(Protocol):
    """Owns the models and optimizers of one policy, and computes what its caller decides.

    One caller at a time. `parts` are the microbatches of a pass, as returned by `cut`.
    """

    @property
    def vocab_size(self) -> int:
        """Number of entries in the policy's embedding table."""
        ...

    def cut(
        self, columns: Columns, samples: NDArray[np.int64], *, model: ModelRole = "policy"
    ) -> Sequence[NDArray[np.int64]]:
        """Cuts samples into microbatches that fit the device, and omits those without trained tokens."""
        ...

    def forward_backward(
        self,
        columns: Columns,
        parts: Sequence[NDArray[np.int64]],
        objective: Objective,
        *,
        model: TrainedRole = "policy",
    ) -> int:
        """Adds the gradient of an objective to the gradients since the last `optim_step`.

        Returns the number of tokens that the model computed, including padding.
        """
        ...

    def optim_step(self, step: AdamStep, *, model: TrainedRole = "policy") -> float:
        """Makes one step of AdamW with the accumulated gradients, then drops them.

        Returns the gradient's norm before clipping. If it is not finite, the weights stay unchanged.
        Raises: TrainingError if there is no gradient.
        """
        ...

    def reset_optimizer(self) -> None:
        """Resets the state of the policy's optimizer, and drops the gradients."""

    def logprobs(
        self, columns: Columns, parts: Sequence[NDArray[np.int64]], *, model: ModelRole = "policy"
    ) -> NDArray[np.float32]:
        """[P]: logprobs of the trained tokens of `parts` at their sampling temperature; NaN elsewhere."""
        ...

    def values(self, columns: Columns, parts: Sequence[NDArray[np.int64]]) -> NDArray[np.float32]:
        """[P]: the critic's values before the trained tokens of `parts`; NaN elsewhere."""
        ...

    def export(self) -> Iterable[HostTensor]:
        """The policy's weights at the time of this call, with Hugging Face names and layout.

        The result is iterated once, in any thread, while later steps run, which do not change it. If several
        ranks share a version (`weights.ranges`), each yields its elements of every tensor.
        """
        ...

    def save(self, folder: Path, *, num_steps_done: int) -> Write:
        """Copies everything needed to continue bit-exactly. Returns the function that writes the copy."""
        ...

    def load(self, folder: Path) -> int:
        """Restores what `save` wrote. Returns `num_steps_done`."""
        ...


@runtime_checkable
class StepMetricsReporter(Protocol):
    """Optional interface of a `TrainerBackend` that reports its own metrics of each step."""

    def step_metrics(self) -> Mapping[str, float]:
        """Metrics since the last call, by name. Every rank of a trainer calls this at the end of a step."""
        ...


@runtime_checkable
class SampleRulesProvider(Protocol):
    """Optional interface of a `Learner` or a `TrainerBackend` that has requirements for each trajectory."""

    @property
    def sample_rules(self) -> SampleRules:
        """The requirements. A learner includes the streams of its loss; a backend does not."""
        ...


class VersionPublisher(Protocol):
    """Publishes the versions of a trainer's policy."""

    async def publish(
        self, policy: str, version: int, tensors: Sequence[HostTensor], files: Mapping[str, Path]
    ) -> Manifest:
        """Makes a version durable and downloadable. `files`: the small files of the model folder, with the
        first version of a session."""
        ...

    async def forget(self, policy: str, needed: Sequence[int]) -> None:
        """Allows the publisher to delete versions that are neither needed nor among the newest."""


# --- processes ------------------------------------------------------------------------------------


LAUNCHER = "launcher"
"""Name of the launcher's own process in `ProcessSpec.near`."""

MACHINE_LOST = -1_000
"""Result of `ProcessHandle.wait` for a process whose machine is gone. This does not count as a crash, so the
process is restarted any number of times. No exit code or signal has this number."""


@dataclass(frozen=True, slots=True)
class Needs:
    """The resources that a process reserves on its machine. A single-machine launcher reserves nothing."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory_bytes: int = 0
    """0 reserves none."""
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Required labels of the machine, in the syntax of the cluster's scheduler."""
    gang: tuple[str, ...] = ()
    """Names of all processes, with this one, that need machines of their own at once, or none of them any."""


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process of a run: what to start, and what it needs on its machine."""

    name: str
    argv: tuple[str, ...]
    """Program and arguments, without secrets, since other users of the machine can read them."""
    env: Mapping[str, str]
    """Environment variables to add, without secrets."""
    log_path: Path
    """File to append its output to. Its last lines explain a crash."""
    secrets: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Environment variables whose values must not appear in any command line, log or readable file."""
    address: tuple[str, int] | None = None
    """Host and port at which it listens; None if it only calls others."""
    reads: tuple[Path, ...] = ()
    """Files and folders that must exist at these paths when it starts. They do not change during the run."""
    writes: tuple[Path, ...] = ()
    """Folders whose content it must find unchanged after a restart."""
    scratch: tuple[Path, ...] = ()
    """Folders that it may fill, and whose content it does not need after a restart."""
    near: str = ""
    """Name of the process with which it must share a machine, because they exchange files or use loopback.
    `launcher` is the launcher itself. Empty: it can run on any machine."""
    needs: Needs = Needs()
    max_restarts: int = 5
    ends_with_run: bool = False
    """True if exit code 0 is its normal end. Otherwise, every unrequested end is a crash."""
    memory_advice: str = ""
    """What a person can change so that it needs less memory, for the message about a lack of memory."""
    longest_silence_s: float = 0.0
    """The process is restarted after this many seconds without a sign of life; 0 means never."""


@runtime_checkable
class ProcessHandle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """A positive id for people: the process id, or the id of a job."""
        ...

    async def wait(self) -> int:
        """Waits for the end of the process. Returns its exit code, which is negative for a signal, or
        `MACHINE_LOST`. Several callers may wait."""
        ...

    def terminate(self) -> None:
        """Asks the process to stop (SIGTERM). Does nothing if it has ended."""

    def kill(self) -> None:
        """Ends the process immediately (SIGKILL). Does nothing if it has ended."""

    async def silence(self, longest_s: float) -> str:
        """Waits until the process has shown no sign of life for `longest_s` seconds.

        Asks the process to log the stacks of its threads, then returns a description of its state. Never
        returns for a process that has not shown a first sign of life.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessLife:
    """What a launcher knows about the state of a process."""

    silent_s: float | None = None
    """Seconds since its last sign of life; None before the first one."""
    works: bool = True
    """False if the process itself is stopped or hangs."""
    condition: str = ""
    """The problem of the process, or of a process that it started, and what a person can do about it. Empty
    if no problem is known."""
    is_starved: bool = False
    """Whether it only lacks CPU time."""
    memory_bytes: int = 0
    """The memory that it uses; 0 if unknown, or if it runs on another machine than the launcher."""


@runtime_checkable
class LifeReporter(Protocol):
    """Optional interface of a `ProcessHandle` that reports the current state of its process.

    The state is shown to people; `ProcessHandle.silence` decides whether a process is restarted.
    """

    def life(self) -> ProcessLife:
        """The current state. Must return immediately, since it is called twice per second."""
        ...


class Launcher(Protocol):
    """Starts the processes of one run, with one implementation per kind of cluster."""

    async def start(self, spec: ProcessSpec) -> ProcessHandle:
        """Starts a process. Called again for a restart, after the earlier process has ended.

        May wait for a machine with room. If cancelled meanwhile, it must leave nothing behind.
        """
        ...

    def close(self) -> None:
        """Called once all processes have ended."""


@runtime_checkable
class MultiMachineLauncher(Protocol):
    """Optional interface of a `Launcher` that uses several machines."""

    @property
    def host(self) -> str:
        """Address at which other machines reach the launcher's machine."""
        ...


# --- metrics --------------------------------------------------------------------------------------


class Tracker(Protocol):
    """Shows the metrics of a run elsewhere. It runs in its own process, so it may block or fail.

    Created as `attr(run, **args)` with a `recipe.trackers.TrackedRun`.
    """

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Takes further lines of `metrics.jsonl`, in order. They are sent again if it does not return."""

    def close(self) -> None:
        """Called once after the last row."""


@runtime_checkable
class EpisodeTracker(Protocol):
    """Optional interface of a `Tracker` that shows sample episodes of each evaluation."""

    def write_episodes(self, row: Mapping[str, Any], episodes: Sequence[Mapping[str, Any]]) -> None:
        """Takes episodes of the evaluation in `row` of `metrics.jsonl`: `task`, `score`, `version` and `text`
        of each. After a crash, they may be sent again."""

"""The arguments and results of the verbs, named and shaped as in the Tinker API, and conversion to columns.

A datum is a sequence of N + 1 tokens: `model_input` holds the first N tokens, `target_tokens` the last N.
Every input of a loss has N entries, one per target. Callers may also pass objects of the SDK's own types,
because the code uses only attributes that both kinds of types have.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from astraflow import wire
from astraflow.errors import DataError
from astraflow.types import Batch, Sample
from astraflow.types.token_columns import Columns

__all__ = [
    "AdamParams",
    "Datum",
    "ForwardBackwardOutput",
    "LoadWeightsResponse",
    "ModelInput",
    "OptimStepResponse",
    "RunBatch",
    "SampleResponse",
    "SampledSequence",
    "SamplingParams",
    "SaveWeightsResponse",
    "TensorData",
    "columns_from_data",
    "run_batch",
]

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ModelInput:
    """The tokens of a sequence.

    Example: `ModelInput.from_ints([5, 6, 7])`.
    """

    tokens: tuple[int, ...]

    @classmethod
    def from_ints(cls, tokens: Sequence[int]) -> "ModelInput":
        """Makes an input of these token ids."""
        return cls(tuple(tokens))

    def to_ints(self) -> list[int]:
        """Returns the token ids."""
        return list(self.tokens)

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class TensorData:
    """A column of numbers.

    Example: `TensorData.from_numpy(logprobs).tolist()`.
    """

    data: Sequence[Any] | NDArray[Any]
    dtype: str = "float32"
    """`float32` or `int64`."""
    shape: Sequence[int] | None = None

    @classmethod
    def from_numpy(cls, array: NDArray[Any]) -> "TensorData":
        """Makes a column that holds an array."""
        is_float = np.issubdtype(array.dtype, np.floating)
        return cls(array, "float32" if is_float else "int64", array.shape)

    @classmethod
    def from_torch(cls, tensor: Any) -> "TensorData":
        """Makes a column that holds the numbers of a torch tensor."""
        return cls.from_numpy(tensor.detach().cpu().numpy())

    def to_numpy(self) -> NDArray[Any]:
        """Returns the numbers as an array."""
        array = np.asarray(self.data, dtype=self.dtype)
        return array if self.shape is None else array.reshape(tuple(self.shape))

    def to_torch(self) -> Any:
        """Returns a copy of the numbers as a torch tensor."""
        import torch

        return torch.tensor(self.to_numpy())

    def tolist(self) -> list[Any]:
        """Returns the numbers as a list or as nested lists."""
        return self.to_numpy().tolist()


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence, and the inputs of its loss: lists, arrays, tensors, or `TensorData` of N entries."""

    model_input: ModelInput
    loss_fn_inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class RunBatch:
    """The batch of one step of a run.

    Each datum has `target_tokens`, `logprobs` (under the weights that sampled the tokens), `advantages`, and
    `mask` (1 for a token that the policy sampled). Where the mask is 0, logprobs and advantages are also 0.
    """

    step: int
    """Number of the step, counted from 1."""
    data: tuple[Datum, ...]
    rewards: tuple[float, ...]
    """One entry per datum."""


@dataclass(frozen=True, slots=True)
class AdamParams:
    """The settings of one AdamW step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Weight decay, decoupled from the gradient."""
    grad_clip_norm: float = 0.0
    """Gradients with a larger norm are scaled down to this norm; 0 turns clipping off."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How completions are sampled."""

    max_tokens: int = 256
    seed: int | None = None
    """Seed of the first completion; the others count up from it. None uses a different seed each time."""
    stop: str | Sequence[str | int] | None = None
    """Texts that end a completion, in addition to the model's end tokens. Token ids are refused."""
    temperature: float = 1.0
    top_k: int = -1
    """-1 keeps the whole vocabulary."""
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """The result of a forward pass, with or without a backward pass."""

    loss_fn_outputs: list[dict[str, TensorData]]
    """For each datum, the `logprobs` [N] of its targets."""
    metrics: dict[str, float]
    """`loss:sum`, and the metrics of a custom loss."""
    loss_fn_output_type: str = "logprobs"


@dataclass(frozen=True, slots=True)
class OptimStepResponse:
    """The result of an optimizer step."""

    metrics: dict[str, float]
    """`grad_norm`, which is measured before clipping."""


@dataclass(frozen=True, slots=True)
class SaveWeightsResponse:
    """The result of saving a state, or weights to sample with."""

    path: str
    """Path for `load_state` or `create_sampling_client`."""


@dataclass(frozen=True, slots=True)
class LoadWeightsResponse:
    """The result of loading a state."""

    path: str
    """The state that was loaded."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One completion. Its last token is the one that ended it."""

    stop_reason: str
    """`stop` or `length`."""
    tokens: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class SampleResponse:
    """Completions of one prompt."""

    sequences: list[SampledSequence]
    prompt_logprobs: list[float | None] | None = None
    """One logprob per prompt token, None for the first token. None if they were not requested."""


# --- data to columns ------------------------------------------------------------------------------


@runtime_checkable
class _HasNumpy(Protocol):
    def to_numpy(self) -> NDArray[Any]: ...


def columns_from_data(
    data: Sequence[Datum], *, weights: str, logprobs: str, vocab_size: int
) -> tuple[Columns, list[slice]]:
    """Checks data and converts it to columns. Also returns each datum's slice of the trained tokens.

    Every target is a trained token. `weights` and `logprobs` name the inputs that become advantages and
    behavior logprobs. An empty name gives zeros.

    Raises: DataError that names the invalid datum.
    """
    if not data:
        raise DataError("no data was given; a loss needs at least one datum")
    ids = [_tokens(datum, idx, vocab_size) for idx, datum in enumerate(data)]
    counts = np.array([len(tokens) - 1 for tokens in ids], dtype=np.int64)
    starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts + 1)])[:-1]
    trained_starts = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts)])
    # All tokens are trained except each sequence's first token, which nothing predicts.
    is_first = np.zeros(int((counts + 1).sum()), dtype=np.bool_)
    is_first[starts] = True

    def column(name: str) -> Floats:
        return np.concatenate([_numbers(datum, idx, name, counts[idx]) for idx, datum in enumerate(data)])

    num = int(counts.sum())
    columns = Columns(
        token_ids=np.concatenate(ids),
        starts=starts,
        lengths=counts + 1,
        group_ids=np.arange(len(data)),  # the API has no groups, so each datum is its own group
        episode_idx=np.zeros(len(data), dtype=np.int64),
        episode_tokens=counts,
        temperatures=np.ones(len(data), dtype=np.float32),
        trained_idx=np.flatnonzero(~is_first),
        trained_starts=trained_starts,
        behavior_logprobs=column(logprobs),
        advantages=column(weights),
        is_turn_end=np.zeros(num, dtype=np.bool_),
        versions=np.zeros(num, dtype=np.int64),
        streams={},
        is_zeroed=np.zeros(len(data), dtype=np.bool_),
    )
    return columns, [slice(*span) for span in pairwise(trained_starts.tolist())]


def _tokens(datum: Datum, idx: int, vocab_size: int) -> NDArray[np.int32]:
    """Returns the N + 1 tokens of a datum.

    Raises: DataError if the targets are not the input shifted by one, or are not tokens of the model.
    """
    inputs = np.asarray(datum.model_input.to_ints(), dtype=np.int64)
    targets = _array(datum, idx, "target_tokens").astype(np.int64)
    if not inputs.size or inputs.shape != targets.shape or (inputs[1:] != targets[:-1]).any():
        raise DataError(
            f"datum {idx}: {targets.size} target_tokens for {inputs.size} tokens of model_input; expected "
            "the same sequence one token on, and at least one token"
        )
    tokens = np.append(inputs, targets[-1])
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise DataError(f"datum {idx}: token ids {tokens.min()}..{tokens.max()} outside 0..{vocab_size - 1}")
    return tokens.astype(np.int32)


def _numbers(datum: Datum, idx: int, name: str, count: int) -> Floats:
    """Checks and returns a datum's input of this name; zeros for an empty name.

    Raises: DataError if it isn't `count` finite numbers.
    """
    if not name:
        return np.zeros(count, dtype=np.float32)
    values = _array(datum, idx, name).astype(np.float32)
    if values.shape != (count,) or not np.isfinite(values).all():
        raise DataError(
            f"datum {idx}: {name} must be {count} finite numbers, one per target; got {values.shape}"
        )
    return values


def _array(datum: Datum, idx: int, name: str) -> NDArray[Any]:
    value = datum.loss_fn_inputs.get(name)
    if value is None:
        raise DataError(f"datum {idx} lacks {name!r} (it has {', '.join(datum.loss_fn_inputs) or 'nothing'})")
    return np.asarray(value.to_numpy() if isinstance(value, _HasNumpy) else value)


# --- a run's batch as data ------------------------------------------------------------------------


def run_batch(batch: Batch) -> RunBatch:
    """Converts the batch of a step to data.

    Raises: DataError if it was sampled at a temperature other than 1.
    """
    data = tuple(_datum(sample) for sample in batch.samples)
    return RunBatch(batch.step + 1, data, tuple(sample.trajectory.reward for sample in batch.samples))


def _datum(sample: Sample) -> Datum:
    trajectory = sample.trajectory
    if trajectory.temperature != 1:
        raise DataError(
            f"the run samples at temperature {trajectory.temperature}, and the verbs' logprobs are at 1: set "
            "policies.*.sampling.temperature to 1"
        )
    tokens = wire.array(trajectory.token_ids, "int32").astype(np.int64)
    mask = wire.array(trajectory.mask, "uint8").astype(np.float32)
    advantages = np.zeros(len(mask), dtype=np.float32)
    for span in sample.advantages:
        advantages[span.start : span.end] = span.value
    columns = {
        "target_tokens": tokens,
        "logprobs": wire.array(trajectory.behavior_logprobs, "float32"),
        "advantages": advantages * mask,
        "mask": mask,
    }
    # Entry i belongs to the target of input token i, which is token i + 1.
    inputs = {name: TensorData.from_numpy(column[1:]) for name, column in columns.items()}
    return Datum(ModelInput.from_ints(tokens[:-1].tolist()), inputs)

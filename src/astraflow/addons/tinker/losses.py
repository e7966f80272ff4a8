"""Losses of the Tinker API by name, and `SummedLoss`, which sums one over the data of a `forward_backward`
call.

The losses are pure functions, built from the losses of recipes. The datum's logprobs replace the proximal
logprobs, and its weights replace the advantages. `SummedLoss` sums a loss over the trained tokens of the
data, and doesn't divide the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from astraflow.errors import ConfigError, TrainingError
from astraflow.losses.factory import LossFunction
from astraflow.losses.policy import LossInputs, LossOutput, clipped_surrogate, grpo, proximal_of, reinforce
from astraflow.losses.ratio import importance_ratio
from astraflow.protocols import EntropyUse
from astraflow.trainer.columns import sample_name
from astraflow.trainer.objective import Floats, Ints, TokenParts, check_finite
from astraflow.types.token_columns import Columns

__all__ = [
    "TINKER_LOSSES",
    "InputLoss",
    "SummedLoss",
    "cross_entropy",
    "importance_sampling",
    "ppo_by_thresholds",
]

_MAX_LOG_RATIO = 88.0
"""Nats; above 88.7, the ratio overflows float32."""


@dataclass(frozen=True, slots=True)
class InputLoss:
    """A loss, and the inputs of a datum that it reads."""

    function: Callable[..., LossOutput]
    """Called with `LossInputs` and with the configured arguments as keywords."""
    weights: str
    """Name of the input that replaces the advantages."""
    logprobs: str = ""
    """Name of the input that replaces the proximal logprobs; empty if the loss reads none."""


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """Computes loss_t = -weight_t * logprobs_t. Shapes: all [T]. Gradient: through `logprobs`."""
    return reinforce(inputs)


def importance_sampling(inputs: LossInputs) -> LossOutput:
    """Computes loss_t = -exp(logprobs_t - proximal_logprobs_t) * A_t.

    This is the policy gradient for tokens that another policy sampled.

    Shapes: all [T]. Gradient: through `logprobs`.
    Source: the documentation of the Tinker API, "importance_sampling".
    """
    ratio = importance_ratio(inputs.logprobs, proximal_of(inputs))
    return clipped_surrogate(ratio, inputs.advantages, ratio)


def ppo_by_thresholds(
    inputs: LossInputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2
) -> LossOutput:
    """Computes `grpo` with bounds on the ratio itself instead of distances from 1. Source: as for `grpo`.

    Raises: ConfigError if 1, the ratio of a token that the model has sampled itself, is out of bounds.
    """
    if not 0 <= clip_low_threshold <= 1 <= clip_high_threshold:
        raise ConfigError(
            "loss_fn_config: expected 0 <= clip_low_threshold <= 1 <= clip_high_threshold, got "
            f"{clip_low_threshold} and {clip_high_threshold}"
        )
    return grpo(inputs, clip_low=1 - clip_low_threshold, clip_high=clip_high_threshold - 1)


TINKER_LOSSES = {
    "cross_entropy": InputLoss(cross_entropy, weights="weights"),
    "importance_sampling": InputLoss(importance_sampling, weights="advantages", logprobs="logprobs"),
    "ppo": InputLoss(ppo_by_thresholds, weights="advantages", logprobs="logprobs"),
}


@dataclass(slots=True)
class SummedLoss:
    """A loss summed over all trained tokens, with the logprobs and weights of the columns."""

    columns: Columns
    function: LossFunction
    entropy: EntropyUse = "none"
    alternatives: str = ""
    _parts: TokenParts = field(default_factory=TokenParts)

    def __call__(self, trained: Ints, predicted: Tensor, entropies: Tensor | None) -> Tensor:
        """Returns the sum over one microbatch."""
        del entropies
        behavior, advantages = (
            torch.from_numpy(column[trained]).to(predicted.device)
            for column in (self.columns.behavior_logprobs, self.columns.advantages)
        )
        output = self.function(LossInputs(predicted, behavior, behavior, advantages))
        self._parts.add(trained, predicted, output.per_token)
        return output.per_token.sum()

    def finish(self) -> tuple[float, Floats]:
        """Returns the sum over all microbatches, and the logprobs [P].

        Raises: TrainingError that names the data whose numbers are unusable.
        """
        trained, (logprobs, per_token) = self._parts.read()
        _check_ratios(self.columns, trained, logprobs - self.columns.behavior_logprobs[trained])
        check_finite(self.columns, trained, per_token)
        values = np.zeros(len(self.columns.trained_idx), dtype=np.float32)
        values[trained] = logprobs
        return float(per_token.sum(dtype=np.float64)), values


def _check_ratios(columns: Columns, trained: Ints, log_ratios: Floats) -> None:
    """Raises: TrainingError, naming the sample, if a ratio of current to recorded probability overflows."""
    worst = int(log_ratios.argmax())
    if np.isnan(log_ratios[worst]) or log_ratios[worst] <= _MAX_LOG_RATIO:
        return  # `check_finite` reports NaNs
    sample = columns.sample_of(trained[[worst]])[0]
    raise TrainingError(
        f"{sample_name(columns, int(sample))}: the log ratio of a token is {float(log_ratios[worst]):.1f}; "
        f"above {_MAX_LOG_RATIO:.0f}, the ratio overflows float32. Are the recorded logprobs those of this "
        "model, in nats?"
    )

"""Losses of the Tinker API, under its names and over the inputs of each datum. The functions are pure.

They are built from the losses of recipes. The datum's logprobs replace the proximal logprobs, and its weights
replace the advantages. The caller sums the losses over all tokens and doesn't divide the sum.
"""

from collections.abc import Callable
from dataclasses import dataclass

from astraflow.losses.policy import LossInputs, LossOutput, clipped_surrogate, grpo, proximal_of, reinforce
from astraflow.losses.ratio import importance_ratio

__all__ = ["LOSSES_BY_INPUTS", "InputLoss", "cross_entropy", "importance_sampling", "ppo_by_thresholds"]


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
    """Computes loss_t = -exp(logprobs_t - sampling_logprobs_t) * A_t.

    This is the policy gradient for tokens that another policy sampled.

    Shapes: all [T]. Gradient: through `logprobs`.
    Source: the documentation of the Tinker API, "importance_sampling".
    """
    ratio = importance_ratio(inputs.logprobs, proximal_of(inputs))
    return clipped_surrogate(ratio, inputs.advantages, ratio)


def ppo_by_thresholds(
    inputs: LossInputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2
) -> LossOutput:
    """Computes `grpo` with bounds on the ratio itself instead of distances from 1. Source: as for `grpo`."""
    return grpo(inputs, clip_low=1 - clip_low_threshold, clip_high=clip_high_threshold - 1)


LOSSES_BY_INPUTS = {
    "cross_entropy": InputLoss(cross_entropy, weights="weights"),
    "importance_sampling": InputLoss(importance_sampling, weights="advantages", logprobs="logprobs"),
    "ppo": InputLoss(ppo_by_thresholds, weights="advantages", logprobs="logprobs"),
}

"""Losses of the Tinker API, by its names and over the inputs that each datum brings. Pure.

They are built from the losses of recipes, with the datum's logprobs in the place of the proximal ones, and
its weights in that of the advantages. The caller sums them over all tokens and divides by nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from astraflow.losses.policy import LossInputs, LossOutput, clipped_surrogate, grpo, reinforce
from astraflow.losses.ratio import importance_ratio

__all__ = ["LOSSES_BY_INPUTS", "InputLoss", "cross_entropy", "importance_sampling", "ppo_by_thresholds"]


@dataclass(frozen=True, slots=True)
class InputLoss:
    """A loss, and which inputs of a datum it reads."""

    function: Callable[..., LossOutput]
    """Called with `LossInputs` and, as keyword arguments, what the caller configures."""
    weights: str
    """Name of the input that replaces the advantages."""
    logprobs: str = ""
    """Name of the input that replaces the proximal logprobs; empty if the loss reads none."""


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """loss_t = -weight_t * logprobs_t. Shapes: all [T]. Gradient: through `logprobs`."""
    return reinforce(inputs)


def importance_sampling(inputs: LossInputs) -> LossOutput:
    """loss_t = -exp(logprobs_t - sampling_logprobs_t) * A_t: policy gradient on another policy's tokens.

    Shapes: all [T]. Gradient: through `logprobs`.
    Source: the documentation of the Tinker API, "importance_sampling".
    """
    ratio = importance_ratio(inputs.logprobs, inputs.proximal_logprobs)
    return clipped_surrogate(ratio, inputs.advantages, ratio)


def ppo_by_thresholds(
    inputs: LossInputs, *, clip_low_threshold: float = 0.8, clip_high_threshold: float = 1.2
) -> LossOutput:
    """`grpo` with bounds of the ratio in place of distances from 1. Source: as `grpo`."""
    return grpo(inputs, clip_low=1 - clip_low_threshold, clip_high=clip_high_threshold - 1)


LOSSES_BY_INPUTS = {
    "cross_entropy": InputLoss(cross_entropy, weights="weights"),
    "importance_sampling": InputLoss(importance_sampling, weights="advantages", logprobs="logprobs"),
    "ppo": InputLoss(ppo_by_thresholds, weights="advantages", logprobs="logprobs"),
}

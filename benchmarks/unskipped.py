"""Losses that only benchmarks use: those of recipes without the trainer's shortcut, so that every sample
gets its forward and backward pass, and one that clips against the policy that sampled.

The trainer computes no pass for samples whose gradient is known to be 0 (docs/losses.md). It knows this for
losses that declare `needs_advantage`. `grpo` and `m2po` compute the same, but don't declare it. They show how
much of a result is due to the shortcut.
"""

from dataclasses import replace

from astraflow.losses.m2po import m2po as m2po_that_skips
from astraflow.losses.m2po import m2po_bound
from astraflow.losses.policy import LossInputs, LossOutput, with_traits
from astraflow.losses.policy import grpo as grpo_that_skips

__all__ = ["behavior_grpo", "grpo", "m2po"]


@with_traits(needs_proximal=True)
def grpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Computes `grpo` for all samples."""
    return grpo_that_skips(inputs, clip_low=clip_low, clip_high=clip_high)


@with_traits(needs_proximal=False, weighs_behavior=True, statistics=m2po_bound)
def m2po(inputs: LossInputs, *, budget: float) -> LossOutput:
    """Computes `m2po` for all samples."""
    return m2po_that_skips(inputs, budget=budget)


@with_traits(needs_proximal=False, needs_advantage=True, weighs_behavior=True)
def behavior_grpo(inputs: LossInputs, *, clip_low: float, clip_high: float) -> LossOutput:
    """Computes `grpo` with the ratio to the policy that sampled.

    The recipe's `grpo` takes the ratio to the policy at the start of a step, for which a batch of one
    minibatch is on-policy, however old it is.
    """
    return grpo_that_skips(
        replace(inputs, proximal_logprobs=inputs.behavior_logprobs), clip_low=clip_low, clip_high=clip_high
    )

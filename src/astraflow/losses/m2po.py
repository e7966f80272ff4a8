"""M2PO, a trust region on the second moment of the log ratio to the behavior policy, in two public variants.

Legend: T trained tokens (of a microbatch in a loss, of the whole minibatch in its bound).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from astraflow.losses.policy import LossInputs, LossOutput, clipped_surrogate, statistic
from astraflow.losses.ratio import importance_ratio

__all__ = ["m2po", "m2po_bound", "m2po_mask", "m2po_mask_bound"]


def m2po_bound(inputs: LossInputs, *, budget: float) -> Mapping[str, Tensor]:
    """tau, the bound on |log ratio| of `m2po`: the largest with mean(min(delta^2, tau^2)) <= budget.

    delta_t = logprobs_t - behavior_logprobs_t; the mean is over harmful tokens of the whole minibatch: those
    with A > 0 and ratio > 1, or A < 0 and ratio < 1. tau is infinite where the mean is within the budget.
    Exact: for k tokens below tau, tau^2 = (n * budget - sum of their delta^2) / (n - k).

    Shapes: inputs [T], tau a scalar. No gradient.
    Source: Zheng et al. 2025 (arXiv:2510.01161), as the authors' code computes it.
    """
    delta = (inputs.logprobs - inputs.behavior_logprobs).detach()
    squares = delta[delta * inputs.advantages > 0].double().square()
    if squares.numel() == 0 or squares.mean() <= budget:
        return {"tau": torch.full((), torch.inf, device=delta.device)}
    ascending = squares.sort().values
    num = len(ascending)
    below = torch.cat([ascending.new_zeros(1), ascending.cumsum(0)[:-1]])
    num_above = num - torch.arange(num, device=delta.device)
    tau_squared = (num * budget - below) / num_above
    is_solution = tau_squared <= ascending
    is_solution[-1] = True  # in exact arithmetic it is, since the mean is over the budget
    return {"tau": tau_squared[is_solution.int().argmax()].sqrt().float()}


def m2po(inputs: LossInputs, *, budget: float) -> LossOutput:
    """Surrogate against the behavior policy, clipped where the second moment exceeds its budget.

    ratio_t = exp(logprobs_t - behavior_logprobs_t)
    loss_t = max(-ratio_t * A_t, -clip(ratio_t, exp(-tau), exp(tau)) * A_t), tau from `m2po_bound`

    Shapes: all [T]. Gradient: through `logprobs` only.
    Raises: ConfigError if `inputs.statistics` lacks tau.
    Source: Zheng et al. 2025 (arXiv:2510.01161), as the authors' code computes it.
    """
    tau = statistic(inputs, "tau", f"m2po_bound(inputs, budget={budget})")
    ratio = importance_ratio(inputs.logprobs, inputs.behavior_logprobs)
    return clipped_surrogate(ratio, inputs.advantages, torch.clamp(ratio, torch.exp(-tau), torch.exp(tau)))


def m2po_mask_bound(inputs: LossInputs, *, budget: float) -> Mapping[str, Tensor]:
    """`max_square`, the largest delta^2 that `m2po_mask` keeps: the mean of those kept is within the budget.

    Equal squares stay or go together.

    Shapes: inputs [T], the bound a scalar; -1 where no token can stay. No gradient. Source: as `m2po_mask`.
    """
    ascending = (inputs.logprobs - inputs.behavior_logprobs).detach().double().square().sort().values
    means = ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)
    is_last_of_equals = torch.ones_like(ascending, dtype=torch.bool)
    is_last_of_equals[:-1] = ascending[1:] > ascending[:-1]
    kept = ascending[(means <= budget) & is_last_of_equals]
    bound = kept[-1] if kept.numel() else ascending.new_full((), -1.0)
    return {"max_square": bound}


def m2po_mask(inputs: LossInputs, *, budget: float) -> LossOutput:
    """Surrogate against the behavior policy without the tokens of the largest squared log ratios.

    ratio_t = exp(logprobs_t - behavior_logprobs_t);  delta_t = log ratio_t
    loss_t = -ratio_t * A_t where delta_t^2 <= max_square of `m2po_mask_bound`, else 0

    Shapes: all [T]. Gradient: through `logprobs` only.
    Raises: ConfigError if `inputs.statistics` lacks max_square.
    Source: Zheng et al. 2025 (arXiv:2510.01161), over all tokens.
    """
    bound = statistic(inputs, "max_square", f"m2po_mask_bound(inputs, budget={budget})")
    delta = inputs.logprobs - inputs.behavior_logprobs
    is_kept = delta.detach().double().square() <= bound
    surrogate = torch.exp(torch.where(is_kept, delta, 0.0)) * inputs.advantages
    return LossOutput(per_token=torch.where(is_kept, -surrogate, 0.0), metrics={"clip_frac": ~is_kept})

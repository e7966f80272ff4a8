"""M2PO, a trust region on the second moment of the log ratio to the behavior policy, in five public variants.

| variant | what it does | source |
|---|---|---|
| `m2po` | clips where the budget is met exactly | the description in the authors' code |
| `m2po_released` | clips at the largest square below that | what the authors' code does |
| `m2po_prototype` | clips at the largest square that the budget keeps | the code of AstraFlow's prototype |
| `m2po_mask` | masks tokens by current against behavior policy | the paper's algorithm |
| `m2po_mask_proximal` | masks tokens by proximal against behavior policy, and clips | AReaL's code |

All five compute their bound over the whole minibatch, so it is the same in any cut. The public codes use one
microbatch of one rank, which gives the same bound where that is the whole minibatch.

Legend: T trained tokens (of a microbatch in a loss, of the whole minibatch in its bound). A token is harmful
if A > 0 and ratio > 1, or A < 0 and ratio < 1.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from astraflow.losses.policy import (
    LossInputs,
    LossOutput,
    clipped_surrogate,
    decoupled_ppo,
    proximal_of,
    statistic,
    with_traits,
)
from astraflow.losses.ratio import importance_ratio

__all__ = [
    "m2po",
    "m2po_bound",
    "m2po_mask",
    "m2po_mask_bound",
    "m2po_mask_proximal",
    "m2po_mask_proximal_bound",
    "m2po_prototype",
    "m2po_prototype_bound",
    "m2po_released",
    "m2po_released_bound",
]


def m2po_bound(inputs: LossInputs, *, budget: float) -> Mapping[str, Tensor]:
    """tau, the bound on |log ratio| of `m2po`: the largest with mean(min(delta^2, tau^2)) <= budget.

    delta_t = logprobs_t - behavior_logprobs_t. The mean is over the n harmful tokens of the whole minibatch.
    tau is infinite if the mean of delta^2 is within the budget. Otherwise it is exact: if k tokens have
    |delta| below tau, tau^2 = (n * budget - sum of their delta^2) / (n - k).

    Shapes: inputs [T], tau a scalar. No gradient.
    Source: Zheng et al. 2025 (arXiv:2510.01161), as the docstrings of the authors' code describe it; the code
    itself stops at a smaller value, see `m2po_released_bound`.
    """
    return _bound(inputs, budget, lambda squares, most: _exact_and_below(squares, most)[0])


def m2po_released_bound(inputs: LossInputs, *, budget: float) -> Mapping[str, Tensor]:
    """tau of `m2po_released`: the root of the largest delta^2 below the exact solution; 0 if there is none.

    delta and the exact solution are as in `m2po_bound`. With the squares in ascending order, tau^2 is the one
    before the first square at which mean(min(delta^2, square)) reaches the budget. So the mean stays below
    the budget.

    Shapes: inputs [T], tau a scalar. No gradient.
    Source: Zheng et al. 2025 (arXiv:2510.01161), the authors' released code.
    """
    return _bound(inputs, budget, lambda squares, most: _exact_and_below(squares, most)[1])


def m2po_prototype_bound(inputs: LossInputs, *, budget: float) -> Mapping[str, Tensor]:
    """tau of `m2po_prototype`: the root of the largest delta^2 that the budget keeps; at least the smallest.

    delta is as in `m2po_bound`. Of the harmful tokens, those with the largest squares are dropped until the
    mean of the rest is below the budget: with s_1 <= ... <= s_n, tau^2 = s_k for the largest k with
    (s_1 + ... + s_k) / k < budget, or s_1 if there is none. tau is infinite if the mean of all is within the
    budget.

    Shapes: inputs [T], tau a scalar. No gradient. Source: as `m2po_prototype`.
    """
    return _bound(inputs, budget, _largest_kept_square)


def _bound(
    inputs: LossInputs, budget: float, square: Callable[[Tensor, float], Tensor]
) -> Mapping[str, Tensor]:
    """tau^2 is `square` of the harmful tokens' ascending delta^2, if their mean exceeds the budget."""
    delta = (inputs.logprobs - inputs.behavior_logprobs).detach()
    ascending = delta[delta * inputs.advantages > 0].double().square().sort().values
    if ascending.numel() == 0 or ascending.mean() <= budget:
        return {"tau": torch.full((), torch.inf, device=ascending.device)}
    return {"tau": square(ascending, budget).sqrt().float()}


def _exact_and_below(ascending: Tensor, budget: float) -> tuple[Tensor, Tensor]:
    """The tau^2 that meets the budget exactly, and the largest square below it, or 0.

    For each number k of squares below tau^2, a tau^2 meets the budget. k is right if its tau^2 is at most the
    next larger square: then exactly the k smallest squares are below.
    """
    num = len(ascending)
    below = torch.cat([ascending.new_zeros(1), ascending])
    num_above = num - torch.arange(num, device=ascending.device)
    tau_squared = (num * budget - below.cumsum(0)[:-1]) / num_above
    is_solution = tau_squared <= ascending
    is_solution[-1] = True  # holds in exact arithmetic, since the mean exceeds the budget
    above = is_solution.int().argmax()
    return tau_squared[above], below[above]


def _largest_kept_square(ascending: Tensor, budget: float) -> Tensor:
    num_kept = (_running_means(ascending) < budget).sum()
    return ascending[num_kept.clamp(min=1) - 1]


def _running_means(ascending: Tensor) -> Tensor:
    return ascending.cumsum(0) / torch.arange(1, len(ascending) + 1, device=ascending.device)


@with_traits(needs_proximal=False, needs_advantage=True, weighs_behavior=True, statistics=m2po_bound)
def m2po(inputs: LossInputs, *, budget: float) -> LossOutput:
    """Surrogate against the behavior policy, clipped where the second moment exceeds its budget.

    ratio_t = exp(logprobs_t - behavior_logprobs_t)
    loss_t = max(-ratio_t * A_t, -clip(ratio_t, exp(-tau), exp(tau)) * A_t), tau from `m2po_bound`

    Shapes: all [T]. Gradient: through `logprobs` only.
    Raises: ConfigError if `inputs.statistics` lacks tau.
    Source: Zheng et al. 2025 (arXiv:2510.01161), as the docstrings of the authors' code describe it.
    """
    return _clipped(inputs, f"m2po_bound(inputs, budget={budget})")


@with_traits(needs_proximal=False, needs_advantage=True, weighs_behavior=True, statistics=m2po_released_bound)
def m2po_released(inputs: LossInputs, *, budget: float) -> LossOutput:
    """`m2po` with the smaller tau of the authors' released code, from `m2po_released_bound`.

    Shapes, gradient, and errors: as `m2po`.
    Source: Zheng et al. 2025 (arXiv:2510.01161), the authors' released code without its optional floor of the
    clip bounds (`miniclip`, off in its scripts).
    """
    return _clipped(inputs, f"m2po_released_bound(inputs, budget={budget})")


@with_traits(
    needs_proximal=False, needs_advantage=True, weighs_behavior=True, statistics=m2po_prototype_bound
)
def m2po_prototype(inputs: LossInputs, *, budget: float) -> LossOutput:
    """`m2po` as AstraFlow's prototype trains it: another tau, and limits that hold for any tau.

    loss_t = max(-ratio_t * A_t, -clip(ratio_t, max(exp(-tau), 0.05), min(exp(tau), 21)) * A_t), tau from
    `m2po_prototype_bound`

    Shapes, gradient, and errors: as `m2po`.
    Source: https://github.com/Infini-AI-Lab/astraflow (343e808), train_worker/engine/ppo/actor.py, the
    function that computes the clip range; for arXiv:2605.15565, after arXiv:2510.01161.
    """
    return _clipped(inputs, f"m2po_prototype_bound(inputs, budget={budget})", low=0.05, high=21.0)


def _clipped(inputs: LossInputs, source: str, *, low: float = 0.0, high: float = torch.inf) -> LossOutput:
    tau = statistic(inputs, "tau", source)
    ratio = importance_ratio(inputs.logprobs, inputs.behavior_logprobs)
    clipped = torch.clamp(ratio, torch.exp(-tau).clamp(min=low), torch.exp(tau).clamp(max=high))
    return clipped_surrogate(ratio, inputs.advantages, clipped)


def m2po_mask_bound(inputs: LossInputs, *, budget: float) -> Mapping[str, Tensor]:
    """`max_square`: the largest delta^2 up to which the mean of delta^2 is within the budget.

    delta_t = logprobs_t - behavior_logprobs_t, over all tokens of the minibatch. Tokens with equal squares
    are kept or masked together.

    Shapes: inputs [T], the bound a scalar; -1 if no token can be kept. No gradient. Source: as `m2po_mask`.
    """
    ascending = (inputs.logprobs - inputs.behavior_logprobs).detach().double().square().sort().values
    kept = _keepable(ascending, budget)
    return {"max_square": kept[-1] if kept.numel() else ascending.new_full((), -1.0)}


def _keepable(ascending: Tensor, budget: float) -> Tensor:
    """The squares up to which the mean is within the budget, ascending; of equal squares, only the last."""
    is_last_of_equals = torch.ones_like(ascending, dtype=torch.bool)
    is_last_of_equals[:-1] = ascending[1:] > ascending[:-1]
    return ascending[(_running_means(ascending) <= budget) & is_last_of_equals]


@with_traits(needs_proximal=False, weighs_behavior=True, statistics=m2po_mask_bound)
def m2po_mask(inputs: LossInputs, *, budget: float) -> LossOutput:
    """Surrogate against the behavior policy that masks the tokens with the largest squared log ratios.

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


def m2po_mask_proximal_bound(
    inputs: LossInputs, *, budget: float, clip_low: float, clip_high: float, max_behavior_ratio: float
) -> Mapping[str, Tensor]:
    """`max_square`: the largest delta^2 up to which the mean is within the budget, or else the smallest one.

    delta_t = proximal_logprobs_t - behavior_logprobs_t, over all tokens of the minibatch. Tokens with equal
    squares are kept or masked together. Only `budget` is used; a statistics function takes all arguments of
    its loss.

    Shapes: inputs [T], the bound a scalar. No gradient. Source: as `m2po_mask_proximal`.
    """
    ascending = (proximal_of(inputs) - inputs.behavior_logprobs).detach().double().square().sort().values
    kept = _keepable(ascending, budget)
    return {"max_square": kept[-1] if kept.numel() else ascending[0]}


@with_traits(weighs_behavior=True, statistics=m2po_mask_proximal_bound)
def m2po_mask_proximal(
    inputs: LossInputs, *, budget: float, clip_low: float, clip_high: float, max_behavior_ratio: float
) -> LossOutput:
    """`decoupled_ppo` that masks the tokens with the largest squared log ratios (proximal to behavior
    policy).

    loss_t = loss_t of `decoupled_ppo` where delta_t^2 <= max_square of `m2po_mask_proximal_bound`, else 0

    The mask does not depend on the current policy.
    Shapes: all [T]. Gradient: through `logprobs` only.
    Raises: ConfigError if `inputs.statistics` lacks max_square.
    Source: after Zheng et al. 2025 (arXiv:2510.01161), as AReaL's public code computes it. Unlike there, the
    threshold is inclusive, and the denominator counts all tokens, not only the kept ones.
    """
    bound = statistic(inputs, "max_square", f"m2po_mask_proximal_bound(inputs, budget={budget}, ...)")
    output = decoupled_ppo(
        inputs, clip_low=clip_low, clip_high=clip_high, max_behavior_ratio=max_behavior_ratio
    )
    delta = (proximal_of(inputs) - inputs.behavior_logprobs).detach()
    is_dropped = delta.double().square() > bound
    masked = output.metrics["masked_frac"] | is_dropped
    return LossOutput(
        per_token=torch.where(is_dropped, 0.0, output.per_token),
        metrics={**output.metrics, "masked_frac": masked},
    )

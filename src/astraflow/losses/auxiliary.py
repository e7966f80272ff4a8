"""Factors and terms of a policy loss: corrections for the gap between behavior and proximal policy, the KL
penalty and the entropy bonus. Also the loss of a critic. Pure functions of per-token columns.

Legend: T trained tokens.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from astraflow.losses.policy import LossInputs, LossOutput, proximal_of, require_column
from astraflow.losses.ratio import kl_k1, kl_k2, kl_k3, sequence_means, sequence_sums

__all__ = [
    "CORRECTIONS",
    "KL_ESTIMATORS",
    "Correction",
    "Level",
    "apply_correction",
    "divergence_rejection",
    "geometric_rejection",
    "masked_weights",
    "truncated_weights",
    "value_loss",
    "with_entropy_bonus",
    "with_kl_penalty",
]

Level = Literal["token", "sequence"]
Correction = Callable[[LossInputs], Tensor]
"""A function from columns to weights [T] without gradient."""


def truncated_weights(inputs: LossInputs, *, level: Level, max_weight: float) -> Tensor:
    """Truncated importance weights, [T]: min(w_t, max_weight).

    w_t = exp(proximal_logprobs_t - behavior_logprobs_t); for `sequence`, its product over the sequence
    No gradient. Raises: ConfigError for `sequence` without `sequence_idx`. Source: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training" (token level).
    """
    return _weights(inputs, level).clamp(max=max_weight)


def masked_weights(inputs: LossInputs, *, level: Level, min_weight: float, max_weight: float) -> Tensor:
    """Masked importance weights, [T]: w_t where min_weight <= w_t <= max_weight, else 0.

    w_t as in `truncated_weights`. No gradient. Raises: ConfigError for `sequence` without `sequence_idx`.
    Source: Liu et al. 2025, "When speed kills stability" (sequence level); token level with two bounds:
    IcePop, Ling team 2025 (arXiv:2510.18855).
    """
    weights = _weights(inputs, level)
    return torch.where((weights < min_weight) | (weights > max_weight), 0.0, weights)


def geometric_rejection(inputs: LossInputs, *, min_weight: float, max_weight: float) -> Tensor:
    """Rejects sequences by the geometric mean of their weights: 1 for kept tokens, 0 for rejected ones, [T].

    A sequence is kept if min_weight <= exp(mean of log w_t over the sequence) <= max_weight, with w_t the
    token's weight as in `truncated_weights`. Unlike the product, the mean does not grow with the length.
    No gradient. Raises: ConfigError without `sequence_idx`. Source: public implementations ("geometric",
    "seq_mean_k1"); not checked against a paper.
    """
    log_weights = (proximal_of(inputs) - inputs.behavior_logprobs).detach()
    mean = torch.exp(sequence_means(log_weights, require_column(inputs.sequence_idx, "sequence_idx")))
    return ((mean >= min_weight) & (mean <= max_weight)).to(log_weights.dtype)


def divergence_rejection(
    inputs: LossInputs, *, estimator: Literal["k2", "k3"], max_divergence: float
) -> Tensor:
    """Rejects sequences by their estimated divergence: 1 for kept tokens, 0 for rejected ones, [T].

    A sequence is kept if the mean of the tokens' estimates over it is at most `max_divergence`.
    k2: (log w_t)^2 / 2;  k3: w_t - 1 - log w_t, an unbiased estimate of KL(behavior || proximal); w_t is the
    token's weight as in `truncated_weights`.
    No gradient. Raises: ConfigError without `sequence_idx`. Source: estimators: Schulman 2020; as a filter:
    public implementations ("seq_mean_k2", "seq_mean_k3"); not checked against a paper.
    """
    estimate = KL_ESTIMATORS[estimator](inputs.behavior_logprobs, proximal_of(inputs)).detach()
    mean = sequence_means(estimate, require_column(inputs.sequence_idx, "sequence_idx"))
    return (mean <= max_divergence).to(estimate.dtype)


def _weights(inputs: LossInputs, level: Level) -> Tensor:
    log_weights = (proximal_of(inputs) - inputs.behavior_logprobs).detach()
    if level == "sequence":
        log_weights = sequence_sums(log_weights, require_column(inputs.sequence_idx, "sequence_idx"))
    return torch.exp(log_weights)


def apply_correction(output: LossOutput, weights: Tensor) -> LossOutput:
    """loss_t * weights_t. Adds the metrics `correction_mean` (the weights) and `masked_frac` (weight 0)."""
    return LossOutput(
        per_token=output.per_token * weights,
        metrics={**output.metrics, "correction_mean": weights, "masked_frac": weights == 0},
    )


def with_kl_penalty(
    output: LossOutput, inputs: LossInputs, *, estimator: Literal["k1", "k2", "k3"], coef: float
) -> LossOutput:
    """loss_t + coef * estimate_t, where estimate_t estimates KL(current || reference).

    When differentiated on sampled tokens, the expected gradient of k2 is that of KL(current || reference),
    and that of k3 is the gradient of KL(reference || current). The expected gradient of k1 is zero, so it
    only adds noise: prefer k2 or k3 in a loss.
    Gradient: through `logprobs`. Raises: ConfigError without `reference_logprobs`.
    Source: Schulman 2020, "Approximating KL divergence"; k3 in the loss: arXiv:2402.03300, eq. 3 and 4.
    """
    reference = require_column(inputs.reference_logprobs, "reference_logprobs")
    penalty = coef * KL_ESTIMATORS[estimator](inputs.logprobs, reference)
    return LossOutput(per_token=output.per_token + penalty, metrics=output.metrics)


def with_entropy_bonus(output: LossOutput, inputs: LossInputs, *, coef: float) -> LossOutput:
    """loss_t - coef * entropies_t. Raises: ConfigError without `entropies`.

    Source: Williams and Peng 1991; as a term of the loss: arXiv:1707.06347, eq. 9.
    """
    bonus = coef * require_column(inputs.entropies, "entropies")
    return LossOutput(per_token=output.per_token - bonus, metrics=output.metrics)


def value_loss(values: Tensor, stale_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Squared error of a critic, [T]: half of the larger of the plain and the clipped error.

    loss_t = max((V_t - R_t)^2, (V_stale_t + clip(V_t - V_stale_t, -clip, clip) - R_t)^2) / 2
    With `clip` 0, loss_t = (V_t - R_t)^2 / 2.
    Shapes: all [T]; `stale_values` are the critic's values at the step's start. Gradient: through `values`.
    Source: squared error: Schulman et al. 2017 (arXiv:1707.06347), eq. 9; the clip: the authors' code, as
    described by Huang et al. 2022, "The 37 implementation details of PPO", detail 9.
    """
    plain = (values - returns).square()
    if clip == 0:
        return 0.5 * plain
    clipped_values = stale_values + (values - stale_values).clamp(-clip, clip)
    return 0.5 * torch.max(plain, (clipped_values - returns).square())


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "divergence": divergence_rejection,
    "geometric": geometric_rejection,
    "masked": masked_weights,
    "truncated": truncated_weights,
}
KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}

"""Importance ratios, per-token estimators of the KL divergence, and sums over sequences. Pure.

Legend: T trained tokens. All logprobs are in nats, and belong to the sampled tokens.
"""

import torch
from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "importance_ratio", "kl_k1", "kl_k2", "kl_k3", "sequence_means", "sequence_sums"]

MAX_LOG_RATIO = 20.0
"""Nats. A larger log ratio means that another model sampled the token than the one named, or that its logprob
is wrong: by chance, it occurs for one token in 5e8. Ratios up to e^20 keep every product finite in
float32."""


def importance_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """exp(logprobs - base_logprobs), [T]. Gradient: through both."""
    return torch.exp(logprobs - base_logprobs)


def kl_k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k1 = -log r, [T], with r = reference / current: unbiased for KL(current || reference); may be negative.

    Gradient: through both. Source: Schulman 2020, "Approximating KL divergence".
    """
    return logprobs - reference_logprobs


def kl_k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k2 = (log r)^2 / 2, [T]: biased, never negative, low variance. Else as `kl_k1`."""
    return 0.5 * (reference_logprobs - logprobs).square()


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """k3 = (r - 1) - log r, [T]: unbiased, never negative, used by arXiv:2402.03300. Else as `kl_k1`."""
    log_ratio = reference_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def sequence_sums(column: Tensor, sequence_idx: Tensor) -> Tensor:
    """The sum of `column` over each token's sequence, [T]. Gradient: through `column`.

    `sequence_idx` is int64 [T] and counts the sequences from 0, so it is always below T.
    """
    return column.new_zeros(len(column)).index_add(0, sequence_idx, column).index_select(0, sequence_idx)


def sequence_means(column: Tensor, sequence_idx: Tensor) -> Tensor:
    """The mean of `column` over each token's sequence, [T]. Arguments and gradient as in `sequence_sums`."""
    return sequence_sums(column, sequence_idx) / sequence_sums(torch.ones_like(column), sequence_idx)

"""Importance ratios, per-token estimators of the KL divergence, sums over sequences. Pure.

Legend: T trained tokens. All logprobs are in nats and of the tokens that were sampled.
"""

import torch
from torch import Tensor

__all__ = ["MAX_LOG_RATIO", "importance_ratio", "kl_k1", "kl_k2", "kl_k3", "sequence_means", "sequence_sums"]

MAX_LOG_RATIO = 20.0
"""Nats. A larger log ratio says that the token was not sampled by the model that it names, or that its
logprob is wrong: by chance, one token in 5e8 comes that far. Ratios up to e^20 keep every product finite in
float32."""


def importance_ratio(logprobs: Tensor, base_logprobs: Tensor) -> Tensor:
    """exp(logprobs - base_logprobs), [T]. Gradient: through both."""
    return torch.exp(logprobs - base_logprobs)


def kl_k1(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """-log r with r = reference / current, [T]: unbiased for KL(current || reference), may be negative.

    Source: Schulman 2020, "Approximating KL divergence".
    """
    return logprobs - reference_logprobs


def kl_k2(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(log r)^2 / 2, [T]: biased, never negative, low variance. Source: as `kl_k1`."""
    return 0.5 * (reference_logprobs - logprobs).square()


def kl_k3(logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """(r - 1) - log r, [T]: unbiased and never negative. Source: as `kl_k1`; used by arXiv:2402.03300."""
    log_ratio = reference_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def sequence_sums(column: Tensor, sequence_idx: Tensor) -> Tensor:
    """[T]: each token's entry is the sum of `column` over the token's sequence. Gradient: through `column`.

    `sequence_idx` [T] int64 counts the sequences from 0, so that it stays below T.
    """
    return column.new_zeros(len(column)).index_add(0, sequence_idx, column).index_select(0, sequence_idx)


def sequence_means(column: Tensor, sequence_idx: Tensor) -> Tensor:
    """[T]: each token's entry is the mean of `column` over the token's sequence. As `sequence_sums`."""
    return sequence_sums(column, sequence_idx) / sequence_sums(torch.ones_like(column), sequence_idx)

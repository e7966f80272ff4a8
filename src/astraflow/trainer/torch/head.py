"""The output head in chunks: logprobs and entropies without the logits of all tokens at once.

The logits of P tokens are P x V numbers, and a plain backward pass holds several copies of them. With a
vocabulary of 150 thousand entries, they need more memory than the rest of a model of a few billion
parameters. Here, the logits of a chunk of tokens exist only while the chunk is computed, and are computed
again in the backward pass. This adds a fourth multiplication by the head's weight to the usual three.

Legend: P tokens, D width of the hidden states, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from astraflow.protocols import EntropyUse

__all__ = ["chunked_logprobs", "num_chunk_tokens"]

_CHUNK_TOKENS = 512
"""Smallest number of tokens per chunk. With fewer, reading the head's weight and gradient dominates on a
GPU."""
_FREE_LOGITS = 2**22
"""Number of logits (16 MB) that a chunk may always hold: up to this, keeping all is cheaper than two
passes."""


def num_chunk_tokens(vocab_size: int) -> int:
    """Number of tokens whose logits are computed at once."""
    return max(_CHUNK_TOKENS, _FREE_LOGITS // vocab_size)


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    temperatures: Tensor,
    *,
    entropy: EntropyUse = "none",
) -> tuple[Tensor, Tensor | None]:
    """Logprobs of `target_ids` under softmax(hidden @ weight.T / temperature), and the entropies of these
    distributions.

    Shapes: hidden [P, D], weight [V, D], target_ids and temperatures [P]; results [P], float32, in nats.
    Logits are computed in the dtype of `hidden`, everything else in float32. Gradient: through `hidden` and
    `weight`, from the logprobs and, with `entropy="gradient"`, from the entropies.
    """
    logprobs, entropies = cast(
        "tuple[Tensor, Tensor]", _ChunkedHead.apply(hidden, weight, target_ids, temperatures, entropy)
    )
    return logprobs, None if entropy == "none" else entropies


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target_ids: Tensor,
        temperatures: Tensor,
        entropy: EntropyUse,
    ) -> tuple[Tensor, Tensor]:
        low = weight.to(hidden.dtype)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs) if entropy != "none" else logprobs.new_empty(0)
        norms = torch.empty_like(logprobs)
        for rows in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[rows], low, temperatures[rows])
            # One number per token is kept: the backward pass rebuilds the softmax from it.
            norms[rows] = logits.logsumexp(-1)
            logprobs[rows] = logits.gather(1, target_ids[rows, None])[:, 0] - norms[rows]
            if entropy != "none":
                each = logits.sub_(norms[rows, None])  # in place: a second [rows, V] would double the peak
                entropies[rows] = -(each.exp() * each).sum(-1)
        ctx.entropy = entropy
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(hidden, weight, target_ids, temperatures, norms, entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """d logprob / d logits = onehot - p; d entropy / d logits = -p * (log p + entropy)."""
        grad_logprobs, grad_entropies = grad_outputs
        saved = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        hidden, weight, target_ids, temperatures, norms, entropies = saved
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        low = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight) if needs_weight else None
        for rows in _chunks(len(hidden), len(weight)):
            grad = _logits(hidden[rows], low, temperatures[rows]).sub_(norms[rows, None])
            if ctx.entropy == "gradient":
                # -g_H * p * (log p + H) - g_L * p, where `grad` still holds log p
                slope = (grad + entropies[rows, None]).mul_(grad_entropies[rows, None])
                slope.add_(grad_logprobs[rows, None])
                grad = grad.exp_().mul_(slope).neg_()
                del slope
            else:
                grad = grad.exp_().mul_(-grad_logprobs[rows, None])
            grad.scatter_add_(1, target_ids[rows, None], grad_logprobs[rows, None])
            grad = grad.div_(temperatures[rows, None]).to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, low, out=grad_hidden[rows])
            if grad_weight is not None:
                if grad.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad.t(), hidden[rows])
                else:
                    grad_weight.add_(grad.t() @ hidden[rows])
        return grad_hidden, grad_weight, None, None, None


def _chunks(num_tokens: int, vocab_size: int) -> Iterator[slice]:
    size = num_chunk_tokens(vocab_size)
    return (slice(start, start + size) for start in range(0, num_tokens, size))


def _logits(hidden: Tensor, weight: Tensor, temperatures: Tensor) -> Tensor:
    """[rows, V] float32, divided by the temperature: a new tensor, which the caller may overwrite."""
    with torch.autocast(hidden.device.type, enabled=False):
        return (hidden @ weight.t()).float().div_(temperatures[:, None])

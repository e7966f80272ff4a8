"""The output head in chunks: logprobs and entropies without the logits of all tokens at once.

The logits of P tokens are P x V numbers, and a plain backward pass holds several copies of them. With a
vocabulary of 150 thousand entries, they need more memory than the rest of a model of a few billion
parameters. Here, the logits of a chunk of tokens exist only while the chunk is computed, and are computed
again in the backward pass. This adds a fourth multiplication by the head's weight to the usual three, unless
there is only one chunk, whose logits are kept.

Legend: P tokens, D width of the hidden states, V vocabulary.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from astraflow.protocols import EntropyUse

__all__ = ["chunked_logprobs", "is_head_large", "num_chunk_tokens"]

_CHUNK_TOKENS = 512
"""Smallest number of tokens per chunk. With fewer, reading the head's weight and gradient dominates on a
GPU."""
_FREE_LOGITS = 2**22
"""Number of logits (16 MB) up to which plain autograd takes the least time."""
_PART_LOGITS = 2**19
"""On a CPU, a chunk goes through float32 buffers of this size (2 MB), which stay in the cache."""


def num_chunk_tokens(vocab_size: int) -> int:
    """Number of tokens whose logits are computed at once."""
    return max(_CHUNK_TOKENS, _FREE_LOGITS // vocab_size)


def is_head_large(num_tokens: int, vocab_size: int) -> bool:
    """Whether `chunked_logprobs` takes less time or memory than plain autograd."""
    return num_tokens * vocab_size > _FREE_LOGITS


def chunked_logprobs(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    *,
    entropy: EntropyUse = "none",
    is_wide: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Logprobs of `target_ids` under softmax(hidden @ weight.T), and the entropies of these distributions.

    For other temperatures, divide `hidden` by them, which costs less than dividing the logits.
    Shapes: hidden [P, D], weight [V, D], target_ids and logprobs [P], or [P, K] for K tokens in each place;
    entropies [P]. Results are float32, in nats.
    Logits are computed in the dtype of `hidden`, everything else in float32. `is_wide`: the weight is rounded
    to bfloat16, and the logits aren't, as in a server with a float32 head. Gradient: through `hidden` and
    `weight`, from the logprobs and, with `entropy="gradient"`, from the entropies.
    """
    is_mixed = is_wide and hidden.is_cuda and hidden.dtype != torch.float32
    if is_wide and not is_mixed:  # only GPUs have products of 16-bit numbers that aren't rounded
        hidden = hidden.float()
        weight = weight.bfloat16().float()
    logprobs, entropies = cast(
        "tuple[Tensor, Tensor]", _ChunkedHead.apply(hidden, weight, target_ids, entropy, is_mixed)
    )
    return logprobs, None if entropy == "none" else entropies


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes them by position
        ctx: Any, hidden: Tensor, weight: Tensor, target_ids: Tensor, entropy: EntropyUse, is_mixed: bool
    ) -> tuple[Tensor, Tensor]:
        low = weight.to(hidden.dtype)
        ids = target_ids if target_ids.ndim > 1 else target_ids[:, None]
        logprobs = torch.empty(ids.shape, dtype=torch.float32, device=hidden.device)
        norms = logprobs.new_empty(len(hidden))
        entropies = torch.empty_like(norms) if entropy != "none" else norms.new_empty(0)
        reusable: list[Tensor] = []
        for chunk in _chunks(len(hidden), num_chunk_tokens(len(weight))):
            products = _products(hidden[chunk], low, is_mixed)
            for rows, own in _parts(chunk, products):
                # One number per token is kept: the backward pass rebuilds the softmax from it.
                largest = products[own].amax(-1, keepdim=True).float()
                logits = products[own] - largest
                logprobs[rows] = logits.gather(1, ids[rows])
                weights = logits.exp()
                total = weights.sum(-1)
                if entropy != "none":
                    entropies[rows] = total.log() - weights.mul_(logits).sum(-1) / total
                logprobs[rows] -= total.log()[:, None]
                norms[rows] = largest[:, 0] + total.log()
            reusable = [products] if len(hidden) == len(products) and ctx.needs_input_grad[0] else []
        ctx.entropy = entropy
        ctx.is_mixed = is_mixed
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(hidden, weight, ids, norms, entropies, low, *reusable)
        return logprobs.view(target_ids.shape), entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        """d logprob / d logits = onehot - p; d entropy / d logits = -p * (log p + entropy)."""
        grad_logprobs, grad_entropies = grad_outputs
        saved = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        hidden, weight, ids, norms, entropies, low, *reusable = saved
        grad_logprobs = grad_logprobs.reshape(ids.shape)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight: Tensor | None = None
        for chunk in _chunks(len(hidden), num_chunk_tokens(len(weight))):
            products = reusable[0] if reusable else _products(hidden[chunk], low, ctx.is_mixed)
            grads = torch.empty_like(products) if reusable else products
            for rows, own in _parts(chunk, products):
                logs = products[own] - norms[rows, None]
                slope = -(
                    grad_logprobs[rows] if ids.shape[1] == 1 else grad_logprobs[rows].sum(-1, keepdim=True)
                )
                if ctx.entropy == "gradient":
                    # -g_L * p - g_H * p * (log p + H)
                    slope = slope - (logs + entropies[rows, None]).mul_(grad_entropies[rows, None])
                grad = logs.exp_().mul_(slope)
                grad.scatter_add_(1, ids[rows], grad_logprobs[rows])
                grads[own] = grad
            grads = grads.to(low.dtype)
            if grad_hidden is not None:
                torch.mm(grads, low, out=grad_hidden[chunk])
            if needs_weight:
                added = grads.t() @ hidden[chunk]
                grad_weight = added.to(weight.dtype) if grad_weight is None else grad_weight.add_(added)
        return grad_hidden, grad_weight, None, None, None


def _chunks(num_tokens: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


def _parts(chunk: slice, products: Tensor) -> Iterator[tuple[slice, slice]]:
    """Cuts a chunk into parts for float32. Yields the tokens of each part, and its rows of `products`.

    On a CPU, a part fits in the cache. A GPU computes the chunk as a whole.
    """
    size = len(products)
    if products.device.type == "cpu":
        size = max(1, _PART_LOGITS // products.shape[1])
    for part in _chunks(len(products), size):
        yield slice(chunk.start + part.start, chunk.start + part.stop), part


def _products(hidden: Tensor, weight: Tensor, is_mixed: bool) -> Tensor:
    """[rows, V]: the logits, in the dtype of `hidden`, or in float32 if `is_mixed`."""
    with torch.autocast(hidden.device.type, enabled=False):
        return torch.mm(hidden, weight.t(), out_dtype=torch.float32) if is_mixed else hidden @ weight.t()

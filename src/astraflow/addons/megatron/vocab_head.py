"""The output head whose vocabulary is cut over ranks, in chunks of tokens.

Every rank has all hidden states and some rows of the head's weight. A chunk's logits exist only while the
chunk is computed, and are computed again in the backward pass, as in `trainer.torch.head`. Ranks exchange
three numbers per token, never logits. All of them get the same results.

Legend: P tokens, D width of the hidden states, v rows of the vocabulary on this rank.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from astraflow.protocols import EntropyUse
from astraflow.trainer.torch.head import num_chunk_tokens

__all__ = ["vocab_parallel_logprobs"]


def vocab_parallel_logprobs(
    hidden: Tensor, weight: Tensor, target_ids: Tensor, *, entropy: EntropyUse, group: Any
) -> tuple[Tensor, Tensor | None]:
    """Logprobs of `target_ids` under softmax(hidden @ weight.T), and the entropies of these distributions.

    Shapes: hidden [P, D], weight [v, D], target_ids [P]; results [P], float32, in nats. The weight of rank r
    of the group begins with row r * v of the whole weight. Gradient: through `hidden` and `weight`, from the
    logprobs and, with `entropy="gradient"`, from the entropies. Each rank must compute the same gradient.
    """
    results = cast("tuple[Tensor, Tensor]", _VocabHead.apply(hidden, weight, target_ids, entropy, group))
    return results[0], None if entropy == "none" else results[1]


class _VocabHead(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd functions take positional arguments only
        ctx: Any, hidden: Tensor, weight: Tensor, target_ids: Tensor, entropy: EntropyUse, group: Any
    ) -> tuple[Tensor, Tensor]:
        own_ids = target_ids - dist.get_rank(group) * len(weight)
        logprobs = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        norms = torch.empty_like(logprobs)
        for chunk in _chunks(len(hidden), len(weight)):
            logits = _logits(hidden[chunk], weight)
            largest = logits.amax(-1)
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            logits -= largest[:, None]
            weights = logits.exp()
            sums = torch.stack((_picked(logits, own_ids[chunk]), weights.sum(-1), (weights * logits).sum(-1)))
            dist.all_reduce(sums, group=group)
            target, total, weighted = sums
            logprobs[chunk] = target - total.log()
            entropies[chunk] = total.log() - weighted / total
            norms[chunk] = largest + total.log()
        ctx.entropy = entropy
        ctx.group = group
        if entropy != "gradient":
            ctx.mark_non_differentiable(entropies)
        ctx.save_for_backward(hidden, weight, own_ids, norms, entropies)
        return logprobs, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        """d logprob / d logits = onehot - p; d entropy / d logits = -p * (log p + entropy)."""
        grad_logprobs, grad_entropies = grad_outputs
        hidden, weight, own_ids, norms, entropies = cast("tuple[Tensor, ...]", ctx.saved_tensors)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for chunk in _chunks(len(hidden), len(weight)):
            logs = _logits(hidden[chunk], weight) - norms[chunk, None]
            slope = -grad_logprobs[chunk, None]
            if ctx.entropy == "gradient":
                slope = slope - grad_entropies[chunk, None] * (logs + entropies[chunk, None])
            grads = logs.exp_().mul_(slope)
            is_here = (own_ids[chunk] >= 0) & (own_ids[chunk] < len(weight))
            rows = is_here.nonzero()[:, 0]
            grads[rows, own_ids[chunk][rows]] += grad_logprobs[chunk][rows]
            low = grads.to(weight.dtype)
            grad_hidden[chunk] = low @ weight
            grad_weight += low.t() @ hidden[chunk]
        dist.all_reduce(grad_hidden, group=ctx.group)
        return grad_hidden, grad_weight, None, None, None


def _chunks(num_tokens: int, vocab_size: int) -> Iterator[slice]:
    size = num_chunk_tokens(vocab_size)
    return (slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size))


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """[rows, v], in float32."""
    return (hidden @ weight.t()).float()


def _picked(logits: Tensor, own_ids: Tensor) -> Tensor:
    """[rows]: the logit of each target; 0 if another rank has it."""
    is_here = (own_ids >= 0) & (own_ids < logits.shape[1])
    picked = logits.gather(1, own_ids.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    return torch.where(is_here, picked, 0.0)

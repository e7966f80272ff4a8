"""Cuts the tokens of a pass over the ranks that compute the same batch (sequence parallelism as in Ulysses).

    rank r    its part of the packed tokens, all heads     embedding, norms, projections, MLP
              all tokens, its part of the heads            attention, between two exchanges
              the trained tokens predicted in its part     output head; then all ranks get all values

Every rank has complete layers, and computes the part of their gradient that comes from its tokens. If the
tokens cannot be cut into equal parts, padding is added at the end, which attention ignores.

Source: Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509), section 3.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

__all__ = ["TokenPart"]


@dataclass(frozen=True, slots=True)
class TokenPart:
    """This rank's part of the tokens. Example: with 5 tokens on 2 ranks, rank 1 has tokens 3 and 4 and one of
    padding."""

    rank: int
    world: int
    group: Any
    num_tokens: int
    """Number of tokens of the whole layout."""

    @property
    def size(self) -> int:
        """Number of tokens per rank."""
        return -(-self.num_tokens // self.world)

    def own(self, tokens: Tensor) -> Tensor:
        """[n] of [N]: this rank's part, padded with zeros."""
        filled = functional.pad(tokens, (0, self.size * self.world - self.num_tokens))
        return filled[self.rank * self.size :][: self.size]

    def chosen(self, positions: Tensor) -> Tensor:
        """The indices of those positions [P] of the whole layout that are in this part."""
        return (positions // self.size == self.rank).nonzero()[:, 0]

    def heads(self, states: Tensor) -> Tensor:
        """[1, H, n, D] -> [1, H / world, N, D]: this rank's part of the heads, for all tokens."""
        num_heads, _, dim = states.shape[1:]
        parts = states.reshape(self.world, num_heads // self.world, self.size, dim)
        received = cast("Tensor", _Exchange.apply(parts, self.group))
        return received.transpose(0, 1).flatten(1, 2)[None, :, : self.num_tokens]

    def tokens(self, states: Tensor) -> Tensor:
        """[1, N, H / world, D] -> [1, n, H, D]: all heads, for this rank's tokens."""
        _, _, num_heads, dim = states.shape
        filled = functional.pad(states[0], (0, 0, 0, 0, 0, self.size * self.world - self.num_tokens))
        received = cast("Tensor", _Exchange.apply(filled.reshape(self.world, -1, num_heads, dim), self.group))
        return received.transpose(0, 1).flatten(1, 2)[None]

    def all_values(self, values: Tensor, chosen: Tensor, num_values: int) -> Tensor:
        """[P, ...] on all ranks: this rank's values [p, ...] at the indices `chosen`, and those of the other
        ranks. All ranks must compute the same from it, since a value's gradient returns only to its own
        rank."""
        return cast("Tensor", _AllValues.apply(values, chosen, num_values, self.group))


class _Exchange(torch.autograd.Function):
    """Sends part r of [world, ...] to rank r, and receives part r from rank r; backward likewise."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchange(parts, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        return _exchange(grad_outputs[0], ctx.group), None


def _exchange(parts: Tensor, group: Any) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


class _AllValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, chosen: Tensor, num_values: int, group: Any) -> Tensor:
        ctx.save_for_backward(chosen)
        whole = values.new_zeros(num_values, *values.shape[1:])
        whole[chosen] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (chosen,) = cast("tuple[Tensor]", ctx.saved_tensors)
        return grad_outputs[0].index_select(0, chosen), None, None, None

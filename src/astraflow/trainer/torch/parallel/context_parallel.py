"""Cuts the tokens of a pass over the ranks that compute the same batch (sequence parallelism as in Ulysses).

    rank r    its part of the packed tokens, all heads     embedding, norms, projections, MLP
              all tokens, its part of the heads            attention, between two exchanges
              the trained tokens predicted in its part     output head; then all ranks get all of them

Every rank has whole layers, and finds the part of their gradient that its tokens make. A layout whose tokens
cannot be cut into equal parts gets a few more at its end, which attention leaves out.

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
    """The part of this rank. Example: with 5 tokens on 2 ranks, rank 1 has those at 3 and 4 and one more."""

    rank: int
    world: int
    group: Any
    num_tokens: int
    """Of the whole layout."""

    @property
    def size(self) -> int:
        """Tokens of each rank."""
        return -(-self.num_tokens // self.world)

    def own(self, tokens: Tensor) -> Tensor:
        """[n] of [N]: this rank's part, filled up with zeros."""
        filled = functional.pad(tokens, (0, self.size * self.world - self.num_tokens))
        return filled[self.rank * self.size :][: self.size]

    def chosen(self, positions: Tensor) -> Tensor:
        """Which of some positions [P] of the whole layout are in this part."""
        return (positions // self.size == self.rank).nonzero()[:, 0]

    def heads(self, states: Tensor) -> Tensor:
        """[1, H / world, N, D] of [1, H, n, D]: this rank's part of the heads, of all tokens."""
        num_heads, _, dim = states.shape[1:]
        parts = states.reshape(self.world, num_heads // self.world, self.size, dim)
        found = cast("Tensor", _Exchange.apply(parts, self.group))
        return found.transpose(0, 1).flatten(1, 2)[None, :, : self.num_tokens]

    def tokens(self, states: Tensor) -> Tensor:
        """[1, n, H, D] of [1, N, H / world, D]: all heads, of this rank's tokens."""
        _, _, num_heads, dim = states.shape
        filled = functional.pad(states[0], (0, 0, 0, 0, 0, self.size * self.world - self.num_tokens))
        found = cast("Tensor", _Exchange.apply(filled.reshape(self.world, -1, num_heads, dim), self.group))
        return found.transpose(0, 1).flatten(1, 2)[None]

    def whole(self, values: Tensor, chosen: Tensor, num_values: int) -> Tensor:
        """[P, ...] on all ranks: the values [p, ...] of this one at the places `chosen`, and those of the
        others. Each rank must make the same of it, since a gradient goes back to the rank with the value
        alone."""
        return cast("Tensor", _Whole.apply(values, chosen, num_values, self.group))


class _Exchange(torch.autograd.Function):
    """Sends part r of [world, ...] to rank r, and puts what rank r sends in its place; backward as well."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        return _exchanged(grad_outputs[0], ctx.group), None


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    sent = parts.contiguous()
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=group)
    return found


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, chosen: Tensor, num_values: int, group: Any) -> Tensor:
        ctx.save_for_backward(chosen)
        found = values.new_zeros(num_values, *values.shape[1:])
        found[chosen] = values
        dist.all_reduce(found, group=group)
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None, None, None]:
        (chosen,) = cast("tuple[Tensor]", ctx.saved_tensors)
        return grad_outputs[0].index_select(0, chosen), None, None, None

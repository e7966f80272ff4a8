"""Picks one token per row from logits, with its logprob. Pure functions of tensors.

The randomness of a token is one uniform number, made from the request's seed and the token's position in its
completion. So a request gets the same tokens whatever else is in the batch. top-p and top-k only restrict
which tokens may be picked. The reported logprob is over the full vocabulary, at the row's temperature.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["Restriction", "SamplingRows", "pick_tokens", "token_logprobs", "uniforms"]

_BLOCK_TOKENS = 256
"""Largest number of tokens in a block of the vocabulary; a block divides it."""
_UNIFORM_BITS = 48
"""Below the 53 bits of a float64, so that `u < 1` survives the product with a rounded total."""
# Constants of splitmix64 (Steele et al. 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Restriction:
    """Columns [B] that restrict the tokens. Unrestricted rows have `top_p` 1 and `top_k` = vocabulary
    size."""

    top_p: Tensor
    top_k: Tensor


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Columns [B] of one step. A field that no row needs is None, and then costs nothing."""

    uniforms: Tensor
    """float64 in [0, 1)."""
    inverse_temperatures: Tensor | None
    """None: all rows have temperature 1."""
    is_greedy: Tensor | None
    """None: no row is greedy. A greedy row has inverse temperature 1."""
    restriction: Restriction | None


def uniforms(seeds: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.float64]:
    """A number in [0, 1) per row: the output of splitmix64 for the row's seed and position.

    The products overflow on purpose: splitmix64 computes modulo 2**64.
    """
    mixed = seeds + (places + 1).astype(np.uint64) * _STEP
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
    mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(64 - _UNIFORM_BITS)).astype(np.float64) * 2.0**-_UNIFORM_BITS


def pick_tokens(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Picks one token per row, and its logprob: int64 [B], float32 [B], from logits [B, V].

    Inverse transform sampling: picks the first token with a cumulative probability above the row's uniform.
    """
    scaled = logits.float()
    if rows.inverse_temperatures is not None:
        scaled = scaled * rows.inverse_temperatures[:, None]
    probs = torch.softmax(scaled, -1)
    allowed = probs
    if rows.restriction is not None:
        allowed = probs * _allowed(probs, rows.restriction)
    picked = _first_above(allowed, rows.uniforms[:, None])
    if rows.is_greedy is not None:
        picked = torch.where(rows.is_greedy[:, None], logits.argmax(-1, keepdim=True), picked)
    # Computed as a trainer does, so that both can agree to the last bit.
    return picked[:, 0], torch.log_softmax(scaled, -1).gather(1, picked)[:, 0]


def _first_above(probs: Tensor, shares: Tensor) -> Tensor:
    """[B, 1]: the first token at which the cumulative probabilities [B, V] exceed a share [B, 1] of their
    total.

    The total isn't 1 if tokens were left out. Of a large vocabulary, only the block that has the token is
    accumulated token by token.
    """
    size = math.gcd(probs.shape[1], _BLOCK_TOKENS)
    if size == probs.shape[1]:
        cumulative = torch.cumsum(probs, -1, dtype=torch.float64)
        picked = torch.searchsorted(cumulative, shares * cumulative[:, -1:], right=True)
        return picked.clamp_(max=size - 1)  # reached only where logits are not finite
    blocks = probs.view(len(probs), -1, size)
    sums = blocks.sum(-1).double()  # summing in float64 takes ten times as long
    ends = torch.cumsum(sums, -1)
    wanted = shares * ends[:, -1:]
    block = torch.searchsorted(ends, wanted, right=True).clamp_(max=blocks.shape[1] - 1)
    own = blocks.gather(1, block[:, :, None].expand(-1, -1, size))[:, 0]
    cumulative = torch.cumsum(own, -1, dtype=torch.float64)
    wanted -= ends.gather(1, block) - sums.gather(1, block)
    wanted.clamp_(min=0.0)  # so that no token without probability is picked
    # The two sums of the block are rounded differently. So the token is at most the last likely one.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    picked = torch.minimum(torch.searchsorted(cumulative, wanted, right=True), last)
    return picked.clamp_(max=size - 1) + block * size  # clamped as above


def token_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Logprobs [T] of the given tokens at temperature 1, from logits [T, V]."""
    return torch.log_softmax(logits.float(), -1).gather(1, targets[:, None])[:, 0]


def _allowed(probs: Tensor, restriction: Restriction) -> Tensor:
    """[B, V] whether a token may be picked.

    Among the `top_k` most probable tokens, these are the fewest that together have the share `top_p` of the
    probability of those `top_k`.
    """
    ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    within_k = rank < restriction.top_k[:, None]
    ordered = ordered * within_k
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    top_p = restriction.top_p[:, None]
    within_p = (before < top_p * ordered.sum(-1, keepdim=True, dtype=torch.float64)) | (top_p >= 1)
    return torch.zeros_like(within_k.expand_as(probs)).scatter_(1, order, within_k & within_p)

"""Advantages normalised over a batch: exact over all of its trained tokens, whatever ranks it is cut for."""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from astraflow.dataflow.core.state import ReadyGroup

__all__ = ["normalized"]

_EPSILON = 1e-6


def normalized(groups: Sequence[ReadyGroup], mode: Literal["none", "scale", "whiten"]) -> list[ReadyGroup]:
    """The groups with other advantages; those given stay as they are.

    `scale`:  A / (sqrt(mean(A^2)) + 1e-6);  `whiten`: (A - mean(A)) / (sqrt(mean(A^2) - mean(A)^2) + 1e-6);
    means over trained tokens.
    """
    if mode == "none":
        return list(groups)
    num = sum(group.num_trained_tokens for group in groups)
    mean = sum(group.advantage_sum for group in groups) / num if mode == "whiten" else 0.0
    square = sum(group.advantage_square_sum for group in groups) / num
    scale = 1.0 / (math.sqrt(max(0.0, square - mean * mean)) + _EPSILON)
    return [_changed(group, mean, scale) for group in groups]


def _changed(group: ReadyGroup, mean: float, scale: float) -> ReadyGroup:
    """A -> (A - mean) * scale, and the sums over trained tokens accordingly."""
    num, total = group.num_trained_tokens, group.advantage_sum
    square = group.advantage_square_sum - 2 * mean * total + mean * mean * num
    samples = tuple(
        msgspec.structs.replace(
            sample, advantages=tuple((s, e, (value - mean) * scale) for s, e, value in sample.advantages)
        )
        for sample in group.samples
    )
    return msgspec.structs.replace(
        group,
        samples=samples,
        advantage_sum=(total - mean * num) * scale,
        advantage_square_sum=square * scale * scale,
    )

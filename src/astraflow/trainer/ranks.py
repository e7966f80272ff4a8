"""What the ranks of one trainer tell each other about a batch: each has a slice of it, all know the whole.

A rank is a process with a share of the model and of every batch. Whatever is over a whole batch
(denominators, statistics of a loss, metrics) is made of what all ranks gather, in their order, so that each
finds the same numbers. Every rank must make the same calls in the same order; a call that misses a rank fails
after the timeout of the process group.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["ALONE", "ProcessRanks", "Ranks", "is_lost_contact"]


class Ranks(Protocol):
    """The ranks of a trainer, as one of them sees them."""

    @property
    def rank(self) -> int:
        """Which one this is, from 0."""
        ...

    @property
    def world(self) -> int:
        """How many there are."""
        ...

    def each(self, value: Any) -> list[Any]:
        """The value of every rank, by rank. Anything that JSON can hold."""
        ...

    def whole(self, column: NDArray[Any]) -> NDArray[Any]:
        """The columns [T] or [T, W] of all ranks, one after the other. They may differ in length."""
        ...


class _Alone:
    """A trainer of one process."""

    rank = 0
    world = 1

    def each(self, value: Any) -> list[Any]:
        return [value]

    def whole(self, column: NDArray[Any]) -> NDArray[Any]:
        return column


ALONE: Ranks = _Alone()


def is_lost_contact(err: BaseException) -> bool:
    """Whether an error is what torch raises where another rank is gone or too late: gloo a RuntimeError and
    no class below it, NCCL a DistError."""
    return type(err) is RuntimeError or isinstance(err, dist.DistError)


class ProcessRanks:
    """The ranks of torch's process group, which must be initialised, or of a part of it. Implements `Ranks`.

    Example: `ProcessRanks().whole(np.array([dist.get_rank()]))` -> `[0, 1]` on both of two ranks.
    """

    def __init__(self, group: Any = None) -> None:
        """`group`: a process group with this rank; all ranks if it is None."""
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def each(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        return [json.loads(part.tobytes()) for part in self._parts(text)]

    def whole(self, column: NDArray[Any]) -> NDArray[Any]:
        parts = [part.view(column.dtype).reshape(-1, *column.shape[1:]) for part in self._parts(column)]
        return np.concatenate(parts)

    def _parts(self, column: NDArray[Any]) -> Sequence[NDArray[np.uint8]]:
        """The bytes of a column of every rank."""
        data = torch.from_numpy(np.ascontiguousarray(column).reshape(-1).view(np.uint8).copy())
        sizes = [int(size) for size in self._gathered(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self._gathered(padded)
        return [row[:size].numpy() for row, size in zip(rows, sizes, strict=True)]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """A tensor of every rank, all of the same shape."""
        found = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(found, own, group=self._group)
        return found

"""The communication between a trainer's ranks about a batch: each has a slice, and gathers the others'
numbers.

A rank is a process with a share of the model and of every batch. Numbers over the whole batch (denominators,
statistics of a loss, metrics) are computed from values gathered from all ranks in rank order, so that every
rank gets the same result. Every rank must make the same calls in the same order; if one is missing, a call
fails after the timeout of the process group.
"""

import json
from collections.abc import Sequence
from traceback import walk_tb
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["ALONE", "ProcessRanks", "Ranks", "SlicesBatches", "is_lost_contact"]


class Ranks:
    """The ranks of a trainer, from the view of one of them; here, the only one."""

    rank: int = 0
    """The number of this rank."""
    world: int = 1
    """The number of ranks."""

    def gather_values(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order. A value is anything that JSON can represent."""
        return [value]

    def gather_column(self, column: NDArray[Any]) -> NDArray[Any]:
        """The columns [T] or [T, W] of all ranks, concatenated in rank order. They may differ in length."""
        return column


ALONE = Ranks()


@runtime_checkable
class SlicesBatches(Protocol):
    """Optional interface of a `TrainerBackend` with several ranks."""

    @property
    def data_ranks(self) -> Ranks:
        """One rank for each slice of a batch, including this one, from which a learner gathers."""
        ...


def is_lost_contact(err: BaseException) -> bool:
    """Whether torch raised an error because another rank is gone or too late.

    NCCL raises a DistError. Gloo raises exactly RuntimeError, not a subclass, but so do cuBLAS and others:
    this error counts only if `torch.distributed` made the call that failed.
    """
    if type(err) is not RuntimeError:
        return isinstance(err, dist.DistError)
    names = [frame.f_globals.get("__name__", "") for frame, _ in walk_tb(err.__traceback__)]
    # A DTensor calls its collectives as operators. It computes in one module, and communicates in others.
    operators = ("torch._ops", "torch._library")
    caller = next((name for name in reversed(names) if not name.startswith(operators)), "")
    return caller.startswith("torch.distributed.") and caller != "torch.distributed.tensor._dispatch"


class ProcessRanks(Ranks):
    """The ranks of torch's process group, which must be initialized, or of a subgroup.

    Example: `ProcessRanks().gather_column(np.array([dist.get_rank()]))` -> `[0, 1]` on both of two ranks.
    """

    def __init__(self, group: Any = None) -> None:
        """`group`: a process group that contains this rank; None means all ranks."""
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def gather_values(self, value: Any) -> list[Any]:
        text = np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
        return [json.loads(part.tobytes()) for part in self._parts(text)]

    def gather_column(self, column: NDArray[Any]) -> NDArray[Any]:
        parts = [part.view(column.dtype).reshape(-1, *column.shape[1:]) for part in self._parts(column)]
        return np.concatenate(parts)

    def _parts(self, column: NDArray[Any]) -> Sequence[NDArray[np.uint8]]:
        """The bytes of the column of every rank."""
        data = torch.from_numpy(np.ascontiguousarray(column).reshape(-1).view(np.uint8).copy())
        sizes = [int(size) for size in self._gather(torch.tensor([len(data)]))]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = self._gather(padded)
        return [row[:size].numpy() for row, size in zip(rows, sizes, strict=True)]

    def _gather(self, own: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which must have the same shape."""
        parts = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(parts, own, group=self._group)
        return parts

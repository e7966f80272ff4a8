"""Copies weights for a version while training continues.

    caller's thread       weights --cast, on the device--> a copy that later steps do not touch
    consumer's thread     the copy --> pinned host memory, tensor after tensor --> `HostTensor`s

So the caller waits only for the cast, which is one pass over the device's memory. The copy takes as many
bytes on the device as the version has, and is freed tensor by tensor. On a CPU, the cast is the host copy. It
is a single allocation: many small ones, between the tensors that are gathered at the same time, would leave
holes in the heap that the next version cannot use. If several ranks share a version, each copies its own
elements.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from astraflow.models.loading import DTYPES, DtypeName, host_view
from astraflow.types.host_tensors import HostTensor

__all__ = ["begin_export", "part_of"]


@dataclass(frozen=True, slots=True)
class _Copy:
    """Some elements of a tensor, in the tensor's device memory."""

    name: str
    shape: tuple[int, ...]
    first_idx: int
    values: Tensor

    def to_host_tensor(self, values: Tensor) -> HostTensor:
        """The same elements as a `HostTensor`; `values` holds them in host memory."""
        return replace(host_view(self.name, values), shape=self.shape, first_idx=self.first_idx)


def begin_export(
    tensors: Iterable[tuple[str, Tensor]],
    dtype: DtypeName,
    *,
    elements: Mapping[str, tuple[int, int]],
) -> Iterator[HostTensor]:
    """Copies tensors in their current state, rounded to `dtype`. Iterate over the result once, in any thread.

    `elements`: the elements `[first, last)` to copy, by tensor name.
    Raises: WeightsError if a tensor does not hold floating-point numbers.
    """
    copies: list[_Copy] = []
    num_elements = sum(last - first for first, last in elements.values())
    room = torch.empty(num_elements, dtype=DTYPES[dtype])  # takes no memory until it is written
    for name, tensor in tensors:
        first, last = elements[name]
        # `reshape` makes a tensor contiguous that is a strided view of its weight.
        values = tensor.detach().reshape(-1)[first:last]
        if values.is_cuda:
            values = values.to(DTYPES[dtype], copy=True)
        else:
            values = room[: last - first].copy_(values)
            room = room[last - first :]
        copies.append(_Copy(name, tuple(tensor.shape), first, values))
        del tensor, values  # else this tensor stays in memory while the next one is gathered
    if copies and copies[0].values.is_cuda:
        is_cast = torch.cuda.Event()
        is_cast.record(torch.cuda.current_stream(copies[0].values.device))
        return _copy_from_device(copies, is_cast)
    return iter([copy.to_host_tensor(copy.values) for copy in copies])


def part_of(tensor: HostTensor, first: int, last: int) -> HostTensor:
    """The elements `[first, last)` of a whole tensor, in the same memory."""
    width = DTYPES[tensor.dtype].itemsize
    return replace(tensor, data=tensor.data[first * width : last * width], first_idx=first)


def _copy_from_device(copies: list[_Copy], is_cast: torch.cuda.Event) -> Iterator[HostTensor]:
    """Moves the copies to the host on a separate stream, concurrently with the training steps."""
    stream = torch.cuda.Stream(copies[0].values.device)
    stream.wait_event(is_cast)
    copies.reverse()  # `pop` then takes them in order, and frees each on the device once it is moved
    while copies:
        copy = copies.pop()
        with torch.cuda.stream(stream):
            host = torch.empty(copy.values.shape, dtype=copy.values.dtype, pin_memory=True)
            host.copy_(copy.values, non_blocking=True)
        stream.synchronize()
        yield copy.to_host_tensor(host)

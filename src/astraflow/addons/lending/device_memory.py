"""Frees the memory of tensors on a device, and brings it back, while the tensors themselves stay the same.

A storage is resized to nothing and back, so everything that refers to it stays valid: views, fused weights,
parameters, and the state of optimizers. Nobody may touch the tensors in between.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

__all__ = ["DeviceMemory", "MemoryGroup"]


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """Tensors that are freed together."""

    tensors: Sequence[Tensor]
    is_kept: bool
    """Whether their values come back. Otherwise, they are zeros afterwards."""


@dataclass(frozen=True, slots=True)
class _Freed:
    storage: UntypedStorage
    num_bytes: int
    copy: Tensor | None
    """Its values in host memory; None if they aren't kept."""


class DeviceMemory:
    """The memory of a program on its device. Copies in host memory are reused, because pinning is slow.

    Example: `memory.free([MemoryGroup(cache, False), MemoryGroup(weights, True)], keep_bytes=8e9)`, and later
    `memory.restore()`.
    """

    def __init__(self) -> None:
        self._freed: list[_Freed] = []
        self._copies: dict[int, list[Tensor]] = defaultdict(list)
        """Host memory for copies, by size."""

    def free(self, groups: Sequence[MemoryGroup], *, keep_bytes: float) -> int:
        """Frees groups, the first one first, until at most `keep_bytes` are left. Returns the bytes freed."""
        parts = [(storage, group.is_kept) for group, own in _storages(groups) for storage in own]
        num_held = sum(storage.nbytes() for storage, _ in parts)
        num_before = num_held
        if num_held > keep_bytes and torch.cuda.is_available():
            torch.cuda.synchronize()  # copies from this memory may still be running
        for storage, is_kept in parts:
            if num_held <= keep_bytes:
                break
            num_held -= storage.nbytes()
            copy = self._copy(storage) if is_kept else None
            self._freed.append(_Freed(storage, storage.nbytes(), copy))
            storage.resize_(0)
        if num_held < num_before and torch.cuda.is_available():
            torch.cuda.empty_cache()  # gives the memory to other processes
        return num_before - num_held

    def restore(self) -> bool:
        """Brings all memory back. Returns whether values were lost."""
        freed = self._freed
        self._freed = []
        for part in freed:
            part.storage.resize_(part.num_bytes)
            if part.copy is None:
                _bytes_of(part.storage).zero_()
            else:
                _bytes_of(part.storage).copy_(part.copy)
                self._copies[part.num_bytes].append(part.copy)
        return any(part.copy is None for part in freed)

    def _copy(self, storage: UntypedStorage) -> Tensor:
        num = storage.nbytes()
        is_pinned = storage.device.type == "cuda"
        own = self._copies[num]
        host = own.pop() if own else torch.empty(num, dtype=torch.uint8, pin_memory=is_pinned)
        return host.copy_(_bytes_of(storage))


def _storages(groups: Sequence[MemoryGroup]) -> list[tuple[MemoryGroup, list[UntypedStorage]]]:
    """The storages of each group. One that several tensors share is that of the first of them. Memory that
    belongs to someone else, such as a mapped file, is left out."""
    devices = {tensor.device for group in groups for tensor in group.tensors}
    on_device = {device for device in devices if device.type != "cpu"} or devices
    storages: list[tuple[MemoryGroup, list[UntypedStorage]]] = []
    addresses: set[int] = set()
    for group in groups:
        own: list[UntypedStorage] = []
        for tensor in group.tensors:
            storage = tensor.untyped_storage()
            is_wanted = tensor.device in on_device and storage.nbytes() and storage.resizable()
            if is_wanted and storage.data_ptr() not in addresses:
                addresses.add(storage.data_ptr())
                own.append(storage)
        storages.append((group, own))
    return storages


def _bytes_of(storage: UntypedStorage) -> Tensor:
    """A view of a storage as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

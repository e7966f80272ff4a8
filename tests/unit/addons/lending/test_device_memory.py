"""Memory that is freed and brought back, while everything that refers to it stays the same."""

import torch

from astraflow.addons.lending.device_memory import DeviceMemory, MemoryGroup


def nbytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def test_values_come_back_where_they_are_kept_and_are_zeros_elsewhere() -> None:
    cache = torch.ones(8, 4)
    weights = torch.randn(6, 4)
    view = weights[2:].T
    before = weights.clone()
    memory = DeviceMemory()
    freed = memory.free([MemoryGroup([cache], False), MemoryGroup([weights, view], True)], keep_bytes=0)
    assert freed == 4 * (32 + 24)
    assert nbytes(cache, weights) == 0
    assert memory.restore()
    assert torch.equal(weights, before)
    assert torch.equal(view, before[2:].T)
    assert not cache.any()
    assert not memory.restore(), "it has come back"


def test_as_much_stays_as_may() -> None:
    averages = [torch.ones(16), torch.ones(16)]
    weights = torch.ones(16)
    memory = DeviceMemory()
    groups = [MemoryGroup(averages, True), MemoryGroup([weights], True)]
    assert memory.free(groups, keep_bytes=3 * 64) == 0
    assert memory.free(groups, keep_bytes=2 * 64) == 64
    assert [nbytes(each) for each in (*averages, weights)] == [0, 64, 64]
    assert not memory.restore()
    assert torch.equal(averages[0], torch.ones(16))


def test_copies_in_host_memory_are_used_again() -> None:
    weights = torch.ones(16)
    memory = DeviceMemory()
    groups = [MemoryGroup([weights], True)]
    memory.free(groups, keep_bytes=0)
    first = memory._freed[0].copy  # pyright: ignore[reportPrivateUsage]
    memory.restore()
    weights += 1
    memory.free(groups, keep_bytes=0)
    assert memory._freed[0].copy is first  # pyright: ignore[reportPrivateUsage]
    memory.restore()
    assert torch.equal(weights, torch.full((16,), 2.0))

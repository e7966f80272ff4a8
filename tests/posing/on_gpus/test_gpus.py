"""Posing GPUs refuse what GPUs refuse."""

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from posing import gpus


def on_gpu(*shape: int) -> Tensor:
    return torch.ones(shape, device="cuda:1")


def test_a_process_sees_eight_gpus_or_those_that_are_named() -> None:
    assert torch.cuda.device_count() == 8
    os.environ["CUDA_VISIBLE_DEVICES"] = "5,3"
    try:
        gpus.install()
        assert torch.cuda.device_count() == 2
        assert torch.cuda.get_device_name(1) == "Posing GPU 3"
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(2, device="cuda:2")
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        gpus.install()


@pytest.mark.parametrize(
    "mix",
    [
        lambda: on_gpu(2, 2) + torch.ones(2, 2),
        lambda: on_gpu(2, 2) @ torch.ones(2, 2),
        lambda: torch.nn.functional.embedding(torch.zeros(2, dtype=torch.long), on_gpu(2, 2)),
        lambda: on_gpu(2).index_select(0, torch.zeros(1, dtype=torch.long, device="cuda:0")),
        lambda: torch.cat([on_gpu(2), torch.ones(2, device="cuda:0")]),
    ],
)
def test_operands_must_be_on_one_device(mix: Callable[[], Tensor]) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        mix()


def test_numpy_reads_only_host_memory() -> None:
    with pytest.raises(TypeError, match="can't convert cuda:1 device type tensor to numpy"):
        on_gpu(2).numpy()


def test_a_kernel_needs_device_memory_for_its_output_and_frees_it() -> None:
    before = gpus.used_bytes(1)
    whole = on_gpu(1000)
    part = whole.view(10, 100)[2:3]
    assert gpus.used_bytes(1) - before == 4000
    total = part + 1
    assert gpus.used_bytes(1) - before == 4400
    del whole, total
    assert gpus.used_bytes(1) - before == 4000  # the view keeps its whole
    del part
    assert gpus.used_bytes(1) == before


def test_a_full_device_has_no_memory_left() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        torch.empty(90 << 30, dtype=torch.uint8, device="cuda:1")


@pytest.mark.parametrize(
    ("wait", "name"),
    [
        (lambda: on_gpu(3).sum().item(), "wait:aten::_local_scalar_dense"),
        (lambda: on_gpu(3).nonzero(), "wait:aten::nonzero"),
        (lambda: on_gpu(3).cpu(), "wait:copy_to_host"),
        (lambda: torch.ones(3).to("cuda:1"), "wait:copy_to_device"),
        (lambda: torch.ones(3).to("cuda:1", non_blocking=True), "copy_to_device"),
        (lambda: torch.empty(3, pin_memory=True).copy_(on_gpu(3), non_blocking=True), "copy_to_host"),
    ],
)
def test_waits_of_the_host_are_counted(wait: Callable[[], object], name: str) -> None:
    gpus.reset_counters()
    wait()
    assert gpus.counters()[name] == 1

"""Ranks and services get GPUs of those that the run sees."""

import pytest

from astraflow.errors import ConfigError
from astraflow.processes.visible_gpus import gpu_variables, visible_variables

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("listed", "device", "rank", "gpu"),
    [
        (None, "cuda", 0, "0"),
        (None, "cuda:4", 3, "7"),
        ("6,4,2", "cuda:1", 1, "2"),
        ("GPU-8f2a,MIG-31c0", "cuda:0", 1, "MIG-31c0"),
    ],
)
def test_a_rank_sees_one_gpu(
    monkeypatch: pytest.MonkeyPatch, listed: str | None, device: str, rank: int, gpu: str
) -> None:
    monkeypatch.delenv(VISIBLE, raising=False)
    if listed is not None:
        monkeypatch.setenv(VISIBLE, listed)
    assert gpu_variables(device, rank) == {VISIBLE: gpu}


def test_a_rank_on_a_cpu_needs_no_variable() -> None:
    assert gpu_variables("cpu", 3) == {}


def test_the_gpus_of_a_service_are_counted_among_those_of_the_scheduler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VISIBLE, "6, 4,2")
    assert visible_variables(["2", "0"]) == {VISIBLE: "2,6"}
    assert visible_variables(["MIG-31c0"]) == {VISIBLE: "MIG-31c0"}


@pytest.mark.parametrize("listed", ["", "3"])
def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    monkeypatch.setenv(VISIBLE, listed)
    with pytest.raises(ConfigError, match="GPU 1 is not among the"):
        gpu_variables("cuda:0", 1)

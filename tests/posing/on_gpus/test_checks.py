"""A run is refused before anything is loaded if its GPUs can't do its work."""

import contextlib
import gc
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from astraflow.errors import ConfigError, DataError
from astraflow.recipe.recipe import Recipe
from astraflow.run.preflight import check_recipe
from drivers.gpu_recipes import gpu_recipe
from posing import gpus
from posing.gpus import (
    CAPABILITY_VARIABLE,
    CAPACITY_VARIABLE,
    NAME_VARIABLE,
    PROBLEM_VARIABLE,
    TAKEN_VARIABLE,
)

VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The environment of these tests, which is that of the programs that they start."""
    before = dict(os.environ)
    os.environ[VISIBLE] = "0,1,2,3,4,5,6,7"  # without it, a machine without a driver's files has no GPUs
    yield
    os.environ.clear()
    os.environ.update(before)
    gpus.install()


@pytest.fixture
def asked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the program that describes the GPUs in this process, whose PyTorch is there already."""

    def ask_program(command: list[str], env: dict[str, str] | None = None) -> CompletedProcess[str]:
        del env
        gc.collect()  # what earlier tests left on the devices
        gpus.install()
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(command[-1], {})
        return CompletedProcess(command, 0, output.getvalue(), "")

    monkeypatch.setattr("astraflow.addons.doctor.gpu_checks.ask_program", ask_program)


in_this_process = pytest.mark.usefixtures("asked_here")


def refusal(recipe: Recipe, **variables: str) -> str:
    """What a run says that starts in this environment; empty if it says nothing about GPUs."""
    os.environ.update(variables)
    try:
        check_recipe(recipe)
    except (ConfigError, DataError) as err:  # its data is not there, either
        return "\n".join(line for line in str(err).splitlines() if re.search(r"GPU|NCCL|PyTorch", line))
    return ""


def on_gpus(folder: Path, ranks: int = 1, **rollout: Any) -> Recipe:
    engine = {"name": "torch", "device": "cuda:0"}
    return gpu_recipe(folder, ranks, rollout={"engine": engine, "gpus": ["4"], "services": 1, **rollout})


def test_good_gpus_pass(tmp_path: Path) -> None:
    assert refusal(on_gpus(tmp_path, ranks=4), **{CAPABILITY_VARIABLE: "8.6"}) == ""  # kernels of 8.0


@in_this_process
def test_gpus_are_counted_among_those_of_the_scheduler(tmp_path: Path) -> None:
    text = refusal(on_gpus(tmp_path, ranks=2), **{VISIBLE: "6"})
    assert f"among those that {VISIBLE} = '6' lists" in text


@in_this_process
def test_a_gpu_that_is_too_small_or_taken_is_named(tmp_path: Path) -> None:
    text = refusal(on_gpus(tmp_path), **{CAPACITY_VARIABLE: "1000"})
    assert "GPU 0 (Posing GPU 0) has 0.0 of 0.0 GB free, but trainer-actor need at least" in text
    assert "it is too small" in text
    os.environ.pop(CAPACITY_VARIABLE)
    text = refusal(on_gpus(tmp_path), **{TAKEN_VARIABLE: str((80 << 30) - 1000)})
    assert "has 0.0 of 85.9 GB free" in text
    assert "other processes take the rest: end them" in text


@in_this_process
@pytest.mark.parametrize("capability", ["7.5", "11.0"])
def test_a_gpu_without_kernels_is_named(tmp_path: Path, capability: str) -> None:
    text = refusal(on_gpus(tmp_path), **{CAPABILITY_VARIABLE: capability})
    assert re.search(
        rf"GPU 0 \(Posing GPU 0\) has compute capability {capability}, for which PyTorch 2\S+ has no kernels "
        r"\(sm_80, sm_90, sm_100, compute_120\); install a build",
        text,
    )


@in_this_process
def test_ranks_need_whole_gpus(tmp_path: Path) -> None:
    slices = {NAME_VARIABLE: "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}
    text = refusal(on_gpus(tmp_path, ranks=2), **slices)
    assert "policies.actor.train.ranks = 2: some of its GPUs are MIG slices, between which NCCL" in text
    text = refusal(on_gpus(tmp_path, ranks=2), **slices, **{VISIBLE: "MIG-1"})
    assert f"a process sees one MIG slice, unless {VISIBLE} lists the names of more" in text


@in_this_process
def test_an_old_driver_is_named(tmp_path: Path) -> None:
    problem = "The NVIDIA driver on your system is too old (found version 11040). Please update it."
    text = refusal(on_gpus(tmp_path), **{PROBLEM_VARIABLE: problem})
    assert "can't use GPU 0: The NVIDIA driver on your system is too old (found version 11040)" in text
    assert "update the driver, or install a build for its CUDA" in text


@in_this_process
def test_kv_caches_beyond_an_engines_share_are_refused_with_what_is_missing(tmp_path: Path) -> None:
    engine = {"name": "torch", "device": "cuda:0", "gpu_share": 0.5, "num_slots": 65_536, "max_context": 64}
    text = refusal(on_gpus(tmp_path, engine=engine), **{CAPACITY_VARIABLE: "200000000"})
    assert re.search(
        r"gpu_share gives rollout-0 0\.1 GB, but weights and KV caches need [\d.]+ GB more", text
    )
    del engine["gpu_share"]
    text = refusal(on_gpus(tmp_path, engine=engine), **{CAPACITY_VARIABLE: "200000000"})
    assert re.search(r"has 0\.2 of 0\.2 GB free, but rollout-0 need at least [\d.]+ GB, [\d.]+ GB more", text)

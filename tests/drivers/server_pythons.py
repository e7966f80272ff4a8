"""Pythons with the server of an engine, and drivers, of any version: what a check of a machine asks."""

import sys
from pathlib import Path

import pytest

__all__ = ["install_driver", "make_program", "make_python"]


def make_program(path: Path, script: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def make_python(
    folder: Path,
    version: str = "0.32.0",
    *,
    cuda: str = "",
    torch: str = "2.13.0",
    package: str = "vllm",
    library: str = "vllm",
    devices: str = "def device_count(): return 8\ndef get_device_name(idx): return 'NVIDIA H100'\n",
) -> str:
    """A Python with a server and a torch of these versions."""
    site = folder / "site"
    files = {
        f"{library}/__init__.py": f"__version__ = {version!r}",
        f"{package.replace('-', '_')}-{version}.dist-info/METADATA": f"Name: {package}\nVersion: {version}\n",
        "torch/__init__.py": "",
        "torch/version.py": f"__version__ = {torch!r}\ncuda = {cuda or None!r}\nhip = None\n",
        "torch/cuda.py": devices,
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)
    return str(make_program(folder / "python", f'PYTHONPATH={site} exec {sys.executable} "$@"'))


def install_driver(folder: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Gives this machine a driver and a GPU; with an empty version, neither."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if version:
        script = f"case $1 in -L) echo 'GPU 0: NVIDIA H100 (UUID: GPU-1)';; *) echo {version};; esac"
        make_program(folder / "bin" / "nvidia-smi", script)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")

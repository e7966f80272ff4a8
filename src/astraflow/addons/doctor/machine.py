"""Checks of `astraflow doctor` that concern this machine and need no recipe.

A finding is one line: what was checked, what was found and, if there is a problem, what to do.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import astraflow
from astraflow.addons.doctor.memory import GIB
from astraflow.addons.experiments.cores import num_cores
from astraflow.run.checks import Finding
from astraflow.service.memory import available_bytes, limit_bytes
from astraflow.user_input.extras import install_command

__all__ = [
    "examine_machine",
    "existing_parent",
]

_LOW_MEMORY_GIB = 1.0
_LOW_DISK_GIB = 1.0
_NEEDED = ("torch", "transformers", "accelerate", "safetensors", "jinja2")


def examine_machine(run_dir: Path) -> Iterator[Finding]:
    """Checks versions, cores, memory, disk and accelerators."""
    yield _python()
    yield from _packages()
    yield _cores()
    yield _memory()
    yield _disk(run_dir)
    if importlib.util.find_spec("torch") is not None:
        yield _gpus()


def _python() -> Finding:
    text = f"astraflow {astraflow.__version__}, Python {platform.python_version()}, {platform.platform()}"
    if sys.platform != "linux":
        return Finding("warn", "system", text, "AstraFlow is tested on Linux only")
    return Finding("ok", "system", text)


def _packages() -> Iterator[Finding]:
    versions: dict[str, str] = {}
    for name in _NEEDED:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", "packages", f"{name} is not installed", install_command("quickstart"))
    if versions:
        yield Finding("ok", "packages", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _cores() -> Finding:
    cores = num_cores()
    load = os.getloadavg()[0]
    text = f"{cores} cores, load {load:.1f}"
    if load > 1.5 * (os.cpu_count() or 1):  # the load is that of the whole machine
        return Finding(
            "warn", "cores", text, "other processes keep them busy, so the run will be slower than usual"
        )
    return Finding("ok", "cores", text)


def _memory() -> Finding:
    available = available_bytes()
    text = f"{available / GIB:.1f} of {limit_bytes() / GIB:.1f} GiB free"
    if available < _LOW_MEMORY_GIB * GIB:
        return Finding(
            "warn", "memory", text, "each service with torch needs about 0.5 GiB: end other programs"
        )
    return Finding("ok", "memory", text)


def _disk(run_dir: Path) -> Finding:
    folder = existing_parent(run_dir)
    free = shutil.disk_usage(folder).free
    text = f"{free / GIB:.1f} GiB free at {folder}"
    if free < _LOW_DISK_GIB * GIB:
        return Finding("warn", "disk", text, "free some space, or choose another --run-dir")
    return Finding("ok", "disk", text)


def _gpus() -> Finding:
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [
        f"cuda:{idx} {torch.cuda.get_device_name(idx)} ({torch.cuda.mem_get_info(idx)[1] / 2**30:.0f} GiB)"
        for idx in range(num_gpus)
    ]
    return Finding(
        "ok", "GPUs", ", ".join(gpus) if gpus else "torch finds none, so models compute on the CPU"
    )


def existing_parent(path: Path) -> Path:
    """Returns the path if it exists, or the nearest folder above it that exists."""
    path = path.absolute()
    return path if path.exists() else existing_parent(path.parent)

"""Checks of `astraflow doctor` that concern this machine and need no recipe.

A finding is one line: what was checked, what was found and, if there is a problem, what to do.
"""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

import astraflow
from astraflow.addons.sandbox.backends import BACKENDS, advice, tried_maker
from astraflow.addons.sandbox.config import SandboxConfig
from astraflow.errors import Error
from astraflow.user_input.extras import install_command, install_hint, missing_module

__all__ = [
    "GIB",
    "Finding",
    "Level",
    "check_folder",
    "examine_machine",
    "existing_parent",
    "found",
    "num_cores",
    "sandbox_finding",
]

Level = Literal["ok", "warn", "fail"]
GIB = 2**30
_LOW_MEMORY_GIB = 1.0
_LOW_DISK_GIB = 1.0
_NEEDED = ("torch", "transformers", "safetensors", "jinja2")
_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    check: str
    detail: str
    remedy: str = ""


def found(check: str, look: Callable[[], Finding]) -> Finding:
    """Returns what `look` finds. An AstraFlow error or a missing extra is a failure that says what to do."""
    try:
        return look()
    except Error as err:
        return Finding("fail", check, str(err))
    except ModuleNotFoundError as err:
        if not (module := missing_module(err)):
            raise
        return Finding("fail", check, install_hint("this check", [module]))


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


def num_cores() -> int:
    """Returns the number of cores that this process may use.

    It is the number in the process's affinity, or fewer if its control group has a quota.
    """
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    try:
        quota, period = _CPU_QUOTA.read_text(encoding="ascii").split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def _cores() -> Finding:
    cores = num_cores()
    load = os.getloadavg()[0]
    text = f"{cores} cores, load {load:.1f}"
    if load > 1.5 * cores:
        return Finding(
            "warn", "cores", text, "other processes keep them busy, so the run will be slower than usual"
        )
    return Finding("ok", "cores", text)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    if memory.available < _LOW_MEMORY_GIB * GIB:
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


async def sandbox_finding(*, is_needed: bool, has_agents: bool = False) -> Finding:
    """Finds which backends of the sandbox can run a program here, and why the others can't. One is enough.

    `has_agents` means that the recipe has agent programs, whose sandboxes need more from the machine.
    """
    programs = f"programs of a model {'and agent programs ' if has_agents else ''}"
    works: list[str] = []
    problems: list[str] = []
    for backend in BACKENDS:
        try:
            tried = await tried_maker(backend, SandboxConfig(), for_agents=has_agents)
        except Error as err:
            tried = str(err)
        if isinstance(tried, str):
            problems.append(f"{backend}: {tried}")
        else:
            works.append(f"{backend} ({tried.weakness})" if tried.weakness else backend)
    if not works:
        remedy = (
            f"{advice()}. Only rewards that run programs of a model, such as code_tests, and agents with "
            "box: sandbox need one"
        )
        level = "fail" if is_needed or has_agents else "warn"
        return Finding(
            level, "sandbox", f"no sandbox works, so {programs}cannot run ({'; '.join(problems)})", remedy
        )
    spare = f"; the alternative is not needed ({'; '.join(problems)})" if problems else ""
    return Finding("ok", "sandbox", f"{programs}run by {' or '.join(works)}{spare}")


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


def check_folder(run_dir: Path) -> Finding:
    """Checks whether a run could write its folder. Leaves nothing behind."""
    folder = existing_parent(run_dir)
    try:
        with tempfile.NamedTemporaryFile(prefix=".astraflow-doctor-", dir=folder) as file:
            file.write(b"doctor")
            file.flush()
            os.fsync(file.fileno())
    except OSError as err:
        remedy = "choose a --run-dir that you may write to"
        return Finding("fail", "run folder", f"{folder} cannot be written: {err.strerror}", remedy)
    return Finding("ok", "run folder", f"{run_dir} can be written")

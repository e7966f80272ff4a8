"""Checks, before anything is loaded, the GPUs of this machine that a recipe uses.

PyTorch describes them in a short-lived process, because the launcher never imports it. As for memory, only
what lasts for the whole run is counted here. A trainer checks the rest itself, before it loads its model.
GPUs are counted among those that this process sees, which a scheduler may have limited.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from astraflow.addons.doctor.memory import known_parameters, rank_bytes
from astraflow.errors import ConfigError
from astraflow.processes.visible_gpus import VISIBLE, visible_names
from astraflow.recipe.derived import slot_bytes
from astraflow.recipe.recipe import Recipe
from astraflow.rollout.engine_config import EngineVariant, TorchEngineConfig
from astraflow.run.checks import Finding
from astraflow.trainer.backend_config import torch_settings
from astraflow.user_input.extras import install_hint
from astraflow.user_input.interpreters import OWN_MODULES_HIDDEN, ask_program, find_interpreter, last_line
from astraflow.user_input.mistakes import as_written, hint

__all__ = ["FOR_CHECKS", "GpuUser", "check_devices", "check_shared_memory", "check_shares", "gpu_users"]

FOR_CHECKS = (
    "the torch engine on a GPU is for checks: about 5,000 to 8,000 tokens/s at 1.7B, computed and not "
    "measured; for a whole run, set rollout.engine.name to vllm (docs/models.md#vllm)"
)
"""What every report says of a torch engine on a GPU."""
_DEVICES = ("cpu", "cuda", "hpu", "mps", "npu", "xla", "xpu")
"""Kinds of PyTorch devices on which a model can run."""
_GPU_FILES = ("nvidiactl", "nvidia0", "kfd", "dxg", "nvhost-gpu", "nvmap")
"""Files in /dev that exist if an NVIDIA or AMD GPU can be used, including under WSL and on Jetson."""
_DESCRIBE_GPUS = """
import json, sys
try:
    import torch
except ModuleNotFoundError:
    sys.exit(3)
gpus, problem = [], ""
try:
    for idx in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(idx)
        gpu = {"name": torch.cuda.get_device_name(idx), "free": free, "total": total}
        gpus.append({**gpu, "capability": torch.cuda.get_device_capability(idx)})
except (RuntimeError, AssertionError) as err:
    problem = str(err)
found = {"gpus": gpus, "problem": problem, "version": torch.__version__, "arches": torch.cuda.get_arch_list()}
print(json.dumps(found))
"""
_NO_TORCH = 3
"""Exit code of this program where PyTorch is not installed."""
_KERNELS = re.compile(r"(sm|compute)_(\d+)(\d)[a-z]?")
"""An entry of PyTorch's list of architectures: kernels, or code that newer GPUs can compile."""
_SHARED_BYTES = 64 << 20
"""Shared memory per rank on GPUs that is enough for NCCL. Containers often have 64 MB in all."""


class _Gpu(msgspec.Struct):
    name: str
    capability: tuple[int, int]
    free: int
    total: int


class _GpuReport(msgspec.Struct):
    """The GPUs that PyTorch finds, and which architectures it has kernels for."""

    gpus: list[_Gpu] = []
    problem: str = ""
    """Why PyTorch can't use the next GPU; empty if it can use all."""
    version: str = ""
    arches: list[str] = []


@dataclass(frozen=True, slots=True)
class GpuUser:
    """A process that uses a GPU. Example: `GpuUser("rollout-0", shares=(0.4,), num_bytes=3.2e9)`."""

    name: str
    shares: tuple[float, ...] = ()
    """For each program that the process runs there, the share of the memory that it takes at most; 0 if that
    isn't stated. Empty for a trainer, which takes what the shares leave."""
    num_bytes: float = 0.0
    """Memory that it needs there for the whole run: weights, gradients, optimizer, and KV caches; 0 if
    unknown."""


def check_devices(recipe: Recipe) -> Finding | None:
    """Checks the recipe's devices, and says which processes use which GPU.

    Raises: ConfigError if a device is misspelled or is a GPU that this machine lacks, if processes share a
    GPU without stated shares, or if a GPU can't do its work.
    """
    needed: dict[str, dict[str, int]] = {}
    for where, (device, num, python) in _devices(recipe).items():
        kind, _, number = device.partition(":")
        if kind not in _DEVICES or (number and not number.isdigit()):
            expected = hint(kind, _DEVICES) if kind not in _DEVICES else "; expected a number after the colon"
            raise ConfigError(f"{where} = {device!r} is not a device{expected}, e.g. cpu or cuda:0")
        if kind == "cuda":
            needed.setdefault(python, {})[f"{where} = {device!r}"] = int(number or 0) + num
    reports = {python: _describe_gpus(python) for python in needed}
    for python, wanted in needed.items():
        if lacking := [where for where, num in wanted.items() if num > len(reports[python].gpus)]:
            raise ConfigError(_lack_text(lacking, reports[python]))
    users = gpu_users(recipe)
    check_shares(users)
    for own in reports.values():
        names = visible_names() or [str(idx) for idx in range(len(own.gpus))]
        for label, gpu in zip(names, own.gpus, strict=False):
            _check_gpu(label, gpu, users.get(label, ()), own)
    _check_ranks(recipe, next(iter(reports.values()), _GpuReport()))
    lines = [f"GPU {gpu}: {', '.join(user.name for user in own)}" for gpu, own in users.items()]
    engine = recipe.rollout.engine
    if isinstance(engine, TorchEngineConfig) and engine.device.startswith("cuda"):
        return Finding("warn", "users of GPUs", ", ".join(lines), FOR_CHECKS)
    return Finding("ok", "users of GPUs", ", ".join(lines)) if lines else None


def gpu_users(recipe: Recipe) -> Mapping[str, Sequence[GpuUser]]:
    """The processes of this machine that use each GPU, by its number, or by the name that a scheduler gave
    it."""
    users: dict[str, list[GpuUser]] = {}
    for name, policy in recipe.trained.items():
        backend = torch_settings(policy.train.backend)
        if backend is None or not backend.device.startswith("cuda"):
            continue
        first = int(backend.device.partition(":")[2] or 0)
        num_bytes = rank_bytes(policy)
        for label in _labels(range(first, first + policy.train.local_ranks)):
            users.setdefault(label, []).append(GpuUser(f"trainer-{name}", num_bytes=num_bytes))
    engine = recipe.rollout.engine
    for idx in range(recipe.max_services if recipe.has_services_here else 0):
        lists = recipe.rollout.gpus
        gpus = _labels(lists[idx % len(lists)].split(",")) if lists else []
        num_bytes = 0.0
        if isinstance(engine, TorchEngineConfig) and engine.device.startswith("cuda"):
            number = int(engine.device.partition(":")[2] or 0)
            gpus = gpus[number : number + 1] if lists else _labels([number])
            shares = (engine.gpu_share * len(recipe.policies),)
            size = 4.0 if engine.dtype == "float32" else 2.0
            # An evaluation needs a second copy of a model that changes, with a cache of its own.
            copies = {True: 1, False: 2 if recipe.eval.sets else 1}
            num_bytes = size * sum(
                copies[policy.role == "frozen"] * known_parameters(policy.model_dir)
                for policy in recipe.policies.values()
            )
            if engine.num_slots != "auto":  # otherwise the engine chooses by what is free
                num_bytes += engine.num_slots * slot_bytes(recipe)
        elif isinstance(engine, EngineVariant):
            num_policies = len(recipe.policies)
            shares = engine.gpu_shares(num_policies=num_policies, has_evals=bool(recipe.eval.sets))
        else:
            continue
        if not shares:  # it only uses servers that run already
            continue
        for label in gpus:
            users.setdefault(label, []).append(GpuUser(f"rollout-{idx}", shares, num_bytes))
    return users


def check_shares(users: Mapping[str, Sequence[GpuUser]]) -> None:
    """Checks the GPUs that engines share with other programs. Trainers know what they need, which is counted.

    Raises: ConfigError if an engine there states no share, or if the shares leave nothing.
    """
    for label, own in users.items():
        shares = [share for user in own for share in user.shares]
        num_trainers = sum(not user.shares for user in own)
        if not shares or len(shares) + num_trainers < 2:
            continue
        names = ", ".join(user.name for user in own)
        total = sum(shares)
        if not all(shares):
            problem = (
                "and not all state which share of its memory they take; give each its own (rollout.gpus, "
                "train.backend.device), or state the shares: rollout.engine.gpu_share, or the option of the "
                "server, e.g. args: [--gpu-memory-utilization, '0.3']"
            )
        elif total > 1 or (num_trainers and total == 1):
            left = "which leaves nothing for the trainer" if num_trainers else "more than it has"
            problem = (
                f"whose shares of its memory add up to {total:g}, {left}; lower them, or use fewer services"
            )
        else:
            continue
        raise ConfigError(
            f"GPU {label} is used by {len(shares) + num_trainers} programs of {names}, {problem}"
        )


def _check_gpu(label: str, gpu: _Gpu, users: Sequence[GpuUser], report: _GpuReport) -> None:
    """Raises: ConfigError if PyTorch has no kernels for a GPU, or if its users don't fit there."""
    kernels = [match.groups() for arch in report.arches if (match := _KERNELS.fullmatch(arch))]
    where = f"GPU {label} ({gpu.name})"
    major, minor = gpu.capability
    if kernels and not any(
        (int(own), int(least)) <= (major, minor) and (kind == "compute" or int(own) == major)
        for kind, own, least in kernels
    ):
        raise ConfigError(
            f"{where} has compute capability {major}.{minor}, for which PyTorch {report.version} has no "
            f"kernels ({', '.join(report.arches)}); install a build of PyTorch that supports it, or "
            "use another GPU"
        )
    for user in users:
        share = sum(user.shares) * gpu.total
        if 0 < share < user.num_bytes:
            raise ConfigError(
                f"{where}: rollout.engine.gpu_share gives {user.name} {share / 1e9:.1f} GB, but weights and "
                f"KV caches need {(user.num_bytes - share) / 1e9:.1f} GB more; raise it, or lower "
                "rollout.engine.num_slots"
            )
    need = sum(user.num_bytes for user in users)
    if need <= gpu.free:
        return
    names = ", ".join(user.name for user in users)
    text = f"{where} has {gpu.free / 1e9:.1f} of {gpu.total / 1e9:.1f} GB free, but {names} need at least"
    if need > gpu.total:
        advice = (
            "it is too small: use a larger GPU or a smaller model, lower rollout.engine.num_slots, or divide "
            "the model with train.ranks"
        )
    else:
        advice = "other processes take the rest: end them (`nvidia-smi` lists them), or use another GPU"
    raise ConfigError(f"{text} {need / 1e9:.1f} GB, {(need - gpu.free) / 1e9:.1f} GB more; {advice}")


def _check_ranks(recipe: Recipe, report: _GpuReport) -> None:
    """Raises: ConfigError if a trainer's ranks can't exchange data: between slices of a GPU, or for lack of
    shared memory."""
    for name, policy in recipe.trained.items():
        backend = torch_settings(policy.train.backend)
        ranks = policy.train.ranks
        if ranks == 1 or backend is None or not backend.device.startswith("cuda"):
            continue
        where = f"{as_written(f'policies.{name}.train.ranks')} = {ranks}"
        first = int(backend.device.partition(":")[2] or 0)
        if any(" MIG " in gpu.name for gpu in report.gpus[first : first + policy.train.local_ranks]):
            raise ConfigError(
                f"{where}: some of its GPUs are MIG slices, between which NCCL can't communicate; use whole "
                "GPUs, or set train.ranks: 1"
            )
        check_shared_memory(where, policy.train.local_ranks)


def check_shared_memory(where: str, ranks: int, folder: Path = Path("/dev/shm")) -> None:
    """Raises: ConfigError if `folder` is too small for NCCL, unless NCCL is told not to use it."""
    if not folder.is_dir() or os.environ.get("NCCL_SHM_DISABLE") == "1":
        return
    size = shutil.disk_usage(folder).total
    if size < ranks * _SHARED_BYTES:
        raise ConfigError(
            f"{where}: {folder} has only {size / 2**20:.0f} MiB, in which NCCL may hang; start the container "
            "with more (docker run --shm-size=1g), or set NCCL_SHM_DISABLE=1"
        )


def _devices(recipe: Recipe) -> dict[str, tuple[str, int, str]]:
    """Returns the devices of processes on this machine, by their place in the recipe.

    Each one is given by its first device, the number of devices from that one on, and the Python of the
    process.
    """
    devices: dict[str, tuple[str, int, str]] = {}
    for name, policy in recipe.trained.items():
        config = policy.train.backend
        if (backend := torch_settings(config)) is not None:
            own = backend is config or "device" in type(config).model_fields
            where = as_written(f"policies.{name}.train.backend{'' if own else '.torch'}.device")
            named = policy.train.other_python
            python = (
                find_interpreter(named, as_written(f"policies.{name}.train.backend.python")) if named else ""
            )
            devices[where] = (backend.device, policy.train.local_ranks, python)
    engine = recipe.rollout.engine
    if isinstance(engine, TorchEngineConfig) and recipe.has_services_here:
        devices["rollout.engine.device"] = (engine.device, 1, "")
    return devices


def _labels(gpus: Iterable[int | str]) -> list[str]:
    """GPUs as the driver knows them: each number is a position among those that this process sees."""
    names = visible_names()
    return [names[int(gpu)] if str(gpu).isdigit() and int(gpu) < len(names) else str(gpu) for gpu in gpus]


def _lack_text(lacking: Sequence[str], report: _GpuReport) -> str:
    """What to say if PyTorch finds too few GPUs."""
    if report.problem:
        return (
            f"PyTorch {report.version} can't use GPU {len(report.gpus)}: {report.problem.splitlines()[0]}; "
            "if the driver is older than this build of PyTorch, update the driver, or install a build for "
            "its CUDA (`nvidia-smi` shows both)"
        )
    verb = "needs a GPU" if len(lacking) == 1 else "need GPUs"
    has = f"finds {len(report.gpus)} here" if report.gpus else "finds none here"
    build = " (it is a build for CPUs: install one for your CUDA)" if "+cpu" in report.version else ""
    visible = os.environ.get(VISIBLE)
    limits = "" if visible is None else f" among those that {VISIBLE} = {visible!r} lists"
    if any(" MIG " in gpu.name for gpu in report.gpus):
        limits += f" (a process sees one MIG slice, unless {VISIBLE} lists the names of more)"
    return (
        f"{' and '.join(lacking)} {verb}, but PyTorch {has}{build}{limits}. Set device to cpu, or to a GPU "
        "that `astraflow doctor` lists"
    )


def _describe_gpus(python: str = "") -> _GpuReport:
    """Returns the GPUs that the PyTorch of a Python can use; empty: of this one.

    Raises: ConfigError if PyTorch is not installed.
    """
    has_files = sys.platform != "linux" or any((Path("/dev") / name).exists() for name in _GPU_FILES)
    if not has_files and not os.environ.get(VISIBLE):
        return _GpuReport()
    env = {**os.environ, **OWN_MODULES_HIDDEN} if python else None
    output = ask_program([python or sys.executable, "-P", "-c", _DESCRIBE_GPUS], env=env)
    if output.returncode:
        if output.returncode == _NO_TORCH:
            raise ConfigError(install_hint("a recipe that computes on a GPU", ["torch"]))
        raise ConfigError(f"PyTorch cannot report its GPUs: {last_line(output.stderr)}")
    return msgspec.json.decode(last_line(output.stdout), type=_GpuReport)

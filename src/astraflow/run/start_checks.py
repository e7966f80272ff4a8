"""Checks what a run needs from the machine that starts it: GPUs, the engine's requirements, ports,
certificates and the run folder.

The checks start no service and write nothing. They query PyTorch and a server's own Python in short-lived
processes.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from astraflow.config import Config
from astraflow.errors import ConfigError
from astraflow.processes.program import choose_addresses
from astraflow.recipe.access import tls_files
from astraflow.recipe.cluster_config import LocalLauncherConfig
from astraflow.recipe.launcher_variant import LauncherVariant
from astraflow.recipe.recipe import Recipe
from astraflow.recipe.resume import changes_between, refuse_changes, refuse_fewer_steps, steps_done
from astraflow.recipe.run_folder import RunFolder
from astraflow.rollout.engine_config import EngineVariant, TorchEngineConfig
from astraflow.trainer.backend_config import BackendVariant, TorchBackendConfig
from astraflow.user_input.extras import install_hint
from astraflow.user_input.mistakes import hint

__all__ = [
    "ask_program",
    "check_addresses",
    "check_certificates",
    "check_devices",
    "check_engine",
    "check_run_folder",
    "last_line",
]

_DEVICES = ("cpu", "cuda", "hpu", "mps", "npu", "xla", "xpu")
"""Kinds of PyTorch devices on which a model can run."""
_GPU_FILES = ("nvidiactl", "nvidia0", "kfd", "dxg", "nvhost-gpu", "nvmap")
"""Files in /dev that exist if an NVIDIA or AMD GPU can be used, including under WSL and on Jetson."""
_COUNT_GPUS = "import torch; print(torch.cuda.device_count(), torch.__version__)"
_ASK_TIMEOUT_S = 120.0
"""Time limit of these processes: importing torch takes seconds, or a minute on a busy disk."""


def check_devices(recipe: Recipe) -> None:
    """Checks the recipe's devices.

    Raises: ConfigError if a device is misspelled, or is a GPU that this machine lacks.
    """
    needed: dict[str, int] = {}
    for where, (device, num) in _devices(recipe).items():
        kind, _, number = device.partition(":")
        if kind not in _DEVICES or (number and not number.isdigit()):
            expected = hint(kind, _DEVICES) if kind not in _DEVICES else "; expected a number after the colon"
            raise ConfigError(f"{where} = {device!r} is not a device{expected}, e.g. cpu or cuda:0")
        if kind == "cuda":
            needed[f"{where} = {device!r}"] = int(number or 0) + num
    if not needed:
        return
    found, version = _gpus()
    if lacking := [where for where, num in needed.items() if num > found]:
        verb = "needs a GPU" if len(lacking) == 1 else "need GPUs"
        has = f"finds {found} here" if found else "finds none here"
        build = " (it is a build for CPUs: install one for your CUDA)" if "+cpu" in version else ""
        raise ConfigError(
            f"{' and '.join(lacking)} {verb}, but PyTorch {has}{build}. Set device to cpu, or to a GPU that "
            "`astraflow doctor` lists"
        )


def _devices(recipe: Recipe) -> dict[str, tuple[str, int]]:
    """Returns the devices of processes on this machine, by their place in the recipe.

    Each one is given by its first device, and the number of devices from that one on.
    """
    devices: dict[str, tuple[str, int]] = {}
    for name, policy in recipe.trained.items():
        where = f"policies.{name}.train.backend"
        backend: Config = policy.train.backend
        if isinstance(backend, BackendVariant) and backend.computes_with is not None:
            backend = backend.computes_with
            where = f"{where}.torch"
        if isinstance(backend, TorchBackendConfig):
            devices[f"{where}.device"] = (backend.device, policy.train.ranks)
    engine = recipe.rollout.engine
    if isinstance(engine, TorchEngineConfig) and _has_services_here(recipe):
        devices["rollout.engine.device"] = (engine.device, 1)
    return devices


def _has_services_here(recipe: Recipe) -> bool:
    """Returns whether rollout services run on this machine."""
    launcher = recipe.launcher
    starts_here = isinstance(launcher, LocalLauncherConfig) or (
        isinstance(launcher, LauncherVariant) and not launcher.spans_machines
    )
    return starts_here and recipe.max_services > 0


def _gpus() -> tuple[int, str]:
    """Returns the number of GPUs that PyTorch can use, and PyTorch's version.

    Raises: ConfigError if PyTorch is not installed.
    """
    has_files = sys.platform != "linux" or any((Path("/dev") / name).exists() for name in _GPU_FILES)
    if not has_files and not os.environ.get("CUDA_VISIBLE_DEVICES"):
        return 0, ""
    output = ask_program([sys.executable, "-P", "-c", _COUNT_GPUS])
    if output.returncode:
        if "No module named 'torch'" in output.stderr:
            raise ConfigError(install_hint("a recipe that computes on a GPU", ["torch"]))
        raise ConfigError(f"PyTorch cannot report its GPUs: {last_line(output.stderr)}")
    number, version = output.stdout.split()[-2:]
    return int(number), version


def check_engine(recipe: Recipe) -> None:
    """Checks the requirements of the engine. Raises: ConfigError if this machine lacks what it needs."""
    engine = recipe.rollout.engine
    if isinstance(engine, EngineVariant) and _has_services_here(recipe):
        engine.check_machine()


def ask_program(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a short program in the folder `/`, where no file shadows a Python module."""
    try:
        return subprocess.run(
            command, env=env, cwd="/", capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as err:
        raise ConfigError(f"{command[0]} did not answer within {_ASK_TIMEOUT_S:.0f} s") from err


def last_line(text: str) -> str:
    """Returns the last line of a program's output; empty if there is none."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def check_addresses(recipe: Recipe, run_dir: Path) -> None:
    """Checks the ports in the recipe.

    Raises: ConfigError if a port is taken, unless a run that is active in the folder uses it.
    """
    if not RunFolder(run_dir).is_locked:
        choose_addresses(recipe, {})


def check_certificates(recipe: Recipe) -> Iterator[str]:
    """Yields what is wrong with the certificate files."""
    tls = recipe.dataflow.tls
    named = dict(zip(("cert", "key"), tls_files(recipe) or (), strict=False)) | {"ca": tls.ca}
    for key, path in named.items():
        if path and not Path(path).is_file():
            yield f"dataflow.tls.{key} = {path!r}: this file does not exist"


def check_run_folder(recipe: Recipe, run_dir: Path) -> None:
    """Checks the run folder.

    Raises: ConfigError if the folder cannot be written, or belongs to a run of another recipe.
    """
    above = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(
            f"the run folder {run_dir} cannot be created: {above} is a file; choose another --run-dir"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise ConfigError(
            f"the run folder {run_dir} cannot be written: you have no write permission for {above}; choose "
            "another --run-dir"
        )
    folder = RunFolder(run_dir)
    if folder.recipe.is_file():
        refuse_changes(changes_between(folder.load_recipe(), recipe), run_dir)
        refuse_fewer_steps(recipe, steps_done(folder.journal), run_dir)

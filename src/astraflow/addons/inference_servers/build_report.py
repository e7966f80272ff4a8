"""Tells which build of a server a Python has, and what this machine's NVIDIA driver runs.

The server's Python runs this file itself, and so does that of `tools/install_torch.py`, where nothing is
installed yet. So it needs only the standard library.
"""

import contextlib
import ctypes
import glob
import importlib
import importlib.util
import json
import re
import runpy
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["OLDEST_DRIVERS", "driver_version", "gpu_found", "newest_cuda"]

OLDEST_DRIVERS = {12: 525, 13: 580}
"""Major version of CUDA -> oldest driver that runs it. Source: table 1 of
https://docs.nvidia.com/deploy/cuda-compatibility/minor-version-compatibility.html"""
_DEVICES = "/dev/nvidia[0-9]*"
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_VERSION = re.compile(r"\b\d{3,4}\.\d{2,3}(?:\.\d{1,3})?\b")


def gpu_found(devices: str = _DEVICES) -> str:
    """Returns a text that says how an NVIDIA GPU was detected; empty if there is none.

    A driver without a GPU, as on shared login nodes, has `nvidia-smi`, which then fails. A container may have
    the devices without the program.
    """
    if found := sorted(glob.glob(devices)):
        return f"{found[0]} exists"
    listed = _ask_nvidia("-L")
    return f"nvidia-smi lists {listed.partition('(')[0].strip()}" if listed.startswith("GPU ") else ""


def driver_version(file: Path = _DRIVER_FILE) -> str:
    """Returns the driver's version, e.g. `580.65.06`; empty if it is unknown. WSL has only `nvidia-smi`."""
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    found = _VERSION.search(text) or _VERSION.search(
        _ask_nvidia("--query-gpu=driver_version", "--format=csv")
    )
    return found[0] if found else ""


def newest_cuda(driver: str) -> int:
    """Returns the newest major version of CUDA that a driver runs; 0 if it is too old for all."""
    number = int(driver.partition(".")[0])
    return max((cuda for cuda, oldest in OLDEST_DRIVERS.items() if number >= oldest), default=0)


def _ask_nvidia(*options: str) -> str:
    """Returns what `nvidia-smi` prints; empty if there is no such program, or if it fails."""
    if (program := shutil.which("nvidia-smi")) is None:
        return ""
    try:
        done = subprocess.run([program, *options], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def _report(library: str, folder: Path) -> dict[str, Any]:
    """Imports torch only if it is a build for GPUs: that takes seconds, and its version file says so."""
    torch = importlib.util.find_spec("torch")
    file = Path(torch.origin or "").with_name("version.py") if torch else Path()
    build = runpy.run_path(str(file)) if file.is_file() else {}
    packages = (library, f"{library}-cpu")
    versions = [each.version for name in packages for each in metadata.distributions(name=name)]
    version = versions[0] if versions else getattr(importlib.import_module(library), "__version__", "?")
    named = {name: str(build.get(name) or "") for name in ("cuda", "hip")}
    found: dict[str, Any] = {"version": version, "torch": str(build.get("__version__", "")), **named}
    if not any(named.values()):
        return found
    driver = ctypes.c_int(0)
    with contextlib.suppress(AttributeError, OSError):  # a package for forward compatibility may replace this
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(driver))
    found["driver_cuda"] = driver.value // 1000
    try:
        import torch.cuda as devices

        found["gpus"] = [devices.get_device_name(idx) for idx in range(devices.device_count())]
        for path in sorted(folder.glob("_C*.so")):
            ctypes.CDLL(str(path))
    except Exception as err:  # noqa: BLE001 - whatever it is, the server would fail with it
        found["problem"] = (str(err) or type(err).__name__).splitlines()[0]
    return found


if __name__ == "__main__":
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != here]  # modules here would hide others
    spec = importlib.util.find_spec(sys.argv[1])
    own = _report(sys.argv[1], Path(spec.origin or "").parent) if spec else {}
    sys.stdout.write(f"\n{json.dumps(own)}")

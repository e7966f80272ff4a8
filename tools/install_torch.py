"""Installs torch for the Python that runs this program: the build that this machine's GPU and driver run.

    python install_torch.py                   # looks for an NVIDIA GPU and its driver
    python install_torch.py cpu               # the CPU build, with a GPU or without
    python install_torch.py "torch==2.9.1"    # passed to `pip install` unchanged, split as a shell would

On Linux, the torch on PyPI is a build for CUDA 13, which needs driver 580 or newer. PyTorch offers builds for
CUDA 12 and for CPUs on its own indexes, under versions that end in `+cu129` and `+cpu`
(https://pytorch.org/get-started/locally/). CPU builds are looked up where pip is configured to look, then on
that index. If neither has one, a message says so, with the size of what pip installs instead.

`$TORCH_CPU_INDEX` and `$TORCH_CUDA12_INDEX` name other indexes, for example mirrors. `install.py` in this
folder does the installing.
"""

import importlib
import os
import platform
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))  # nothing is installed yet
from astraflow.addons.inference_servers.build_report import (
    OLDEST_DRIVERS,
    driver_version,
    gpu_found,
    newest_cuda,
)

VERSION = "2.13.0"
"""The version that the tests ran with; any torch >= 2.8 works."""
PLAIN = f"torch=={VERSION}"
CPU_BUILD = f"torch=={VERSION}+cpu"
CUDA12_BUILD = f"torch=={VERSION}+cu129"
CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "") or "https://download.pytorch.org/whl/cpu"
CUDA12_INDEX = os.environ.get("TORCH_CUDA12_INDEX", "") or "https://download.pytorch.org/whl/cu129"
SIZE = "about 2.7 GB"
"""Size of what pip downloads for the CUDA build on x86-64: torch itself and NVIDIA's libraries."""

_INSTALL = (sys.executable, str(Path(__file__).with_name("install.py")))
_ANSWERS_WITHIN_S = 10.0


def main(arguments: Sequence[str]) -> int:
    """Installs torch and prints which build it is; returns pip's exit code."""
    chosen = shlex.split(" ".join(arguments))
    if chosen and chosen != ["cpu"]:
        code = _pip(*chosen)
    elif not chosen and (gpu := gpu_found()):
        cuda = cuda_of_machine()
        packages = (CUDA12_BUILD, "--extra-index-url", CUDA12_INDEX) if cuda == 12 else (PLAIN,)
        print(
            f"torch: {gpu}; installing {packages[0]}, a build for CUDA {cuda}, {SIZE} (TORCH=cpu: a CPU "
            "build)",
            flush=True,
        )
        code = _pip(*packages)
    elif platform.system() != "Linux":
        code = _pip(PLAIN)  # PyPI's builds for other systems have no CUDA
    else:
        print(f"torch: installing the CPU build {CPU_BUILD}", flush=True)
        code = _install_cpu_build()
    if code == 0:
        importlib.invalidate_caches()
        print(f"torch: {version('torch')} is installed")
    return code


def cuda_of_machine() -> int:
    """Returns the major version of CUDA whose builds this machine's driver runs; the newest if the driver's
    version is unknown.

    Raises: SystemExit if the driver is too old for all of them.
    """
    driver = driver_version()
    if not driver:
        return max(OLDEST_DRIVERS)
    if cuda := newest_cuda(driver):
        return cuda
    oldest = ", ".join(f"CUDA {cuda} needs {driver} or newer" for cuda, driver in OLDEST_DRIVERS.items())
    raise SystemExit(
        f"the NVIDIA driver is {driver}, which is too old for every build ({oldest}); update the driver, or "
        "install CPU builds: TORCH=cpu for torch, VLLM=cpu for vLLM"
    )


def _install_cpu_build() -> int:
    """Installs the CPU build from where pip looks, otherwise from PyTorch's index, otherwise whatever pip
    finds."""
    code = _pip_unless_missing(CPU_BUILD)
    if code is None:
        print(f"torch: pip does not find it where it is configured to look; trying {CPU_INDEX}", flush=True)
        # The index is an additional one, because a mirror may lack torch's dependencies. No other index has
        # exactly this version.
        code = _pip_unless_missing(CPU_BUILD, "--extra-index-url", CPU_INDEX)
    if code is not None:
        return code
    print(
        f"torch: {why_not(CPU_INDEX)}. Installing the {PLAIN} that pip finds: from PyPI, a CUDA build, "
        f"{SIZE}. Ctrl-C stops it. A CPU build from elsewhere: TORCH_CPU_INDEX=URL for an index, "
        'PIP_FIND_LINKS=FOLDER for downloaded wheels. Another version: TORCH="torch==2.9.1"',
        flush=True,
    )
    code = _pip(PLAIN)
    if code != 0:
        print(f"torch: not installed; pip found no {PLAIN} for {_here()}, or could not install it")
    return code


def _pip(*arguments: str) -> int:
    """Runs `pip install`; returns its exit code."""
    return subprocess.run([*_INSTALL, *arguments], check=False).returncode


def _pip_unless_missing(*arguments: str) -> int | None:
    """Runs `pip install`. Returns its exit code, or None if pip doesn't find such a distribution.

    Any other failure is shown and final. For example, a full disk must not lead to a larger download.
    """
    done = subprocess.run([*_INSTALL, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0 and "No matching distribution found for torch" in done.stderr:
        return None
    sys.stderr.write(done.stderr)
    return done.returncode


def why_not(index: str) -> str:
    """Explains why pip got no CPU build from an index: it didn't respond, or it has none for this machine."""
    page = f"{index.rstrip('/')}/torch/"
    try:
        with urllib.request.urlopen(page, timeout=_ANSWERS_WITHIN_S):
            return f"{page} has no {CPU_BUILD} for {_here()}"
    except urllib.error.HTTPError as err:
        return f"{page} answers {err.code}"
    except (OSError, ValueError) as err:
        return f"{page} cannot be reached ({getattr(err, 'reason', err)})"


def _here() -> str:
    """Describes what a wheel must be compatible with."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"Python {python} on {platform.system()} {platform.machine()}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

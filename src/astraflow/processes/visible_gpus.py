"""Gives each rank of a trainer, and each rollout service, its GPUs.

A rank that sees several GPUs takes memory of the first one, whichever it computes on, because each new
thread starts there. So each rank sees only its own GPU, as `cuda:0`: the rank-th from the configured one on.
GPUs are counted among those that this process sees, which a scheduler may have limited.
"""

import os
from collections.abc import Sequence

from astraflow.errors import ConfigError

__all__ = ["gpu_variables", "visible_variables"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_variables(device: str, rank: int) -> dict[str, str]:
    """The environment variables that hide all GPUs except a rank's own; none for a CPU.

    They must be set before a library asks the driver for its GPUs.
    Raises: ConfigError if this process sees too few GPUs.
    """
    kind, _, number = device.partition(":")
    return visible_variables([str(int(number or 0) + rank)]) if kind == "cuda" else {}


def visible_variables(gpus: Sequence[str]) -> dict[str, str]:
    """The environment variables that leave a process only these GPUs: numbers, or the driver's names.

    Raises: ConfigError if this process doesn't see one of the numbers.
    """
    listed = os.environ.get(_VISIBLE)
    if listed is None:
        return {_VISIBLE: ",".join(gpus)}
    visible = [name.strip() for name in listed.split(",") if name.strip()]
    for gpu in gpus:
        if gpu.isdigit() and int(gpu) >= len(visible):
            raise ConfigError(
                f"GPU {gpu} is not among the {len(visible)} that {_VISIBLE} = {listed!r} lists; use lower "
                "numbers or fewer ranks, or let the run see more GPUs"
            )
    return {_VISIBLE: ",".join(visible[int(gpu)] if gpu.isdigit() else gpu for gpu in gpus)}

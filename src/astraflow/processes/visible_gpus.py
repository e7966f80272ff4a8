"""Gives each rank of a trainer, and each rollout service, its GPUs.

A rank that sees several GPUs takes memory of the first one, whichever it computes on, because each new
thread starts there. So each rank sees only its own GPU, as `cuda:0`: the rank-th from the configured one on.
GPUs are counted among those that this process sees, which a scheduler may have limited.
"""

import os
from collections.abc import Sequence

from astraflow.errors import ConfigError

__all__ = ["VISIBLE", "gpu_variables", "visible_names", "visible_variables"]

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The variable with which a scheduler limits the GPUs that a process sees."""


def visible_names() -> list[str]:
    """The numbers or names of the GPUs to which this process is limited; empty without a limit or a GPU."""
    return [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]


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
    listed = os.environ.get(VISIBLE)
    if listed is None:
        return {VISIBLE: ",".join(gpus)}
    visible = visible_names()
    for gpu in gpus:
        if gpu.isdigit() and int(gpu) >= len(visible):
            raise ConfigError(
                f"GPU {gpu} is not among the {len(visible)} that {VISIBLE} = {listed!r} lists; use lower "
                "numbers or fewer ranks, or let the run see more GPUs"
            )
    return {VISIBLE: ",".join(visible[int(gpu)] if gpu.isdigit() else gpu for gpu in gpus)}

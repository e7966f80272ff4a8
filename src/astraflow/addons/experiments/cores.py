"""The number of cores that this process may use."""

import os
from contextlib import suppress

from astraflow.service.memory import control_groups

__all__ = ["num_cores"]


def num_cores() -> int:
    """Returns the number of cores in the process's affinity, or fewer if a control group has a quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in control_groups():
        with suppress(OSError, ValueError):  # without a quota, the file says "max"
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores

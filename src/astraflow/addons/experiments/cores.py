"""The number of cores that this process may use."""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from astraflow.service.memory import control_groups

__all__ = ["num_cores"]

_VERSION_1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def num_cores(groups: Iterable[Path] = ()) -> int:
    """Returns the number of cores in the process's affinity, or fewer if a control group has a quota.

    `groups`: folders of the process's control groups; empty: looked up.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for folder in groups or control_groups("cpu"):
        with suppress(OSError, ValueError):  # without a quota, the file says "max"
            names = ("cpu.max",) if (folder / "cpu.max").exists() else _VERSION_1
            texts = [(folder / name).read_text(encoding="ascii") for name in names]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0:  # version 1 says -1 without a quota
                cores = min(cores, max(1, quota // period))
    return cores

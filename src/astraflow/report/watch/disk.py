"""Measures the free space on a run folder's disk, and estimates the size of the next checkpoints."""

import shutil
from pathlib import Path

from astraflow.recipe.run_folder import RunFolder
from astraflow.report.watch.run_snapshot import Disk

__all__ = ["DiskGauge"]


class DiskGauge:
    """Example: `DiskGauge(RunFolder(path)).measure()`. Each checkpoint is measured only once."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._sizes: dict[Path, int] = {}
        """Path of each policy's newest checkpoint -> its size in bytes."""

    def measure(self) -> Disk | None:
        """The state of the disk now; None if the system can't report it."""
        try:
            free_bytes = shutil.disk_usage(self._folder.path).free
            policies = [sorted(policy.glob("step-*")) for policy in self._folder.checkpoints.glob("*/")]
            newest = [steps[-1] for steps in policies if steps]
            self._sizes = {path: self._sizes.get(path) or _size(path) for path in newest}
        except OSError:
            return None
        return Disk(str(self._folder.path), free_bytes, sum(self._sizes.values()))


def _size(folder: Path) -> int:
    """Bytes in a folder; 0 if it is being deleted at this moment."""
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except OSError:
        return 0

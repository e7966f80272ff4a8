"""The memory and the disk space that are free, compared with what a conversion needs, before it starts."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from astraflow.errors import DataError
from astraflow.service.memory import available_bytes

__all__ = ["FreeSpace", "check_disk", "check_memory", "measure_capacity"]

_PROCESS_BYTES = 600e6
"""Memory of the process itself: Python, torch, transformers, and a tokenizer."""
_BYTES_PER_WEIGHT = 2
"""Size of a weight in bfloat16."""
_BYTES_PER_READ_WEIGHT = 8
"""Memory per weight of the tensor that is being read: its float32 values, and a copy of them."""


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """What is free, in bytes."""

    memory_bytes: float
    disk_bytes: float


def measure_capacity(folder: Path) -> FreeSpace:
    """Measures the memory that this process may still take, and the free disk space where a folder is or
    will be."""
    existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.is_dir())
    return FreeSpace(available_bytes(), shutil.disk_usage(existing).free)


def check_memory(what: str, capacity: FreeSpace, *, num_weights: int, largest: int) -> None:
    """Raises: DataError if a model doesn't fit into memory. `largest`: the weights of its largest tensor."""
    reading = _BYTES_PER_READ_WEIGHT * largest + _PROCESS_BYTES
    needed = _BYTES_PER_WEIGHT * num_weights + reading
    if needed > capacity.memory_bytes:
        fits = max(capacity.memory_bytes - reading, 0) / _BYTES_PER_WEIGHT
        raise DataError(
            f"{what} has {num_weights / 1e6:,.0f} million weights, whose conversion takes "
            f"{needed / 1e9:.1f} GB of memory, and {capacity.memory_bytes / 1e9:.1f} GB are free; end other "
            f"programs, or use a model with at most {fits / 1e6:,.0f} million weights"
        )


def check_disk(what: str, capacity: FreeSpace, folder: Path, *, needed_bytes: float) -> None:
    """Raises: DataError if a folder doesn't fit on its disk."""
    if needed_bytes > capacity.disk_bytes:
        raise DataError(
            f"{what} takes {needed_bytes / 1e9:.2f} GB of disk space in {folder.resolve().parent}, and "
            f"{capacity.disk_bytes / 1e9:.2f} GB are free; free some space, or choose another disk with --out"
        )

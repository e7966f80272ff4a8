"""A reward that ends the process that computes it, for some tasks."""

import sys
import zlib

from astraflow.types import Task

__all__ = ["exits_at_times"]


def exits_at_times(task: Task, text: str) -> float:
    """Exact match, but one task in fifty calls `exit()`."""
    if zlib.crc32(task.id.encode()) % 50 == 0 and not task.source.startswith("heldout"):
        sys.exit()
    return float(text.strip() == task.answer)

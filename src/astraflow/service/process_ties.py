"""Ties between a process, its parent and its orphans, which the kernel of Linux keeps. Elsewhere, there are
none, and these functions do nothing."""

import ctypes
import signal
import sys

__all__ = ["adopt_orphans", "die_with_parent"]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""Numbers of options of `prctl`."""


def die_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def adopt_orphans(*, is_wanted: bool = True) -> None:
    """Makes descendants of this process become its children when their own parents end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted))

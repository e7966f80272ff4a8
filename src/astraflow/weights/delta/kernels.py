"""Chooses the code that computes deltas: compiled by numba if it is worth loading, else numpy."""

import functools
import importlib.util
import logging

from astraflow.user_input.installed import find_entries, load_entry
from astraflow.weights.delta import planes
from astraflow.weights.delta.planes import Kernel

__all__ = ["NUMPY", "choose_kernel"]

_log = logging.getLogger(__name__)

NUMPY: Kernel = planes
"""The kernel that is always available. It gives the same bytes as numba, about half as fast."""

_WORTH_BYTES = 64 * 1024 * 1024
"""Loading numba takes a second, in which numpy encodes this much."""


def choose_kernel(num_bytes: int) -> Kernel:
    """The kernel for versions of this size."""
    return _best() if num_bytes >= _WORTH_BYTES else NUMPY


@functools.cache
def _best() -> Kernel:
    has_numba = importlib.util.find_spec("numba") is not None
    added = find_entries("astraflow.kernels").select(name="deltas") if has_numba else ()
    if found := next(filter(None, map(load_entry, added)), None):
        return found
    _log.info("without numba, numpy encodes deltas about half as fast; pip install 'astraflow[fast]'")
    return NUMPY
